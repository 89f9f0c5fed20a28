"""Object messages between ranks: ``smp.send``, ``smp.recv_from``, ``smp.broadcast``, ``smp.allgather``, ``smp.barrier``."""

from __future__ import annotations

from typing import Any

from smp_runtime.comm.messages import CommGroup, RankType
from smp_runtime.job.session import current_session

WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
TP_GROUP = CommGroup.TP_GROUP
PP_GROUP = CommGroup.PP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object, and block until ``dest_rank`` has taken it with :func:`recv_from`.

    Args:
        obj: anything that pickles; tensors arrive on the CPU of the other rank.
        dest_rank: counted within the group that ``rank_type`` names, from 0.
        rank_type: in which group the number counts, such as ``smp.RankType.PP_RANK``.

    Raises:
        SMPUserError: the group has no such rank, or ``rank_type`` is no :class:`RankType`.

    Example:
        >>> if smp.rank() == 1:
        ...     smp.send({"best": 0.25}, 0, smp.RankType.WORLD_RANK)
    """
    current_session().messages.send(obj, dest_rank, rank_type)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive the next object that ``src_rank`` sends or broadcasts to this rank.

    Args:
        src_rank: counted within the group that ``rank_type`` names, from 0.
        rank_type: in which group the number counts.

    Returns:
        The object.

    Raises:
        SMPUserError: the group has no such rank, or ``rank_type`` is no :class:`RankType`.
        RankLeftError: the other rank has ended, or never sends.

    Example:
        >>> if smp.rank() == 1:
        ...     best = smp.recv_from(0, smp.RankType.WORLD_RANK)
    """
    return current_session().messages.recv_from(src_rank, rank_type)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to the other ranks of the group. Each of them must call :func:`recv_from`.

    Args:
        obj: any object that can be pickled.
        group: such as ``smp.DP_GROUP``; this rank's own group of that kind.

    Raises:
        SMPUserError: ``group`` is no :class:`CommGroup`.

    Example:
        >>> if smp.rank() == 0:
        ...     smp.broadcast({"seed": 17}, smp.WORLD)
        ... else:
        ...     settings = smp.recv_from(0, smp.RankType.WORLD_RANK)
    """
    current_session().messages.broadcast(obj, group)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Exchange objects between all members of the group. All of them must call it.

    Args:
        obj: this rank's; anything that pickles.
        group: such as ``smp.WORLD``; this rank's own group of that kind.

    Returns:
        every member's object in the order of their ranks in the group, this rank's among them.

    Raises:
        SMPUserError: ``group`` is no :class:`CommGroup`.
        RankLeftError: another member has ended, or never calls it.

    Example:
        >>> losses = smp.allgather(0.25, smp.DP_GROUP)
    """
    return current_session().messages.allgather(obj, group)


def barrier(group: CommGroup = WORLD) -> None:
    """Block until every rank of the group has called it.

    Args:
        group: such as ``smp.PP_GROUP``; this rank's own group of that kind. Default: all ranks of the job.

    Raises:
        SMPUserError: ``group`` is no :class:`CommGroup`.
        RankLeftError: another member has ended, or never calls it.

    Example:
        >>> smp.barrier()  # of all ranks
        >>> smp.barrier(smp.TP_GROUP)  # of those that share layers with this one
    """
    current_session().messages.barrier(group)


def dp_barrier() -> None:
    """Call :func:`barrier` over the data parallel group.

    Example:
        >>> smp.dp_barrier()
    """
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """Call :func:`barrier` over the model parallel group.

    Example:
        >>> smp.mp_barrier()
    """
    barrier(MP_GROUP)
