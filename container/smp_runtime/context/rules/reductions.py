"""Operations along dims: over other dims than the sequence's on slices, sums over positions with one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.layout import of_runs
from smp_runtime.context.rules.pointwise import compute_pointwise
from smp_runtime.context.sequence import ShardedSequence, rule
from smp_runtime.tensors.torch_private import tree_map

#: Operations along one dim that keep it, with the place of ``dim`` among their arguments and its default.
_ALONG = {
    "softmax": (1, None),
    "log_softmax": (1, None),
    "softmin": (1, None),
    "cumsum": (1, None),
    "cumprod": (1, None),
    "logcumsumexp": (1, None),
    "sort": (1, -1),
    "argsort": (1, -1),
    "topk": (2, -1),
    "glu": (1, -1),
    "flip": (1, None),
    "roll": (2, None),
    "normalize": (2, 1),
    "cummax": (1, None),
    "cummin": (1, None),
}

#: Operations that sum up or choose along dims.
_REDUCING = (
    "sum mean any all count_nonzero amax amin prod logsumexp var std norm max min argmax argmin "
    "median nansum nanmean var_mean std_mean nanmedian mode aminmax vector_norm"
).split()


@rule(*_ALONG, *(f"F.{name}" for name in _ALONG))
def _run_along(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = args[0] if args else kwargs.get("input")
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    place, default = _ALONG[func.__name__]
    dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if func.__name__ == "flip" and isinstance(dim, int):  # its dims may come one by one
        dim = args[1:]
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, list | tuple):
        return NotImplemented
    if sequence.dim_held in [one % sequence.dim() for one in dims]:
        more = {key for key in kwargs if key != "dim"} or len(args) > place + 1
        return sum_before(sequence) if func.__name__ == "cumsum" and not more else NotImplemented
    result = func(*_local(args), **_local(kwargs))
    return tree_map(lambda leaf: sequence.like(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


def sum_before(sequence: ShardedSequence) -> Any:
    """Return the cumulative sums along the sequence; each run of positions tells the others its sum."""
    layout, dim = sequence.sequence_layout, sequence.dim_held
    if layout.outer != 1 or layout.inner != 1:
        return NotImplemented
    runs, shared = layout.runs()[sequence.group.rank], of_runs(layout)
    parts = [part.cumsum(dim) for part in sequence.local.split([len(run) for run in runs], dim)]
    totals = [part.narrow(dim, part.shape[dim] - 1, 1) for part in parts]
    local = torch.cat(parts, dim) if parts else sequence.local.cumsum(dim)
    own = torch.cat(totals, dim) if totals else local
    everyone = sequence.group.gather(own, dim, shared)
    # The sums of all runs that come before each run, on whatever rank.
    before = everyone.cumsum(dim) - everyone
    mine = before.index_select(dim, shared.positions[sequence.group.rank].to(local.device))
    lengths = torch.tensor([len(run) for run in runs], dtype=torch.int64, device=local.device)
    return sequence.like(local + mine.repeat_interleave(lengths, dim, output_size=local.shape[dim]))


def _local(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.local if isinstance(leaf, ShardedSequence) else leaf, value)


#: Arguments by name that do not change which dims are reduced, and ``dim`` itself.
_KNOWN = {"input", "dim", "keepdim", "dtype", "other", "correction", "unbiased", "p", "ord"}


@rule(*_REDUCING)
def _reduce(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = args[0] if args else kwargs.get("input")
    if kwargs.get("out", sequence) is None:  # as ``torch.norm`` passes it on
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    if not kwargs.keys() <= _KNOWN:
        return NotImplemented
    if not isinstance(sequence, ShardedSequence):
        is_of_two = func.__name__ in ("max", "min") and len(args) == 2
        return compute_pointwise(func, args, kwargs) if is_of_two else NotImplemented
    name = func.__name__
    place = 2 if name in ("norm", "vector_norm") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else None)
    if isinstance(dim, torch.Tensor) or isinstance(kwargs.get("other"), torch.Tensor):  # ``max(other)``
        return compute_pointwise(func, args, kwargs)
    if isinstance(dim, bool):  # ``std(unbiased)``
        return NotImplemented
    dims: Any = [dim] if isinstance(dim, int) else dim
    if dim is None or dim == ():
        dims = range(sequence.dim())
    reduced = {one % sequence.dim() for one in dims}
    if sequence.dim_held in reduced:
        return _reduce_positions(name, func, args, kwargs, sequence, reduced)
    return _reduce_others(func, args, kwargs, sequence, reduced)


def _reduce_others(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sequence: ShardedSequence,
    reduced: set[int],
) -> Any:
    result = func(*_local(args), **_local(kwargs))
    before = sum(one < sequence.dim_held for one in reduced)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return sequence.like(leaf, sequence.dim_held if leaf.dim() == sequence.dim() else sequence.dim_held - before)

    return tree_map(wrap, result)


def _reduce_positions(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sequence: ShardedSequence,
    reduced: set[int],
) -> Any:
    local, group = sequence.local, sequence.group
    if name in ("sum", "mean"):
        dtype = kwargs.get("dtype") or (local.dtype if local.is_floating_point() else None)
        # As in one process, numbers of half precision are added up in float32: a sum of many may be none of their type.
        wide = {**kwargs, "dtype": torch.float32} if dtype in (torch.float16, torch.bfloat16) else kwargs
        total = group.sum(torch.sum(local, *args[1:], **wide))
        elements = math.prod(sequence.shape[one] for one in reduced)
        found = total if name == "sum" else total / elements
        return found if dtype is None else found.to(dtype)
    if name == "count_nonzero":
        return group.sum(func(local, *args[1:], **kwargs))
    if name in ("any", "all"):
        # All are true if none is false.
        seen = local if name == "any" else torch.logical_not(local)
        found = group.sum(torch.any(seen, *args[1:], **kwargs).to(torch.int32)) > 0
        return found if name == "any" else ~found
    return NotImplemented


@rule("F.layer_norm", "F.rms_norm")
def _normalize(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = args[0] if args else kwargs.get("input")
    shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    if not isinstance(sequence, ShardedSequence) or shape is None:
        return NotImplemented
    if sequence.dim_held >= sequence.dim() - len(shape):
        return NotImplemented
    return sequence.like(func(*_local(args), **_local(kwargs)))
