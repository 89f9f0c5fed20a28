"""Which gathering fits the hosts that a sharding group lies on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from smp_config import Group
from smp_runtime.comm.control import host_name, timeout_seconds
from smp_runtime.comm.devices import plain_backend
from smp_runtime.job.ranks import Ranks
from smp_runtime.sharding.gathers import BackendGathering, Gathering, HierarchicalGathering, PlainGathering
from smp_runtime.smddp.process_group import SmddpProcessGroup


def make_gathering(ranks: Ranks, *, hierarchical: bool) -> Gathering:
    """Phases between and inside hosts when the sharding groups span hosts evenly and it was asked for; else one.

    A backend that does it in phases itself does so, but for units that its buffers cannot hold.
    """
    members, mine = ranks.members(Group.SHARD), ranks.rank_in(Group.SHARD)
    plain = PlainGathering(ranks.collectives, ranks.groups.group(Group.SHARD), len(members), mine)
    everyone = list(range(ranks.control.size))
    host_of = ranks.control.allgather(host_name(), everyone)
    if not hierarchical or len(set(host_of)) == 1:
        return plain
    layouts = [host_layout(group, host_of) for group in ranks.topology.groups(Group.SHARD)]
    if any(layout is None for layout in layouts):
        return plain
    whole = ranks.groups.group(Group.SHARD)
    backend = plain_backend(ranks.device) if isinstance(whole, SmddpProcessGroup) else None
    in_order = all(
        [rank for row in layout or () for rank in row] == list(group)
        for group, layout in zip(ranks.topology.groups(Group.SHARD), layouts, strict=True)
    )
    if backend is not None and not in_order:
        return plain
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    # Every rank of the job makes every group, in the same order.
    for layout in layouts:
        for row in (*layout_rows(layout), *layout_columns(layout)):
            groups[tuple(row)] = dist.new_group(row, timeout=timedelta(seconds=timeout_seconds()), backend=backend)
    layout = next(found for found in layouts if found and any(ranks.rank in row for row in found))
    host = next(number for number, row in enumerate(layout) if ranks.rank in row)
    local = layout[host].index(ranks.rank)
    across, inside = groups[tuple(row[local] for row in layout)], groups[tuple(layout[host])]
    if isinstance(whole, SmddpProcessGroup):
        rows = [[members.index(rank) for rank in row] for row in layout]
        return BackendGathering(ranks.collectives, whole, across, inside, rows, mine)
    order = [next((h, row.index(rank)) for h, row in enumerate(layout) if rank in row) for rank in members]
    return HierarchicalGathering(
        ranks.collectives, across, inside, (len(layout), host), (len(layout[host]), local), order
    )


def host_layout(members: Sequence[int], host_of: Sequence[str]) -> list[list[int]] | None:
    """The members host by host, or None where there is one host, one rank per host, or hosts with unequal numbers.

    Args:
        members: global ranks of a sharding group.
        host_of: by global rank, the name of its host.
    """
    hosts: dict[str, list[int]] = {}
    for rank in members:
        hosts.setdefault(host_of[rank], []).append(rank)
    rows = list(hosts.values())
    even = len({len(row) for row in rows}) == 1
    return rows if even and len(rows) > 1 and len(rows[0]) > 1 else None


def layout_rows(layout: list[list[int]] | None) -> list[list[int]]:
    """The groups inside hosts."""
    return [list(row) for row in layout or []]


def layout_columns(layout: list[list[int]] | None) -> list[list[int]]:
    """The groups between hosts: ranks with the same number on theirs."""
    return [list(column) for column in zip(*(layout or []), strict=True)]
