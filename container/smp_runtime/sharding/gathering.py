"""How a unit is gathered: in one collective, or in phases between and inside hosts."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import Collectives, Work


class Gathering(Protocol):
    """Brings the shards of a unit together.

    Attributes:
        position: number of this rank's shard in the whole.
        shard_of: by position in the sharding group, the number of that rank's shard.
    """

    position: int
    shard_of: list[int]

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill ``full``, ``[shards * shard_elements]``, from every rank's ``shard``."""
        ...


class PlainGathering:
    """One all-gather over the sharding group; shards are numbered like its ranks.

    Args:
        collectives: the seam.
        group: the sharding group.
        size: its ranks.
        position: this rank's among them.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup, size: int, position: int) -> None:
        self._collectives = collectives
        self._group = group
        self.position = position
        self.shard_of = list(range(size))

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._collectives.all_gather(full, shard, self._group)


class HierarchicalGathering:
    """First between hosts, then inside each: every shard enters a host once, not once per rank.

    Ranks with the same number on their hosts exchange their shards; then each host's ranks hand each other what they
    got. Shards are numbered by local rank first and host second, so that neither phase has to sort.

    Args:
        collectives: the seam.
        across: one rank of each host, those with this rank's local number.
        inside: this host's ranks of the sharding group.
        hosts: ranks in ``across``, and this rank's position among them.
        local: ranks in ``inside``, and this rank's position among them.
    """

    def __init__(
        self,
        collectives: Collectives,
        across: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        hosts: tuple[int, int],
        local: tuple[int, int],
        order: list[tuple[int, int]],
    ) -> None:
        self._collectives = collectives
        self._across = across
        self._inside = inside
        self._hosts = hosts[0]
        self._local = local[1]
        self.position = local[1] * hosts[0] + hosts[1]
        self.shard_of = [number * hosts[0] + host for host, number in order]

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        block = shard.numel() * self._hosts
        mine = full[self._local * block : (self._local + 1) * block]
        first = self._collectives.all_gather(mine, shard, self._across)
        return _TwoPhases(self, first, full, mine)

    def second(self, full: torch.Tensor, mine: torch.Tensor) -> Work:
        """The phase inside the host."""
        return self._collectives.all_gather(full, mine, self._inside)


class _TwoPhases:
    def __init__(self, gathering: HierarchicalGathering, first: Work, full: torch.Tensor, mine: torch.Tensor) -> None:
        self._gathering = gathering
        self._first = first
        self._full = full
        self._mine = mine

    def wait(self) -> None:
        self._first.wait()
        # In place: a rank's block is where the second phase will put it.
        self._gathering.second(self._full, self._mine).wait()
