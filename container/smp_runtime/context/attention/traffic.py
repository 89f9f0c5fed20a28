"""Messages between the ranks of a group: rows of tensors, packed as bytes, in one exchange."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives, Work


class AttentionGroup(Protocol):
    """The ranks that share out a sequence."""

    rank: int
    size: int

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return their process group."""

    @property
    def collectives(self) -> Collectives:
        """Return the collectives to use."""


@dataclass
class AttentionCounters:
    """What attention has sent and computed on this rank.

    Attributes:
        sent: bytes of queries, keys, values, results and gradients, to other ranks.
        masks: bytes of masks and of what is known about them, to other ranks.
        exchanges: messages that were waited for.
        scores: pairs of a query and a key that a forward pass computed, in one head of one sample.
    """

    sent: int = 0
    masks: int = 0
    exchanges: int = 0
    scores: int = 0


_counters: weakref.WeakKeyDictionary[object, AttentionCounters] = weakref.WeakKeyDictionary()


def counters_of(group: AttentionGroup) -> AttentionCounters:
    """Return what attention has counted in a group."""
    return _counters.setdefault(group, AttentionCounters())


Shapes = Mapping[int, Sequence[Sequence[int]]]


@dataclass
class RowExchange:
    """An exchange under way: :meth:`finish` returns what came from each rank."""

    work: Work | None
    received: torch.Tensor
    shapes: Shapes
    dtype: torch.dtype
    sizes: list[int] = field(default_factory=list)

    def finish(self) -> dict[int, list[torch.Tensor]]:
        """Wait, and return the tensors by the rank that they came from."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        found = {}
        for rank, part in enumerate(self.received.split(self.sizes)):
            if rank in self.shapes:
                numbers = [_elements(shape) for shape in self.shapes[rank]]
                flat = part.view(self.dtype).split(numbers)
                found[rank] = [each.view(*shape) for each, shape in zip(flat, self.shapes[rank], strict=True)]
        return found


def start_exchange(
    group: AttentionGroup,
    leaving: Mapping[int, Sequence[torch.Tensor]],
    arriving: Shapes,
    like: torch.Tensor,
    *,
    of_masks: bool = False,
) -> RowExchange:
    """Begin to send tensors to some ranks of the group; every rank of the group calls it.

    Args:
        leaving: by rank, tensors of the dtype of ``like``.
        arriving: by rank, shapes of the tensors that come from it.
        like: its dtype and device are those of all tensors.
    """
    parts = [tensor.reshape(-1) for rank in sorted(leaving) for tensor in leaving[rank]]
    # Bytes, since gloo does not send all types.
    sent = (torch.cat(parts) if parts else like.new_empty(0)).view(torch.uint8)
    width = like.element_size()
    leaving_sizes = [sum(t.numel() for t in leaving.get(rank, ())) * width for rank in range(group.size)]
    sizes = [sum(map(_elements, arriving.get(rank, ()))) * width for rank in range(group.size)]
    received = sent.new_empty(sum(sizes))
    work = group.collectives.all_to_all(received, sent, group.process_group, (sizes, leaving_sizes))
    counters = counters_of(group)
    counters.exchanges += 1
    if of_masks:
        counters.masks += sent.numel()
    else:
        counters.sent += sent.numel()
    return RowExchange(work, received, arriving, like.dtype, sizes)


def gather_bits(group: AttentionGroup, bits: torch.Tensor) -> torch.Tensor:
    """Return all ranks' vectors of booleans, ``[ranks, length]``, on the CPU; every rank of the group calls it."""
    if group.size == 1:
        return bits.cpu()[None]
    mine = bits.to(torch.uint8).contiguous()
    everyone = mine.new_empty(group.size * mine.numel())
    group.collectives.all_gather(everyone, mine, group.process_group).wait()
    counters_of(group).masks += mine.numel() * (group.size - 1)
    return everyone.view(group.size, -1).to("cpu", torch.bool)


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
