"""A check that the ranks of a group get one batch with ``prescaled_batch``, in case a script shards it otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.lazy_tensor import LazyTensor

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from smp_runtime.tensor_parallel.group import TensorGroup

#: Forward passes of the wrapped module that are looked at.
_PASSES = 3
#: Elements of a floating point tensor that are compared.
_SAMPLE = 512

#: Shape, type, and a fingerprint of the values: a checksum, or some of them.
_Summary = tuple[tuple[int, ...], str, int | list[float]]


class PrescaledBatchCheck:
    """A hook on a module's first forward passes that raises an error on every rank if the inputs differ.

    Whole numbers are compared by a checksum, floating point numbers by a sample of the elements, which may differ by
    rounding.

    Args:
        group: the ranks that must have the same inputs.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._left = _PASSES
        self._handle: RemovableHandle | None = None

    def watch(self, module: nn.Module) -> None:
        """Begin with the next call of ``module``."""
        self._handle = module.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the arguments of ``module`` between the ranks; PyTorch's hook."""
        group, ranks = self._group, self._group.ranks
        if group.is_tracing:
            return
        self._left -= 1
        if self._left <= 0 and self._handle is not None:
            self._handle.remove()
        mine = {name: _summary(tensor) for name, tensor in (*_tensors("", args), *_tensors("", kwargs))}
        members = ranks.members(Group.TP)
        every = ranks.control.allgather(mine, members)
        for rank, theirs in zip(members[1:], every[1:], strict=True):
            names = [name for name in {**every[0], **theirs} if not _alike(every[0].get(name), theirs.get(name))]
            if names:
                raise SMPUserError(
                    f"prescaled_batch is true, so the ranks {members} of a tensor parallel group share a batch, but rank {rank} "
                    f"called the model with another one than rank {members[0]} ({_listed(names, every[0], theirs)}): shard the "
                    f"data by smp.rdp_rank() of smp.rdp_size(), which is {ranks.size(Group.RDP)} here, not by dp_rank, or set "
                    "prescaled_batch to false",
                    code="SMP307",
                )


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        # A result that is still on its way must not be waited for, and a meta tensor has no values.
        has_values = not isinstance(value, LazyTensor) and not value.is_meta
        if has_values and value.layout is torch.strided:
            yield path, value
        return
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        inner = f"{path}.{key}" if path else str(key)
        yield from _tensors(inner, child)


@torch.no_grad()
def _summary(tensor: torch.Tensor) -> _Summary:
    flat = tensor.detach().reshape(-1)
    about = tuple(tensor.shape), str(tensor.dtype)
    if tensor.is_complex() or not flat.numel():
        return *about, 0
    if tensor.is_floating_point():
        return *about, flat[:: -(-flat.numel() // _SAMPLE)].double().tolist()
    # 64-bit sums wrap around. A factor for each position makes the sum depend on the order.
    places = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device) * 0x5851F42D4C957F2D + 1
    return *about, int((flat.to(torch.int64) * places).sum())


def _alike(one: _Summary | None, other: _Summary | None) -> bool:
    if one is None or other is None or one[:2] != other[:2]:
        return one == other
    if not isinstance(one[2], list):
        return one == other
    mine = torch.tensor(one[2], device="cpu")
    theirs = torch.tensor(other[2], device="cpu")
    scale = float(mine.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(mine, theirs, rtol=1e-2, atol=1e-3 * scale, equal_nan=True)


def _listed(names: list[str], one: Mapping[str, _Summary], other: Mapping[str, _Summary]) -> str:
    parts = []
    for name in names[:3]:
        shapes = []
        for found in (one, other):
            shapes.append(str(list(found[name][0])) if name in found else "none")
        first, second = shapes
        differs = "other values" if first == second else f"{second} for {first}"
        parts.append(f"argument {name}: {differs}")
    more = len(names) - len(parts)
    if more:
        parts.append(f"and {more} more")
    return "; ".join(parts)
