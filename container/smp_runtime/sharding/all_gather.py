"""Gathering of a unit: in one collective or in two phases, depending on the hosts of its ranks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from smp_config import Group, smddp
from smp_config.machine.collective_backends import traits_of_group
from smp_runtime.comm.collective_log import record_wait, without_record
from smp_runtime.comm.control import host_name, timeout_seconds
from smp_runtime.comm.devices import device_thread
from smp_runtime.errors import SMPRuntimeError

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

    The second phase begins when the first one is over, whether a rank waits or not. All ranks start gathers in the same
    order, and the second phases follow in that order. Only these gathers use the two groups.

    Args:
        across: one rank of each host, those with this rank's local number.
        hosts: ranks in ``across``, and this rank's position among them.
        local: ranks in ``inside``, and this rank's position among them.
        order: by position in the sharding group, the number of its host and its local number.
        phases: starts the second phase after the first.
    """

    def __init__(
        self,
        collectives: Collectives,
        across: dist.ProcessGroup,
        inside: dist.ProcessGroup,
        hosts: tuple[int, int],
        local: tuple[int, int],
        order: list[tuple[int, int]],
        phases: GatherPhases,
    ) -> None:
        self._collectives = collectives
        self._across = across
        self._inside = inside
        self._hosts = hosts[0]
        self._local = local[1]
        self._phases = phases
        self.position = local[1] * hosts[0] + hosts[1]
        self.shard_of = [number * hosts[0] + host for host, number in order]

    def start(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :class:`Gathering`."""
        block = shard.numel() * self._hosts
        # In place: the second phase expects a rank's block at this position.
        mine = full[self._local * block : (self._local + 1) * block]
        return self._phases.start(
            lambda: self._collectives.all_gather(mine, shard, self._across),
            lambda: self._collectives.all_gather(full, mine, self._inside),
        )


class GatherPhases(Protocol):
    """Starts two collectives; the second needs the result of the first."""

    def start(self, first: Callable[[], Work], second: Callable[[], Work]) -> Work:
        """Start the first, and the second after it; return the work of both."""
        ...


class StreamPhases:
    """Both collectives are queued at once, for NCCL: on a stream that waits for the first before the second begins.

    The caller's stream waits for neither until it waits for the returned work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def start(self, first: Callable[[], Work], second: Callable[[], Work]) -> Work:
        """See :class:`GatherPhases`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # The caller's stream may still write the shard, or read what was in the memory before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            first().wait()
            return second()


class ThreadPhases:
    """A thread waits for each first collective and starts the second, for transports without streams.

    The thread starts with the first gather, and ends with :meth:`close`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: queue.SimpleQueue[_TwoPhases | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, first: Callable[[], Work], second: Callable[[], Work]) -> Work:
        """See :class:`GatherPhases`."""
        if self._thread is None:
            self._thread = device_thread(self._serve, "smp-gather", self._device)
            self._thread.start()
        begun = _TwoPhases(first(), second)
        self._under_way.put(begun)
        return begun

    def close(self) -> None:
        """End the thread once it has started the phases of the gathers so far."""
        self._under_way.put(None)
        self._thread = None

    def _serve(self) -> None:
        failure: BaseException | None = None
        with torch.no_grad(), self._own_stream():
            while (begun := self._under_way.get()) is not None:
                # After a failure nothing more is sent: ranks would otherwise begin different collectives.
                failure = begun.go_on(failure)
                del begun  # it holds tensors

    def _own_stream(self) -> contextlib.AbstractContextManager[object]:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))


class _TwoPhases:
    """A gather whose second phase another thread starts."""

    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first = first
        self._begin_second = second
        self._second: Work | None = None
        self._failure: BaseException | None = None
        # The result may be asked for before the thread has started the second phase.
        self._is_begun = threading.Event()

    def go_on(self, failure: BaseException | None) -> BaseException | None:
        """Start the second phase when the first is over; return the error, which may be that of an earlier gather."""
        try:
            if failure is None:
                without_record(self._first).wait()
                self._second = self._begin_second()
        except BaseException as error:  # the thread that waits raises it
            failure = error
        self._failure = failure
        self._is_begun.set()
        return failure

    def wait(self) -> None:
        """Block until both phases are over.

        Raises:
            SMPRuntimeError: the first one has not ended in time. Usually the collective itself raises an error before.
        """
        patience = 2 * timeout_seconds()
        with record_wait(self._first):
            if not self._is_begun.wait(patience):
                raise SMPRuntimeError(
                    f"an all-gather between hosts has not ended within {patience:g} s, twice SMP_TIMEOUT_SECONDS; let every rank "
                    "call the same modules, and look for the first error of a rank of another host"
                )
        if self._failure is not None:
            raise self._failure
        if self._second is None:
            raise AssertionError("the second phase has begun without its work")
        self._second.wait()


class WaitingPhases:
    """The second collective starts when a rank waits, for other ranks that are simulated."""

    def start(self, first: Callable[[], Work], second: Callable[[], Work]) -> Work:
        """See :class:`GatherPhases`."""
        return _WaitingWork(first(), second)


class _WaitingWork:
    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first = first
        self._second = second

    def wait(self) -> None:
        self._first.wait()
        self._second().wait()


def _phases_for(ranks: Ranks, group: dist.ProcessGroup) -> GatherPhases:
    """Return the way in which a group's transport starts a collective after another."""
    traits = traits_of_group(dist.get_backend_config(group), ranks.device.type)
    order = traits.order if traits is not None else "wait"
    if order == "stream":
        return StreamPhases(ranks.device)
    if order == "wait":
        return WaitingPhases()
    phases = ThreadPhases(ranks.device)
    ranks.groups.at_end(phases.close)
    return phases


def make_gathering(ranks: Ranks, *, hierarchical: bool) -> Gathering:
    """Choose the gathering: two phases, between and inside hosts, if requested and possible; else one.

    It is possible if the sharding groups span hosts evenly. SMDDP's all-gather has its own phases, in pieces that fit
    its buffers.
    """
    members, mine = ranks.members(Group.SHARD), ranks.rank_in(Group.SHARD)
    plain = PlainGathering(ranks.collectives, ranks.groups.group(Group.SHARD), len(members), mine)
    used = traits_of_group(ranks.backend, ranks.device.type)
    has_own_phases = used is not None and used.has_phases
    if has_own_phases or not hierarchical:
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
        *(ranks.collectives, across, inside, (len(layout), host), (len(layout[host]), local), order),
        _phases_for(ranks, across),
    )


def host_layout(members: Sequence[int], host_of: Sequence[str]) -> list[list[int]] | None:
    """Return the members host by host.

    Returns:
        None for one host, one rank per host, or hosts with unequal numbers of members.

    Args:
        host_of: by global rank, the name of its host.
    """
    rows = smddp.host_rows([host_of[rank] for rank in members])
    if isinstance(rows, str):
        return None
    return [[members[position] for position in row] for row in rows]
