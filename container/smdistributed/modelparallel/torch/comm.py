"""Object messages between ranks: ``smp.send``, ``smp.recv_from``, ``smp.broadcast``, ``smp.allgather``, ``smp.barrier``."""

from __future__ import annotations

from typing import Any

from smp_runtime.comm.messages import CommGroup, RankType
from smp_runtime.job.session import current

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
TP_GROUP = CommGroup.TP_GROUP
PP_GROUP = CommGroup.PP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send a picklable object; returns when ``dest_rank`` has taken it with :func:`recv_from`."""
    current().messages.send(obj, dest_rank, rank_type)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that ``src_rank`` sends or broadcasts to this rank."""
    return current().messages.recv_from(src_rank, rank_type)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send a picklable object to the other ranks of the group, each of which calls :func:`recv_from`."""
    current().messages.broadcast(obj, group)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Every member's object in group-rank order; all members call it."""
    return current().messages.allgather(obj, group)


def barrier(group: CommGroup = WORLD) -> None:
    """Return when every rank of the group has called it."""
    current().messages.barrier(group)


def dp_barrier() -> None:
    """:func:`barrier` over the data parallel group."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """:func:`barrier` over the model parallel group."""
    barrier(MP_GROUP)
