"""Changes of shape: each is the same change of the slice, wherever the sequence's dim goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from smp_runtime.context.copies import note_copy
from smp_runtime.context.layout import view_dim
from smp_runtime.context.rules.pointwise import align
from smp_runtime.context.sequence import ShardedSequence, compute_whole, rule

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _numbers(args: _Args) -> list[int]:
    """Return sizes or dims that a function takes as one sequence or one by one."""
    return [int(size) for size in (args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args)]


@rule("view", "reshape", "view_as", "reshape_as", "unflatten", "flatten", "ravel")
def _view(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    if func.__name__ == "view" and (kwargs or (len(args) == 2 and isinstance(args[1], torch.dtype))):
        return NotImplemented
    target = _target(func.__name__, sequence, args[1:], kwargs)
    found = view_dim(tuple(sequence.shape), target, sequence.dim_held, sequence.sequence_layout)
    if found is None:
        return _as_copy(func.__name__, func, args, kwargs)
    dim, layout = found
    local_shape = list(target)
    local_shape[dim] = layout.local_size(sequence.group.rank)
    local = sequence.local
    changed = local.view(local_shape) if func.__name__ in ("view", "view_as") else local.reshape(local_shape)
    return sequence.like(changed, dim, layout)


def _as_copy(name: str, func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    """Compute a view on whole tensors; writes to the result cannot reach the sequence."""
    made = compute_whole(name, func, args, kwargs)
    parts = made if isinstance(made, tuple | list) else (made,)
    if isinstance(args[0], ShardedSequence):
        for part in parts:
            note_copy(args[0], part)
    return made


@rule(
    "as_strided",
    "unfold",
    "diagonal",
    "get:mH",
    "get:H",
    "adjoint",
    "squeeze_",
    "unsqueeze_",
)
@rule("swapdims_", "transpose_", "t_", "resize_", "set_", "get:real", "get:imag", "detach_copy")
def _view_of_whole(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    return _as_copy(func.__name__, func, args, kwargs)


def _target(name: str, sequence: ShardedSequence, args: _Args, kwargs: _Kwargs) -> tuple[int, ...]:
    """Return the whole shape that a change of shape leads to."""
    shape = list(sequence.shape)
    if name in ("view_as", "reshape_as"):
        return tuple(args[0].shape)
    if name == "ravel":
        return (math.prod(shape),)
    if name == "flatten":
        bounds = {"start_dim": 0, "end_dim": -1, **dict(zip(("start_dim", "end_dim"), args, strict=False)), **kwargs}
        start, end = (bounds[key] % len(shape) for key in ("start_dim", "end_dim"))
        return (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])
    if name == "unflatten":
        given = {**dict(zip(("dim", "sizes"), args, strict=False)), **kwargs}
        dim = given["dim"] % len(shape)
        return (*shape[:dim], *_without_minus(given["sizes"], shape[dim]), *shape[dim + 1 :])
    wanted = kwargs.get("shape", kwargs.get("size"))
    return _without_minus(_numbers(args) if wanted is None else list(wanted), math.prod(shape))


def _without_minus(sizes: Sequence[int], elements: int) -> tuple[int, ...]:
    known = math.prod(size for size in sizes if size != -1)
    return tuple(elements // known if size == -1 else size for size in sizes)


@rule("view_as_real", "view_as_complex")
def _view_as_pairs(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    if func.__name__ == "view_as_complex" and sequence.dim_held == sequence.dim() - 1:
        return _as_copy(func.__name__, func, args, kwargs)
    return sequence.like(func(sequence.local))


@rule("permute")
def _permute(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    wanted = kwargs.get("dims")
    dims = [one % sequence.dim() for one in (_numbers(args[1:]) if wanted is None else wanted)]
    return sequence.like(sequence.local.permute(dims), dims.index(sequence.dim_held))


@rule("transpose", "swapaxes", "swapdims", "t", "get:T", "get:mT", "moveaxis", "movedim")
def _transpose(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    # The slice of a tensor with as many dims shows where each goes.
    places = torch.empty(tuple(range(2, sequence.dim() + 2)), device="meta")
    moved = func(places, *args[1:], **kwargs)
    return sequence.like(func(sequence.local, *args[1:], **kwargs), list(moved.shape).index(sequence.dim_held + 2))


@rule("unsqueeze")
def _unsqueeze(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    dim = int(kwargs["dim"] if "dim" in kwargs else args[1]) % (sequence.dim() + 1)
    return sequence.like(sequence.local.unsqueeze(dim), sequence.dim_held + (dim <= sequence.dim_held))


@rule("squeeze")
def _squeeze(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    shape = sequence.shape
    wanted: Any = [dim] if isinstance(dim, int) else dim
    if dim is None:
        wanted = range(len(shape))
    gone = sorted({one % len(shape) for one in wanted if shape[one] == 1})
    local = sequence.local
    if gone:
        local = local.squeeze(gone)
    before = [one for one in gone if one < sequence.dim_held]
    return sequence.like(local, sequence.dim_held - len(before))


@rule("expand", "expand_as", "broadcast_to")
def _expand(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    if not isinstance(sequence, ShardedSequence):  # ``whole.expand_as(sequence)``
        return func(sequence, args[1].shape) if func.__name__ == "broadcast_to" else sequence.expand(args[1].shape)
    target = list(args[1].shape) if func.__name__ == "expand_as" else list(kwargs.get("size", ())) or _numbers(args[1:])
    dim = sequence.dim_held + len(target) - sequence.dim()
    if target[dim] not in (-1, sequence.shape[sequence.dim_held]):  # one position becomes many
        return _as_copy(func.__name__, func, args, kwargs)
    target[dim] = sequence.local.shape[sequence.dim_held]
    return sequence.like(sequence.local.expand(target), dim)


@rule("repeat", "tile")
def _repeat(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence, times = args[0], _numbers(args[1:])
    dim = sequence.dim_held - sequence.dim()
    if kwargs or (len(times) >= -dim and times[dim] != 1):
        return NotImplemented
    repeated = func(sequence.local, times)
    return sequence.like(repeated, repeated.dim() + dim)


@rule("repeat_interleave")
def _repeat_each(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(sequence, ShardedSequence) or dim is None or dim % sequence.dim() == sequence.dim_held:
        return NotImplemented
    return sequence.like(func(sequence.local, *args[1:], **kwargs))


@rule(
    "split", "chunk", "unbind", "tensor_split", "split_with_sizes", "hsplit", "vsplit", "unsafe_chunk", "unsafe_split"
)
def _split(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    sequence = args[0]
    if not isinstance(sequence, ShardedSequence) or func.__name__ in ("hsplit", "vsplit"):
        return _as_copy(func.__name__, func, args, kwargs)
    place = 1 if func.__name__ == "unbind" else 2
    dim = int(kwargs["dim"] if "dim" in kwargs else (*args, 0, 0)[place]) % sequence.dim()
    if dim == sequence.dim_held:
        return _as_copy(func.__name__, func, args, kwargs)
    parts = func(sequence.local, *args[1:], **kwargs)
    held = sequence.dim_held - (func.__name__ == "unbind" and dim < sequence.dim_held)
    return tuple(sequence.like(part, held) for part in parts)


@rule("cat", "concat", "concatenate", "stack")
def _join(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    stacks = func.__name__ == "stack"
    given: list[torch.Tensor] = list(args[0] if args else kwargs["tensors"])
    # Caches begin with an empty vector, which PyTorch leaves out.
    parts = given if stacks else [part for part in given if part.dim() != 1 or part.numel()]
    first = next(part for part in parts if isinstance(part, ShardedSequence))
    if len(parts) == 1 and not stacks:
        return first
    dim = _dim_of(args, kwargs) % (first.dim() + stacks)
    if "out" in kwargs:
        return NotImplemented
    if dim == first.dim_held and not stacks:
        return _join_positions(parts, first)
    if any(part.dim() != first.dim() or part.shape[first.dim_held] != first.shape[first.dim_held] for part in parts):
        return NotImplemented
    held = first.dim_held - first.dim()
    joined = func([align(part, first.sequence_layout, held, first, func.__name__) for part in parts], dim)
    return first.like(joined, first.dim_held + (stacks and dim <= first.dim_held))


def _join_positions(parts: list[torch.Tensor], first: ShardedSequence) -> Any:
    """Join slices that follow each other, or one sequence and whole tensors before and behind it."""
    dim, sequences = first.dim_held, [part for part in parts if isinstance(part, ShardedSequence)]
    layout = first.sequence_layout
    are_plain = all(one.dim_held == dim and one.sequence_layout == one.sequence_layout.base for one in sequences)
    if not are_plain or any(part.dim() != first.dim() for part in parts):
        return NotImplemented
    if len(sequences) == len(parts):
        followed = layout.followed_by([part.sequence_layout for part in sequences[1:]])
        if followed is None:
            return NotImplemented
        return first.like(torch.cat([part.local for part in sequences], dim), layout=followed)
    # Keys of generated tokens come one at a time: whole ones serve all that follow.
    if len(sequences) > 1 or not layout.length or not torch.is_grad_enabled():
        return NotImplemented
    place = next(number for number, part in enumerate(parts) if isinstance(part, ShardedSequence))
    counts = [sum(part.shape[dim] for part in some) for some in (parts[:place], parts[place + 1 :])]
    padded = layout.padded(*counts)
    here = padded.positions[first.group.rank]
    has_first = bool((here < counts[0]).any())
    has_last = len(here) > counts[0] * has_first + first.local.shape[dim]
    # Of what another rank has, nothing, with a graph: all ranks take part in backward.
    held = [part if has_first else part.narrow(dim, 0, 0) for part in parts[:place]]
    held += [first.local, *(part if has_last else part.narrow(dim, 0, 0) for part in parts[place + 1 :])]
    return first.like(torch.cat(held, dim), layout=padded)


def _dim_of(args: _Args, kwargs: _Kwargs) -> int:
    if len(args) > 1:
        return int(args[1])
    return int(kwargs["dim"] if "dim" in kwargs else kwargs.get("axis", 0))


@rule("F.pad", "pad", "constant_pad_nd")
def _pad(func: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> Any:
    given = {"mode": "constant", **dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    sequence, widths = given["input"], list(given["pad"])
    place = 2 * (sequence.dim() - 1 - sequence.dim_held)
    before, after = (*widths, *[0] * (place + 2))[place : place + 2]
    layout = sequence.sequence_layout
    if given["mode"] != "constant":
        return NotImplemented
    if not before and not after:
        return sequence.like(torch.nn.functional.pad(sequence.local, widths, value=given.get("value")))
    start, stop = max(0, -before), layout.length - max(0, -after)
    if layout.outer != 1 or layout.inner != 1 or start >= stop:
        return NotImplemented
    if stop - start < layout.length:  # negative widths leave positions out
        sequence = sequence.narrow(sequence.dim_held, start, stop - start)
    layout = sequence.sequence_layout.padded(max(0, before), max(0, after))
    # The rank of the first position holds those before it, and that of the last one those after it.
    here = layout.positions[sequence.group.rank]
    added = int((here < before).sum())
    widths[place : place + 2] = added, len(here) - added - sequence.local.shape[sequence.dim_held]
    padded = torch.nn.functional.pad(sequence.local, widths, value=given.get("value"))
    return sequence.like(padded, layout=layout)
