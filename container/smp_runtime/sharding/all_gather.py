"""Gathering of a unit: in one collective or in two phases, depending on the hosts of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from smp_config import Group, smddp
from smp_runtime.comm.control import host_name, timeout_seconds

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives, Work
    from smp_runtime.job.ranks import Ranks


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
    """One all-gather over the sharding group; shards are numbered like its ranks."""

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup, size: int, position: int) -> None:
        self._collectives = collectives
        self._group = group
        self.position = position
        self.shard_of = list(range(size))

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :class:`Gathering`."""
        return self._collectives.all_gather(full, shard, self._group)


class HierarchicalGathering:
    """First between hosts, then inside each: every shard enters a host once, not once per rank.

    Ranks with the same number on their hosts exchange their shards; then each host's ranks hand each other what they
    got. Shards are numbered by local rank first and host second, so that neither phase has to sort.

    Args:
        across: one rank of each host, those with this rank's local number.
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
        """See :class:`Gathering`."""
        block = shard.numel() * self._hosts
        # In place: the second phase expects a rank's block at this position.
        mine = full[self._local * block : (self._local + 1) * block]
        first = self._collectives.all_gather(mine, shard, self._across)
        return _TwoPhases(self, first, full, mine)

    def second(self, full: torch.Tensor, mine: torch.Tensor) -> Work:
        """Run the phase inside the host."""
        return self._collectives.all_gather(full, mine, self._inside)


class _TwoPhases:
    def __init__(self, gathering: HierarchicalGathering, first: Work, full: torch.Tensor, mine: torch.Tensor) -> None:
        self._gathering = gathering
        self._first = first
        self._full = full
        self._mine = mine

    def wait(self) -> None:
        self._first.wait()
        self._gathering.second(self._full, self._mine).wait()


def make_gathering(ranks: Ranks, *, hierarchical: bool) -> Gathering:
    """Choose the gathering: two phases, between and inside hosts, if requested and possible; else one.

    It is possible if the sharding groups span hosts evenly. SMDDP's all-gather has its own phases, in pieces that fit
    its buffers.
    """
    members, mine = ranks.members(Group.SHARD), ranks.rank_in(Group.SHARD)
    plain = PlainGathering(ranks.collectives, ranks.groups.group(Group.SHARD), len(members), mine)
    if not hierarchical or ranks.backend == smddp.BACKEND:
        return plain
    host_of = ranks.control.allgather(host_name(), list(range(ranks.control.size)))
    found = [host_layout(group, host_of) for group in ranks.topology.groups(Group.SHARD)]
    layouts = [layout for layout in found if layout is not None]
    if len(layouts) < len(found):
        return plain
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    # Every rank of the job makes every group, in the same order.
    for layout in layouts:
        for row in (*layout, *zip(*layout, strict=True)):  # those inside hosts, then those between them
            groups[tuple(row)] = dist.new_group(list(row), timeout=timedelta(seconds=timeout_seconds()))
    layout = next(layout for layout in layouts if any(ranks.rank in row for row in layout))
    host = next(number for number, row in enumerate(layout) if ranks.rank in row)
    local = layout[host].index(ranks.rank)
    across, inside = groups[tuple(row[local] for row in layout)], groups[tuple(layout[host])]
    order = [next((h, row.index(rank)) for h, row in enumerate(layout) if rank in row) for rank in members]
    return HierarchicalGathering(
        ranks.collectives, across, inside, (len(layout), host), (len(layout[host]), local), order
    )


def host_layout(members: Sequence[int], host_of: Sequence[str]) -> list[list[int]] | None:
    """Return the members host by host.

    Returns:
        None for one host, one rank per host, or hosts with unequal numbers of members.

    Args:
        host_of: by global rank, the name of its host.
    """
    rows = smddp.host_rows([host_of[rank] for rank in members])
    return None if isinstance(rows, str) else [[members[position] for position in row] for row in rows]
