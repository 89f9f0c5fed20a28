"""Exchange of heads: each of several neighboring ranks gets some heads of all their rows, instead of all heads of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.context.attention.positions import RowIndex
from smp_runtime.context.attention.traffic import start_exchange

if TYPE_CHECKING:
    from smp_runtime.context.attention.traffic import AttentionGroup


@dataclass(frozen=True)
class HeadNeighbors:
    """The ranks that exchange heads.

    Args:
        ranks: in the group; this rank is one of them.
        place: of this rank among them.
    """

    group: AttentionGroup
    ranks: range
    place: int

    def to_heads(
        self, tensors: list[torch.Tensor], rows: list[NeighborRows], *, of_masks: bool = False
    ) -> list[torch.Tensor]:
        """Return this rank's heads of all rows, of tensors with all heads of this rank's rows.

        Args:
            tensors: ``[batch, heads or 1, rows, width]``; with 1 for the heads, each rank gets that one.
            rows: of each tensor.
        """
        parts = [self._head_parts(tensor) for tensor in tensors]
        leaving = {
            rank: [each[place] for each in parts] for place, rank in enumerate(self.ranks) if place != self.place
        }
        arriving = {
            rank: [_with_rows(each[0], held.counts[place]) for each, held in zip(parts, rows, strict=True)]
            for place, rank in enumerate(self.ranks)
            if place != self.place
        }
        found = start_exchange(self.group, leaving, arriving, tensors[0], of_masks=of_masks).finish()
        own = [each[self.place] for each in parts]
        joined = []
        for number, held in enumerate(rows):
            pieces = [
                own[number] if place == self.place else found[rank][number] for place, rank in enumerate(self.ranks)
            ]
            joined.append(torch.cat(pieces, 2).index_select(2, held.order.on(tensors[0].device)))
        return joined

    def to_rows(
        self, tensors: list[torch.Tensor], rows: list[NeighborRows], heads: list[int], *, of_masks: bool = False
    ) -> list[torch.Tensor]:
        """Return all heads of this rank's rows, of tensors with this rank's heads of all rows: the adjoint of :meth:`to_heads`.

        Args:
            heads: of each result; with 1, the ranks' parts are added.
        """
        parts = [
            tensor.index_select(2, held.back.on(tensor.device)).split(held.counts, 2)
            for tensor, held in zip(tensors, rows, strict=True)
        ]
        own = [each[self.place] for each in parts]
        leaving = {
            rank: [each[place] for each in parts] for place, rank in enumerate(self.ranks) if place != self.place
        }
        arriving = {rank: [list(each.shape) for each in own] for rank in leaving}
        found = start_exchange(self.group, leaving, arriving, tensors[0], of_masks=of_masks).finish()
        joined = []
        for number, count in enumerate(heads):
            pieces = [
                own[number] if place == self.place else found[rank][number] for place, rank in enumerate(self.ranks)
            ]
            joined.append(torch.stack(pieces).sum(0) if count == 1 else torch.cat(pieces, 1))
        return joined

    def own_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of a tensor that has all, or of one for all heads."""
        return self._head_parts(tensor)[self.place]

    def _head_parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if tensor.shape[1] == 1:
            return (tensor,) * len(self.ranks)
        return tensor.chunk(len(self.ranks), 1)


class NeighborRows:
    """The rows of neighbors.

    Args:
        counts: rows of each.
        order: by place among their sorted positions, the place among their rows, one after the other.

    Attributes:
        back: the inverse of ``order``.
    """

    def __init__(self, counts: list[int], order: torch.Tensor) -> None:
        self.counts = counts
        self.order, self.back = RowIndex(order), RowIndex(order.argsort())


def to_heads(
    neighbors: HeadNeighbors, rows: list[NeighborRows], tensors: list[torch.Tensor], *, of_masks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return this rank's heads of all the neighbors' rows; see :meth:`HeadNeighbors.to_heads`."""
    found: tuple[torch.Tensor, ...] = _ToHeads.apply(neighbors, rows, of_masks, *tensors)
    return found


def to_rows(neighbors: HeadNeighbors, rows: NeighborRows, heads: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return all heads of this rank's rows; see :meth:`HeadNeighbors.to_rows`."""
    found: torch.Tensor = _ToRows.apply(neighbors, rows, heads, tensor)
    return found


def _with_rows(tensor: torch.Tensor, rows: int) -> list[int]:
    return [*tensor.shape[:2], rows, tensor.shape[3]]


class _ToHeads(torch.autograd.Function):
    """All heads of this rank's rows become some heads of all rows; backward the way back."""

    @staticmethod
    def forward(
        ctx: Any, neighbors: HeadNeighbors, rows: list[NeighborRows], of_masks: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.neighbors, ctx.rows, ctx.of_masks = neighbors, rows, of_masks
        ctx.heads = [tensor.shape[1] for tensor in tensors]
        return tuple(neighbors.to_heads(list(tensors), rows, of_masks=of_masks))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = ctx.neighbors.to_rows(list(gradients), ctx.rows, ctx.heads, of_masks=ctx.of_masks)
        return None, None, None, *found


class _ToRows(torch.autograd.Function):
    """Some heads of all rows become all heads of this rank's rows; backward the way back."""

    @staticmethod
    def forward(
        ctx: Any, neighbors: HeadNeighbors, rows: NeighborRows, heads: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.neighbors, ctx.rows = neighbors, rows
        (found,) = neighbors.to_rows([tensor], [rows], [heads])
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (found,) = ctx.neighbors.to_heads([gradient], [ctx.rows])
        return None, None, None, found
