"""The object messages of the public API: ranks named by group, objects of any picklable type."""

from __future__ import annotations

import enum
from typing import Any

from smp_config import Group, Topology
from smp_config.errors import kind_of
from smp_runtime.comm.control import USER_COLLECTIVE_CHANNEL, ControlPlane
from smp_runtime.errors import SMPUserError


class CommGroup(enum.Enum):
    """The groups that a message can address.

    Example:
        >>> losses = smp.allgather(0.25, smp.CommGroup.DP_GROUP)  # or smp.DP_GROUP
    """

    WORLD = Group.WORLD
    MP_GROUP = Group.MP
    DP_GROUP = Group.BATCH_DP
    TP_GROUP = Group.TP
    PP_GROUP = Group.PP
    RDP_GROUP = Group.BATCH_RDP


class RankType(enum.Enum):
    """In which group a rank number counts.

    Example:
        >>> rank_types = [kind.name for kind in smp.RankType]  # for smp.send and smp.recv_from
    """

    WORLD_RANK = Group.WORLD
    MP_RANK = Group.MP
    DP_RANK = Group.BATCH_DP
    TP_RANK = Group.TP
    PP_RANK = Group.PP
    RDP_RANK = Group.BATCH_RDP


class Messages:
    """``send``, ``recv_from``, ``broadcast``, ``allgather`` and ``barrier``, all synchronous.

    Args:
        topology: the groups; ranks inside a group count in ascending global rank.
    """

    def __init__(self, control: ControlPlane, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    def send(self, obj: Any, dest_rank: int, rank_type: RankType) -> None:
        """Send ``obj``; returns when the receiver has taken it with :meth:`recv_from`."""
        dest = self._global_rank(dest_rank, rank_type)
        with self._control.doing("smp.send"):
            self._control.send(obj, dest)

    def recv_from(self, src_rank: int, rank_type: RankType) -> Any:
        """Return the next object that ``src_rank`` sends or broadcasts to this rank."""
        source = self._global_rank(src_rank, rank_type)
        with self._control.doing("smp.recv_from"):
            return self._control.receive(source)

    def broadcast(self, obj: Any, group: CommGroup) -> None:
        """Send ``obj`` to every other rank of this rank's group; each of them calls :meth:`recv_from`."""
        others = [rank for rank in self._members(group) if rank != self._control.rank]
        with self._control.doing("smp.broadcast"):
            for rank in others:
                self._control.send(obj, rank)

    def allgather(self, obj: Any, group: CommGroup) -> list[Any]:
        """Return every member's object in group-rank order; all members must call it."""
        members = self._members(group)
        with self._control.doing("smp.allgather"):
            return self._control.allgather(obj, members, USER_COLLECTIVE_CHANNEL)

    def barrier(self, group: CommGroup = CommGroup.WORLD) -> None:
        """Return when every member of this rank's group has called it."""
        members = self._members(group)
        with self._control.doing("smp.barrier"):
            self._control.barrier(members, USER_COLLECTIVE_CHANNEL)

    def _members(self, group: CommGroup) -> list[int]:
        if not isinstance(group, CommGroup):
            raise SMPUserError(
                f"group is {group!r}, {kind_of(group)}; pass a member of smp.CommGroup such as smp.WORLD", code="SMP311"
            )
        return self._topology.group_of(group.value, self._control.rank)

    def _global_rank(self, rank: int, rank_type: RankType) -> int:
        if not isinstance(rank_type, RankType):
            raise SMPUserError(
                f"rank_type is {rank_type!r}; pass a member of smp.RankType such as smp.RankType.WORLD_RANK",
                code="SMP311",
            )
        members = self._topology.group_of(rank_type.value, self._control.rank)
        if not 0 <= rank < len(members):
            raise SMPUserError(
                f"{rank_type.name} {rank} does not exist: this rank's group has the {len(members)} ranks "
                f"0 to {len(members) - 1} (global ranks {members})",
                code="SMP311",
            )
        return members[rank]
