"""Ranks fetch the positions of others that they need beside their own, as a halo; the gradients go back, and are summed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_runtime.context.exchange import exchange
from smp_runtime.context.host_values import always_computed

if TYPE_CHECKING:
    from smp_runtime.context.exchange import ContextGroup
    from smp_runtime.context.layout import SequenceLayout

#: For each rank the ranges of positions that it wants, one behind the other; ranks may want the same ones.
Wanted = tuple[tuple[range, ...], ...]


@dataclass(frozen=True)
class FetchPlan:
    """A rank's part in a fetch.

    Attributes:
        leaving: for each rank, the places of the rows that it is sent, its own rank among them.
        arriving: for each rank, where the rows that come from it go.
        count: rows that this rank wants.
    """

    leaving: list[torch.Tensor]
    arriving: list[torch.Tensor]
    count: int


@functools.lru_cache(maxsize=64)
@always_computed
def plan_fetch(layout: SequenceLayout, wanted: Wanted, rank: int) -> FetchPlan:
    """Return a rank's part in the fetch of what all ranks want."""
    owners = torch.empty(layout.length, dtype=torch.int64)
    places = torch.empty_like(owners)
    for owner, held in enumerate(layout.positions):
        owners[held] = owner
        places[held] = torch.arange(len(held))
    rows = [_join(ranges) for ranges in wanted]
    leaving = [places[each[owners[each] == rank]] for each in rows]
    arriving = [(owners[rows[rank]] == owner).nonzero()[:, 0] for owner in range(len(wanted))]
    return FetchPlan(leaving, arriving, len(rows[rank]))


def _join(ranges: tuple[range, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in ranges] or [torch.empty(0, dtype=torch.int64)])


def fetch(local: torch.Tensor, dim: int, layout: SequenceLayout, wanted: Wanted, group: ContextGroup) -> torch.Tensor:
    """Return the positions that this rank wants; those of other ranks travel, and the gradients of each are summed."""
    plan = plan_fetch(layout, wanted, group.rank)

    def there(held: torch.Tensor) -> torch.Tensor:
        first = held.movedim(dim, 0)
        found = first.new_empty(plan.count, *first.shape[1:])
        for place, theirs in _send_rows(first, plan.leaving, plan.arriving, group):
            found[place] = theirs
        return found.movedim(0, dim)

    def back(gradient: torch.Tensor) -> torch.Tensor:
        first = gradient.movedim(dim, 0)
        total = first.new_zeros(len(layout.positions[group.rank]), *first.shape[1:])
        for place, theirs in _send_rows(first, plan.arriving, plan.leaving, group):
            total.index_add_(0, place, theirs)
        return total.movedim(0, dim)

    return exchange(local, group, there, back)


def _send_rows(
    rows: torch.Tensor, leaving: list[torch.Tensor], arriving: list[torch.Tensor], group: ContextGroup
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Send rows to the other ranks; return the places and the rows that came, this rank's own among them."""
    device, rank = rows.device, group.rank
    width = math.prod(rows.shape[1:]) * rows.element_size()
    sent = [each if other != rank else each[:0] for other, each in enumerate(leaving)]
    places = [each if other != rank else each[:0] for other, each in enumerate(arriving)]
    # Bytes, since not all backends send all types.
    wire = rows[torch.cat(sent).to(device)].contiguous().view(-1).view(torch.uint8)
    sizes = [len(each) * width for each in places], [len(each) * width for each in sent]
    received = wire.new_empty(sum(sizes[0]))
    group.collectives.all_to_all(received, wire, group.process_group, sizes).wait()
    group.received += received.numel()
    theirs = (
        received.view(rows.dtype).view(sum(map(len, places)), *rows.shape[1:]).split([len(each) for each in places])
    )
    found = [(place.to(device), part) for place, part in zip(places, theirs, strict=True) if len(place)]
    return [*found, (arriving[rank].to(device), rows[leaving[rank].to(device)])]
