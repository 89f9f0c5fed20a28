"""Tensors whose parts lie on the ranks of a group until somebody uses them: attention weights of this rank's heads, say.

Most callers drop them, and a block that gets one from another that is split alike wants its own part of it. What is
done with such a tensor anywhere else gathers it first, on all ranks of the group, since they all run the same script.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensors.lazy_tensor import LazyTensor
from smp_runtime.tensors.nested import mapped

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
        """Without memory of its own."""
        made = cls.like(parts.shape, parts.mine.dtype, parts.mine.device)
        made.parts = parts
        return made

    def elements(self) -> torch.Tensor:
        """All ranks' parts; every rank of the group calls it."""
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


def deferred(mine: torch.Tensor, group: TensorGroup, dim: int, *, by_rows: bool = False) -> torch.Tensor:
    """A tensor of which each rank has a slice along ``dim``, to be gathered when it is used.

    Args:
        by_rows: the slices have the rows of all ranks' batches, and each rank wants the whole of its own rows.
    """
    parts = _RankParts(mine, group, dim, by_rows)
    return _Defer.apply(mine, parts) if torch.is_grad_enabled() and mine.requires_grad else Deferred(parts)


def of_own_rows(value: torch.Tensor) -> torch.Tensor | None:
    """Of what the ranks have slices of with the rows of all their batches, this rank's rows; None if it is no such tensor."""
    parts = value.parts if isinstance(value, Deferred) else None
    if parts is None or parts.by_rows:
        return None
    return deferred(parts.mine, parts.group, parts.dim, by_rows=True)


def of_all_rows(value: torch.Tensor) -> torch.Tensor | None:
    """The other way round."""
    parts = value.parts if isinstance(value, Deferred) else None
    return deferred(parts.mine, parts.group, parts.dim) if parts is not None and parts.by_rows else None


def part_of(value: Any, group: TensorGroup, dim: int) -> torch.Tensor | None:
    """This rank's slice of a tensor that has not been gathered, if it is one along ``dim``."""
    parts = value.parts if isinstance(value, Deferred) else None
    fits = parts is not None and parts.group is group and parts.dim == dim and not parts.by_rows
    return parts.mine if parts is not None and fits else None


@dataclass(frozen=True)
class DeferredSlice:
    """A tensor that a block takes or returns of which each rank has a slice.

    Attributes:
        place: of an argument its position or keyword; of a result its number among the tensors in what is returned.
        dim: along which.
        length: of the whole.
        module: that takes or returns it, by its path in the block.
    """

    place: int | str
    dim: int
    length: int
    module: str = ""

    def here(self, tensor: Any, size: int) -> bool:
        """Whether a value is one rank's slice."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.dim() > self.dim
            and tensor.shape[self.dim] * size == self.length
        )

    def is_whole(self, tensor: Any) -> bool:
        """Whether a value is what all ranks have together."""
        return self.here(tensor, 1)


class SlicedCalls:
    """Hooks around the calls of a block that takes this rank's slices of some arguments, and returns those of some results."""

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
        """PyTorch's hook."""
        given = {**dict(enumerate(args)), **kwargs}
        for part in self._arguments:
            value = given.get(part.place)
            if isinstance(value, torch.Tensor) and part.is_whole(value):
                mine = part_of(value, self._group, part.dim)
                given[part.place] = collectives.sliced(value, self._group, part.dim) if mine is None else mine
        return tuple(given[n] for n in range(len(args))), {name: given[name] for name in kwargs}

    def leave(self, block: nn.Module, args: Any, result: Any) -> Any:
        """PyTorch's hook."""
        if self._group.size == 1 or not self._results:
            return result
        numbers = itertools.count()

        def whole(leaf: Any) -> Any:
            part = self._results.get(next(numbers)) if isinstance(leaf, torch.Tensor) else None
            if part is None or not part.here(leaf, self._group.size):
                return leaf
            return deferred(leaf, self._group, part.dim)

        return mapped(whole, result)

    def __deepcopy__(self, memo: Any) -> SlicedCalls:
        return self
