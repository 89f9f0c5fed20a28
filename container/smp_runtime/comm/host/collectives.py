"""Collectives of ranks of one host, over shared memory: no byte goes through a socket, and none is copied twice.

A rank publishes its tensor when a collective begins, and reads the others' when it waits. So no thread of its own
competes for processors with the ranks' computation.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import TorchCollectives
from smp_runtime.comm.host.shared_memory import MOST_RANKS, Arena, Invitation, Neighbour, Published, is_possible
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.parameter_attributes import get_data

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Work
    from smp_runtime.comm.control import ControlPlane

#: Above this many bytes each rank sums a part only, and takes the others' sums; below, each sums all.
_SUMMED_WHOLE = 2**16
#: Larger tensors go over gloo, so that no more memory is held for them.
_MOST_BYTES = 2**30
#: Elements that are summed at a time, so that the sum stays in the processor's cache.
_SUMMED_AT_ONCE = 2**14


class _Members:
    """The ranks of a process group that are all on this host, and its unfinished collectives, in order."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], host: Host) -> None:
        self.group = group  # held, so that its identifier stays its own
        self.host = host
        self.size = len(ranks)
        self.mine = ranks.index(host.rank)
        self.others = [None if rank == host.rank else host.neighbours[rank] for rank in ranks]
        self.readers = [host.position_of[rank] for rank in ranks if rank != host.rank]
        name = f"{group.group_name} {list(ranks)}"
        # Seven bytes: entries of the list are signed words of eight.
        self.key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        self._places = itertools.count(2, 2)
        self.unfinished: deque[_Work] = deque()
        #: Several threads may wait for collectives of the group: each collective ends once, and in order.
        self.lock = threading.Lock()

    def place(self) -> int:
        """Return the next position in the group's order; a collective takes two."""
        return next(self._places)

    def publish(self, place: int, tensor: torch.Tensor) -> None:
        """Let the others read a tensor of the arena."""
        self.host.arena.publish(self.key, place, self.readers, tensor)


class Host:
    """The ranks of this host, and the memory that they share.

    Args:
        ranks: their global numbers.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.ranks = list(ranks)
        self.position_of = {one: position for position, one in enumerate(self.ranks)}
        self.arena = Arena(self.position_of[rank], len(self.ranks))
        self.neighbours: dict[int, Neighbour] = {}

    def meet(self, invitations: dict[int, Invitation]) -> None:
        """Map the others' arenas.

        Raises:
            OSError: one cannot be reached.
        """
        size = len(self.ranks)
        for rank in self.ranks:
            if rank != self.rank:
                self.neighbours[rank] = Neighbour(invitations[rank], rank, self.arena.position, size)


def host_of(control: ControlPlane, ranks: Sequence[int], *, is_required: bool = False) -> Host | None:
    """Meet the other ranks of this host; all ranks of the job call it.

    It returns None on all ranks of a host if one of them cannot meet.

    Args:
        ranks: of this host.
        is_required: whether the job cannot do without; the same on all ranks.

    Raises:
        SMPUserError: on all ranks, if the ranks of some host cannot meet though it is required.
    """
    everyone = list(range(control.size))
    host, why = _opened(control.rank, ranks)
    # Two exchanges: memory is opened after all have made theirs, and used after all have opened that of the others.
    told = control.allgather(None if host is None else tuple(host.arena.invitation), everyone)
    invitations = {rank: Invitation(*told[rank]) for rank in ranks if told[rank] is not None}
    if host is not None and len(invitations) == len(ranks):
        try:
            host.meet(invitations)
        except (OSError, ValueError) as error:  # ranks of containers, for example, which see no others' processes
            why = f"it does not reach the memory of the ranks beside it ({error}), as in containers of their own"
    reasons = control.allgather(why, everyone)
    have_met = not any(reasons[rank] for rank in ranks)
    if host is not None and have_met:
        return host
    if host is not None:
        host.arena.leave()
    failed = [rank for rank in everyone if reasons[rank]]
    if is_required and failed:
        raise SMPUserError(
            f"host_collectives is true, but rank {failed[0]} cannot share memory: {reasons[failed[0]]}; remove "
            "host_collectives, and collectives go over gloo",
            code="SMP311",
        )
    return None


def _opened(rank: int, ranks: Sequence[int]) -> tuple[Host | None, str]:
    """Create this rank's part of its host; return it, or None and the reason.

    Both are empty if the rank is alone on its host.
    """
    if len(ranks) == 1:
        return None, ""
    if not is_possible():
        return None, f"it needs Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
    if len(ranks) > MOST_RANKS:
        return None, f"its host has {len(ranks)} ranks, and at most {MOST_RANKS} can share memory"
    try:
        return Host(rank, ranks), ""
    except (OSError, ValueError) as error:  # no such memory here, or no such address space
        return None, f"its host has no memory for it ({error})"


class HostCollectives(TorchCollectives):
    """The collectives of a job on CPUs: groups on one host go over shared memory, all others over gloo."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._groups: dict[int, _Members | dist.ProcessGroup] = {}

    def empty(self, elements: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> torch.Tensor:
        """See :class:`Collectives`: reductions read the vector in place."""
        if device.type == "cpu" and self._members(group) is not None and 0 < elements * dtype.itemsize <= _MOST_BYTES:
            return self._host.arena.empty(elements, dtype)
        return super().empty(elements, dtype, device, group)

    def all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        members = self._members(group)
        if members is None or not _is_served(tensor):
            return super().all_reduce(tensor, group)
        # Every rank computes the whole of a short sum, so that no parts have to be exchanged after it.
        is_short = tensor.nbytes <= _SUMMED_WHOLE
        kind = _WholeSum if is_short else _SumInParts
        return kind(members, _elements(tensor))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        members = self._members(group)
        if members is None or not _is_served(full):
            return super().reduce_scatter(shard, full, group)
        return _PartOfSum(members, _elements(shard), _elements(full))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """See :class:`Collectives`."""
        members = self._members(group)
        if members is None or not _is_served(shard):
            return super().all_gather(full, shard, group)
        return _HostAllGather(members, _elements(full), _elements(shard))

    def close(self) -> None:
        """Stop taking part in collectives, and release the groups."""
        self._groups.clear()
        self._host.arena.leave()

    def _members(self, group: dist.ProcessGroup) -> _Members | None:
        known = self._groups.get(id(group))
        if known is None:
            known = self._groups[id(group)] = self._new_members(group)
        return known if isinstance(known, _Members) else None

    def _new_members(self, group: dist.ProcessGroup) -> _Members | dist.ProcessGroup:
        """Return the members of a group inside this host; else the group itself, so that its ``id`` is not reused."""
        ranks = dist.get_process_group_ranks(group)
        is_here = len(ranks) > 1 and all(rank in self._host.position_of for rank in ranks)
        return _Members(group, ranks, self._host) if is_here else group


def _is_served(tensor: torch.Tensor) -> bool:
    """Return whether a tensor goes through shared memory.

    The result is the same on all ranks, since tensors of a collective are alike.
    """
    return tensor.device.type == "cpu" and tensor.is_contiguous() and 0 < tensor.nbytes <= _MOST_BYTES


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as a vector with a version counter of its own.

    Like the collectives of ``torch.distributed``, writing into it does not move the version of the tensor and its views.
    """
    return get_data(tensor).view(-1)


class _Work:
    """A collective under way.

    Collectives of a group end in order, so one without a wait ends with the next one that is waited for.

    Args:
        source: the tensor that the other ranks read.
        in_place: whether they may read it in place, if it is in the arena.
    """

    def __init__(self, members: _Members, source: torch.Tensor, *, in_place: bool = False) -> None:
        self._members = members
        self._place = members.place()
        arena = members.host.arena
        if not in_place or arena.offset_of(source) is None:
            given, source = source, arena.empty(source.numel(), source.dtype)
            source.copy_(given)
        self._source: torch.Tensor | None = source
        members.publish(self._place, source)
        members.unfinished.append(self)

    def wait(self) -> None:
        """Take part in what has begun before, and in this.

        Raises:
            RuntimeError: another rank has ended, or did not come in time.
        """
        members = self._members
        while self._source is not None:
            with members.lock, torch.no_grad():
                # Another thread may have ended it while this one waited for the lock.
                if self._source is not None:
                    members.unfinished[0].end()
                    members.unfinished.popleft()

    def end(self) -> None:
        """Take part in this one, the first of those under way."""
        if self._source is not None:
            self._finish(self._source)
        self._source = None

    def _finish(self, source: torch.Tensor) -> None:
        """Read the tensors that the others have published, with ``source`` for this rank."""
        raise NotImplementedError

    def _sum(self, source: torch.Tensor, begin: int, out: torch.Tensor) -> None:
        """Sum as many elements as ``out`` has, from ``begin`` on, in the order of the ranks."""
        entries = self._entries(self._place, source.nbytes)
        size = out.numel()
        parts = [
            source[begin : begin + size] if found is None else found.tensor(source.dtype, begin, size)
            for found in entries
        ]
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=out)
        else:
            for total, *pieces in zip(
                out.split(_SUMMED_AT_ONCE), *(part.split(_SUMMED_AT_ONCE) for part in parts), strict=True
            ):
                torch.add(pieces[0], pieces[1], out=total)
                for piece in pieces[2:]:
                    total.add_(piece)
        for found in entries:
            if found is not None:
                found.has_been_read()

    def _entries(self, place: int, nbytes: int) -> list[Published | None]:
        """Return the tensor that each member has published; None for this rank."""
        members = self._members
        return [None if other is None else other.published(members.key, place, nbytes) for other in members.others]


class _WholeSum(_Work):
    """An all-reduce in which every rank sums all elements."""

    def __init__(self, members: _Members, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        super().__init__(members, tensor)  # others may still read it when the sum is written

    def _finish(self, source: torch.Tensor) -> None:
        self._sum(source, 0, self._tensor)


class _SumInParts(_Work):
    """An all-reduce in which every rank sums a part, and takes the others' sums."""

    def __init__(self, members: _Members, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        super().__init__(members, tensor, in_place=True)

    def _finish(self, source: torch.Tensor) -> None:
        members, tensor = self._members, self._tensor
        parts = tensor.split(-(-tensor.numel() // members.size))
        own = members.host.arena.empty(parts[members.mine].numel(), tensor.dtype)
        self._sum(source, sum(part.numel() for part in parts[: members.mine]), own)
        members.publish(self._place + 1, own)
        # A part of this rank's tensor is read by the rank that sums it only, and that has published its sum after it.
        parts[members.mine].copy_(own)
        for part, other in zip(parts, members.others, strict=True):
            if other is not None:
                found = other.published(members.key, self._place + 1, part.nbytes)
                part.copy_(found.tensor(part.dtype, 0, part.numel()))
                found.has_been_read()


class _PartOfSum(_Work):
    """A reduce-scatter."""

    def __init__(self, members: _Members, shard: torch.Tensor, full: torch.Tensor) -> None:
        self._shard = shard
        super().__init__(members, full, in_place=True)

    def _finish(self, source: torch.Tensor) -> None:
        self._sum(source, self._members.mine * self._shard.numel(), self._shard)


class _HostAllGather(_Work):
    """An all-gather."""

    def __init__(self, members: _Members, full: torch.Tensor, shard: torch.Tensor) -> None:
        self._parts = full.view(members.size, -1)
        mine = self._parts[members.mine]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        super().__init__(members, shard)

    def _finish(self, source: torch.Tensor) -> None:
        for part, found in zip(self._parts, self._entries(self._place, source.nbytes), strict=True):
            if found is not None:
                part.copy_(found.tensor(part.dtype, 0, part.numel()))
                found.has_been_read()
