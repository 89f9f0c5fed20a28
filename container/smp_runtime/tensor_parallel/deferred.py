"""Tensors that stay split over the ranks of a group until they are used, such as attention weights per head.

Most callers drop them. A block that gets one from another block with the same split needs only its own part.
Any other use of such a tensor gathers it first, on all ranks of the group, since they all run the same script.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import map_leaves

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup


@dataclass
class _RankParts:
    """What the ranks have of a tensor.

    Attributes:
        mine: this rank's slice along ``dim``.
        by_rows: the whole is wanted of this rank's rows (dim 0) alone.
    """

    mine: torch.Tensor
    group: TensorGroup
    dim: int
    by_rows: bool = False

    @property
    def shape(self) -> list[int]:
        shape = list(self.mine.shape)
        shape[self.dim] *= self.group.size
        if self.by_rows:
            shape[0] //= self.group.size
        return shape

    def joined(self) -> torch.Tensor:
        if self.by_rows:
            return self.group.exchange(self.mine.detach(), 0, self.dim)
        return self.group.gather(self.mine.detach(), self.dim)

    def parted(self, whole: torch.Tensor) -> torch.Tensor:
        return self.group.exchange(whole, self.dim, 0) if self.by_rows else self.group.slice(whole, self.dim)


class Deferred(LazyTensor):
    """A tensor that is gathered when it is used."""

    parts: _RankParts

    @staticmethod
    def __new__(cls, parts: _RankParts) -> Deferred:
        """Create a tensor without memory of its own."""
        made = cls.like(parts.shape, parts.mine.dtype, parts.mine.device)
        made.parts = parts
        return made

    def elements(self) -> torch.Tensor:
        """Gather all ranks' parts; every rank of the group calls it."""
        return self.parts.joined()


class _Defer(torch.autograd.Function):
    """Forward nothing; backward this rank's part of the gradient, which all ranks have whole."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, parts: _RankParts) -> torch.Tensor:
        ctx.parts = parts
        return Deferred(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.parts.parted(gradient), None


def defer_gather(mine: torch.Tensor, group: TensorGroup, dim: int, *, by_rows: bool = False) -> torch.Tensor:
    """Return a tensor that is gathered when it is used; each rank has a slice along ``dim``.

    Args:
        by_rows: the slices have the rows of all ranks' batches, and each rank needs the whole of its own rows.
    """
    parts = _RankParts(mine, group, dim, by_rows)
    return _Defer.apply(mine, parts) if torch.is_grad_enabled() and mine.requires_grad else Deferred(parts)


def of_own_rows(value: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's rows of a deferred tensor with the rows of all batches; None for other tensors."""
    parts = value.parts if isinstance(value, Deferred) else None
    if parts is None or parts.by_rows:
        return None
    return defer_gather(parts.mine, parts.group, parts.dim, by_rows=True)


def of_all_rows(value: torch.Tensor) -> torch.Tensor | None:
    """Return the rows of all batches of a deferred tensor with this rank's rows; None for other tensors."""
    parts = value.parts if isinstance(value, Deferred) else None
    if parts is None or not parts.by_rows:
        return None
    return defer_gather(parts.mine, parts.group, parts.dim)


def part_of(value: Any, group: TensorGroup, dim: int) -> torch.Tensor | None:
    """Return this rank's slice of a deferred tensor, if it is sliced along ``dim``; otherwise None."""
    parts = value.parts if isinstance(value, Deferred) else None
    if parts is None or parts.by_rows:
        return None
    if parts.group is not group or parts.dim != dim:
        return None
    return parts.mine


@dataclass(frozen=True)
class DeferredSlice:
    """An argument or result of a block that each rank has a slice of.

    Attributes:
        place: position or keyword of an argument; number of a result among the tensors in the return value.
        dim: along which.
        length: of the whole.
        module: that takes or returns it, by its path in the block.
    """

    place: int | str
    dim: int
    length: int
    module: str = ""

    def here(self, tensor: Any, size: int) -> bool:
        """Return whether a value is one rank's slice."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.dim() > self.dim
            and tensor.shape[self.dim] * size == self.length
        )

    def is_whole(self, tensor: Any) -> bool:
        """Return whether a value is the whole of all ranks' slices."""
        return self.here(tensor, 1)


class SlicedCalls:
    """Hooks around the calls of a block that takes or returns this rank's slices of some tensors."""

    def __init__(
        self, group: TensorGroup, arguments: Iterable[DeferredSlice], results: Iterable[DeferredSlice]
    ) -> None:
        self._group, self._arguments = group, tuple(arguments)
        self._results = {part.place: part for part in results}

    def watch(self, block: nn.Module) -> None:
        """Begin with the next call of ``block``."""
        block.register_forward_pre_hook(self.enter, with_kwargs=True)
        block.register_forward_hook(self.leave)

    def enter(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace whole arguments by this rank's slices; PyTorch's hook."""
        given = {**dict(enumerate(args)), **kwargs}
        for part in self._arguments:
            value = given.get(part.place)
            if not isinstance(value, torch.Tensor) or not part.is_whole(value):
                continue
            mine = part_of(value, self._group, part.dim)
            if mine is None:
                mine = collectives.take_slice(value, self._group, part.dim)
            given[part.place] = mine
        new_args = tuple(given[number] for number in range(len(args)))
        return new_args, {name: given[name] for name in kwargs}

    def leave(self, block: nn.Module, args: Any, result: Any) -> Any:
        """Return deferred tensors in place of this rank's slices; PyTorch's hook."""
        if self._group.size == 1 or not self._results:
            return result
        numbers = itertools.count()

        def whole(leaf: Any) -> Any:
            part = self._results.get(next(numbers)) if isinstance(leaf, torch.Tensor) else None
            if part is None or not part.here(leaf, self._group.size):
                return leaf
            return defer_gather(leaf, self._group, part.dim)

        return map_leaves(whole, result)

    def __deepcopy__(self, memo: Any) -> SlicedCalls:
        return self
