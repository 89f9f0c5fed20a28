"""How a unit is gathered: in one collective, or in phases between and inside hosts."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import Collectives, Work
from smp_runtime.smddp.process_group import SmddpProcessGroup


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


class BackendGathering:
    """The backend gathers in phases itself; what its buffers cannot hold goes in the same two phases without them.

    Shards are numbered like the group's ranks. The phase inside a host is one collective for every host, which puts
    that host's shards where they belong.

    Args:
        collectives: the seam.
        group: the sharding group, whose backend gathers in phases.
        across: one rank of each host, those with this rank's local number; of a plain backend.
        inside: this host's ranks of the sharding group; of a plain backend.
        rows: for every host the positions of its ranks in the sharding group, consecutive ones.
        position: this rank's in the sharding group.
    """

    def __init__(
        self,
        collectives: Collectives,
        group: SmddpProcessGroup,
        across: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        rows: list[list[int]],
        position: int,
    ) -> None:
        self._collectives = collectives
        self._group = group
        self._across = across
        self._inside = inside
        self._rows = rows
        self.position = position
        self.shard_of = list(range(sum(map(len, rows))))

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        # Of a unit it is always the same, and the same on all ranks.
        if self._group.fallback_reason(shard.nbytes, full.device.type) is None:
            return self._collectives.all_gather(full, shard, self._group)
        self._group.tries_phases(shard.nbytes, full.device.type)  # counts it, and says once which buffer is too small
        arrived = torch.empty(len(self._rows), shard.numel(), dtype=shard.dtype, device=shard.device)
        first = self._collectives.all_gather(arrived.view(-1), shard, self._across)
        return _RowByRow(self, first, full, arrived)

    def second(self, full: torch.Tensor, arrived: torch.Tensor) -> list[Work]:
        """The phase inside the host."""
        parts = full.view(len(self.shard_of), -1)
        return [
            self._collectives.all_gather(parts[row[0] : row[-1] + 1].view(-1), mine, self._inside)
            for row, mine in zip(self._rows, arrived, strict=True)
        ]


class _RowByRow:
    def __init__(self, gathering: BackendGathering, first: Work, full: torch.Tensor, arrived: torch.Tensor) -> None:
        self._gathering = gathering
        self._first = first
        self._full = full
        self._arrived = arrived

    def wait(self) -> None:
        self._first.wait()
        for work in self._gathering.second(self._full, self._arrived):
            work.wait()


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
