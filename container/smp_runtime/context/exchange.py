"""Exchange of positions between the ranks of a context group, which autograd differentiates.

Each rank of the group computes the same loss. The mean of the ranks' gradients, which data parallelism forms anyway, is
right if the gradient of each exchange is its exact adjoint: what a rank gathered sends gradients back to where it came
from, summed over the ranks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.context.host_values import always_computed
from smp_runtime.context.layout import move_between

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives
    from smp_runtime.context.layout import SequenceLayout
    from smp_runtime.job.ranks import Ranks


class ContextGroup:
    """The ranks that share sequences out, and what they have exchanged.

    Attributes:
        gathered: bytes that this rank received because an operation has no rule, by the operation's name.
        received: bytes that this rank received from others, in all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rank = ranks.rank_in(Group.CONTEXT)
        self.size = ranks.size(Group.CONTEXT)
        self.method: str = ranks.cfg.context_parallel
        self.gathered: dict[str, int] = {}
        self.received = 0
        self._on_device: dict[tuple[Any, ...], torch.Tensor] = {}
        self._taken: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Any, ...], torch.Tensor]] = {}

    @classmethod
    def of(cls, ranks: Ranks) -> ContextGroup:
        """Return the job's context group."""
        return ranks.keep(cls, lambda: cls(ranks))

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the group's connections."""
        return self.ranks.process_group(Group.CONTEXT)

    @property
    def collectives(self) -> Collectives:
        """Return the job's collectives."""
        return self.ranks.collectives

    def indices(self, layout: SequenceLayout, device: torch.device) -> torch.Tensor:
        """Return this rank's positions, as an index on a device."""
        return self._kept(("own", layout.key, device), lambda: layout.positions[self.rank].to(device))

    def order(self, layout: SequenceLayout, device: torch.device) -> torch.Tensor:
        """Return for each position of the sequence its place among all ranks' padded slices, one after the other."""
        return self._kept(("order", layout.key, device), lambda: _order(layout).to(device))

    def _kept(self, key: tuple[Any, ...], make: Any) -> torch.Tensor:
        if key not in self._on_device:
            if len(self._on_device) >= _MOST_INDICES:  # sequences of many lengths
                self._on_device.clear()
            with torch.inference_mode(False):
                self._on_device[key] = make()
        return self._on_device[key]

    def take(self, whole: torch.Tensor, dim: int, layout: SequenceLayout) -> torch.Tensor:
        """Return this rank's positions of a whole tensor."""
        index = self.indices(layout, whole.device)
        if layout.outer == layout.inner == 1:
            return whole.index_select(dim, index)
        apart = whole.unflatten(dim, (layout.outer, layout.length, layout.inner))
        return apart.index_select(dim + 1, index).flatten(dim, dim + 2)

    def take_kept(self, whole: torch.Tensor, dim: int, layout: SequenceLayout) -> torch.Tensor:
        """Return this rank's positions of a whole tensor without gradients: the same tensor while it is not changed."""
        if whole.requires_grad or whole.is_inference():
            return self.take(whole, dim, layout)
        former = self._taken.get(id(whole))
        key = (whole._version, dim, layout)
        if former is None or former[0]() is not whole or former[1] != key:
            if len(self._taken) >= _MOST_TAKEN:
                self._taken.clear()
            former = self._taken[id(whole)] = weakref.ref(whole), key, self.take(whole, dim, layout)
        return former[2]

    def gather(self, local: torch.Tensor, dim: int, layout: SequenceLayout) -> torch.Tensor:
        """Return the whole tensor of the ranks' slices."""
        if layout.outer != 1 or layout.inner != 1:
            apart = local.unflatten(dim, (layout.outer, len(layout.positions[self.rank]), layout.inner))
            return self.gather(apart, dim + 1, layout.base).flatten(dim, dim + 2)
        whole = functools.partial(self.exchange_slices, dim=dim, layout=layout)
        return exchange(local, self, whole, functools.partial(self.return_gradients, dim=dim, layout=layout))

    def move(self, local: torch.Tensor, dim: int, layout: SequenceLayout, other: SequenceLayout) -> torch.Tensor:
        """Return this rank's positions in another layout of a sequence of the same length; only others' positions travel."""
        if layout.outer != 1 or layout.inner != 1:
            apart = local.unflatten(dim, (layout.outer, len(layout.positions[self.rank]), layout.inner))
            return self.move(apart, dim + 1, layout.base, other.base).flatten(dim, dim + 2)
        there = functools.partial(self.exchange_rows, dim=dim, layout=layout, other=other)
        # Each position is on one rank in both layouts.
        return exchange(local, self, there, functools.partial(self.exchange_rows, dim=dim, layout=other, other=layout))

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors."""
        return exchange(partial, self, self.add_up, self.add_up)

    def exchange_slices(self, local: torch.Tensor, dim: int, layout: SequenceLayout) -> torch.Tensor:
        """Return the whole tensor; no gradients."""
        most = max(layout.counts())
        first = local.movedim(dim, 0)
        rest = first.shape[1:]
        mine = first.new_zeros(most, *rest)
        mine[: first.shape[0]] = first
        # Booleans and some integers are not sent by all backends.
        wire = mine.view(torch.uint8) if mine.dtype is torch.bool else mine
        everyone = wire.new_empty(self.size * most, *rest)
        self.collectives.all_gather(everyone, wire, self.process_group).wait()
        self.received += (everyone.numel() - wire.numel()) * wire.element_size()
        everyone = everyone.view(mine.dtype) if everyone.dtype != mine.dtype else everyone
        # Selected along that dim, the result is contiguous: views of it and generators that fill it then work as on a plain one.
        return everyone.movedim(0, dim).index_select(dim, self.order(layout, local.device))

    def exchange_rows(
        self, local: torch.Tensor, dim: int, layout: SequenceLayout, other: SequenceLayout
    ) -> torch.Tensor:
        """Return this rank's positions in another layout; no gradients."""
        key = "move", layout.key, other.key, local.device
        plan = move_between(layout, other, self.rank)
        kept, kept_places = (
            self._kept((*key, name), lambda n=name: getattr(plan, n).to(local.device)) for name in _KEPT
        )
        leaving, arriving = (
            self._kept((*key, name), lambda n=name: torch.cat(getattr(plan, n)).to(local.device)) for name in _MOVED
        )
        first = local.movedim(dim, 0)
        moved = first.new_empty(len(other.positions[self.rank]), *first.shape[1:])
        moved[kept_places] = first[kept]
        sent = first[leaving].contiguous()
        # Bytes, since not all backends send all types.
        wire = sent.view(-1).view(torch.uint8)
        width = math.prod(first.shape[1:]) * first.element_size()
        sizes = [[len(part) * width for part in parts] for parts in (plan.arriving, plan.leaving)]
        received = wire.new_empty(sum(sizes[0]))
        self.collectives.all_to_all(received, wire, self.process_group, (sizes[0], sizes[1])).wait()
        self.received += received.numel()
        moved[arriving] = received.view(first.dtype).view(len(arriving), *first.shape[1:])
        return moved.movedim(0, dim)

    def return_gradients(self, gradient: torch.Tensor, dim: int, layout: SequenceLayout) -> torch.Tensor:
        """Return the sum over the ranks of a whole tensor's gradients, at this rank's positions."""
        counts = layout.counts()
        most = max(counts)
        first = gradient.movedim(dim, 0)
        padded = first.new_zeros(self.size * most, *first.shape[1:])
        padded[self.order(layout, gradient.device)] = first
        mine = first.new_empty(most, *first.shape[1:])
        self.collectives.reduce_scatter(mine.view(-1), padded.view(-1), self.process_group).wait()
        self.received += (padded.numel() - mine.numel()) * mine.element_size()
        return mine[: counts[self.rank]].movedim(0, dim)

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors; no gradients."""
        total = partial.detach().clone(memory_format=torch.contiguous_format)
        self.collectives.all_reduce(total, self.process_group).wait()
        self.received += 2 * total.numel() * total.element_size() * (self.size - 1) // self.size
        return total


#: Indices in a :class:`.PositionMove`.
_KEPT, _MOVED = ("kept", "kept_places"), ("leaving", "arriving")

#: Indices of so many layouts are kept on the device.
_MOST_INDICES = 256

#: This rank's rows of so many masks are kept, for the layers that share a mask.
_MOST_TAKEN = 4


@always_computed
def _order(layout: SequenceLayout) -> torch.Tensor:
    most = max(layout.counts())
    order = torch.empty(layout.length, dtype=torch.int64)
    for rank, held in enumerate(layout.positions):
        order[held] = torch.arange(len(held)) + rank * most
    return order


#: A linear map of this rank's tensor and the others'; no gradients.
LinearMap = Callable[[torch.Tensor], torch.Tensor]


def exchange(given: torch.Tensor, group: ContextGroup, there: LinearMap, back: LinearMap) -> torch.Tensor:
    """Return what ``there`` makes of the ranks' tensors; gradients go the way of ``back``, its adjoint."""
    return _ContextExchange.apply(given, group, there, back)


class _ContextExchange(torch.autograd.Function):
    """Forward a map; backward its adjoint, which has the map as its own: gradients may have gradients."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: ContextGroup, there: LinearMap, back: LinearMap) -> torch.Tensor:
        ctx.group, ctx.maps = group, (back, there)
        return there(given)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ContextExchange.apply(gradient, ctx.group, *ctx.maps), None, None, None
