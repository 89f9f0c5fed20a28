"""The control plane of a rehearsal: processes that stand for kinds of ranks, and answer for all ranks of their kind."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from smp_config import Coordinates, Group, Topology
from smp_runtime.comm.control import RUNTIME_CHANNEL, USER_CHANNEL, Arrival, ControlPlane
from smp_runtime.errors import SMPUserError
from smp_tools.rehearsal.message_log import MessageLog

if TYPE_CHECKING:
    from smp_runtime.comm.authentication import Seal
    from smp_runtime.comm.waiting import Carrier, WaitingPlace
    from smp_tools.rehearsal.calls import CallLog


#: Prefix of the name of a step function's call.
_STEP = "the step "


class Kinds:
    """The representatives of all ranks: the first replica's first tensor parallel rank of each pipeline stage.

    Args:
        ranks_per_host: neighboring ranks are on one host.
        last: the last replica's last tensor parallel rank instead.

    Attributes:
        representatives: one rank of each stage, which represents all of it.
        others: ranks that are rehearsed at another time: the last ranks, or the first.
    """

    def __init__(self, topology: Topology, ranks_per_host: int, *, last: bool = False) -> None:
        self._topology = topology
        self._ranks_per_host = ranks_per_host
        tensor, replica = topology.size(Group.TP) - 1, topology.size(Group.RDP) - 1
        stages = range(topology.pipeline)
        first_ranks = [topology.rank_at(Coordinates(stage, 0, 0)) for stage in stages]
        last_ranks = [topology.rank_at(Coordinates(stage, tensor, replica)) for stage in stages]
        self.representatives, self.others = (last_ranks, first_ranks) if last else (first_ranks, last_ranks)

    def kind_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return self._topology.coordinates(rank).pp

    def host_of(self, rank: int) -> int:
        """Return the index of a rank's host."""
        return rank // self._ranks_per_host

    def hosts_of(self, ranks: Sequence[int]) -> int:
        """Return the number of hosts that the ranks are on."""
        return len({self.host_of(rank) for rank in ranks})

    def stands_for(self, kind: int) -> int:
        """Return the number of ranks of a kind."""
        return self._topology.size(Group.DP)

    def host_name(self, rank: int) -> str:
        """Return the host name that the launcher would announce for a rank."""
        return f"algo-{self.host_of(rank) + 1}"


class KindsCarrier:
    """A carrier of messages between ranks of an absent job, through one process for each kind of rank.

    A message to a rank of the same kind comes back to the sender, because that rank sends the same message. See
    :class:`~smp_runtime.comm.waiting.Carrier`.

    Args:
        inner: connects the processes; its ranks are kinds.
        said: messages of ranks that were rehearsed before.
        heard: records this rank's messages for ranks that are rehearsed after it.
    """

    def __init__(
        self, inner: Carrier, kinds: Kinds, size: int, said: MessageLog | None = None, heard: MessageLog | None = None
    ) -> None:
        self._inner = inner
        self._kinds = kinds
        self._said = said or MessageLog()
        self._heard = heard
        self.rank = kinds.representatives[inner.rank]
        self.size = size
        self._own: dict[int, deque[Any]] = defaultdict(deque)

    @property
    def call(self) -> str:
        """See :class:`Carrier`."""
        return self._inner.call

    @call.setter
    def call(self, name: str) -> None:
        self._inner.call = name

    @property
    def seal(self) -> Seal | None:
        """See :class:`Carrier`."""
        return self._inner.seal

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        kind = self._kinds.kind_of(dest)
        if dest in self._kinds.others and channel == USER_CHANNEL:
            if self._heard is not None:
                self._heard.note(self.rank, "", channel, [dest], payload)
            if dest in self._said.speakers:
                return  # rehearsed before: it has finished, with its own messages
        if kind == self._inner.rank:
            self._own[channel].append(payload)
            return
        # One process stands for all ranks of its kind, so a message to all of them reaches it once.
        is_received = self.call != "smp.broadcast" or dest in self._kinds.representatives
        if is_received:
            self._inner.send(payload, kind, channel)

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        is_known, saying = self._said.next(source, "", channel, [self.rank])
        if is_known:
            return saying
        kind = self._kinds.kind_of(source)
        if kind != self._inner.rank:
            return self._inner.receive(kind, channel)
        if not self._own[channel]:
            raise SMPUserError(
                f"rank {self.rank} receives from rank {source}, which runs the same script at the same stage, but rank {self.rank} "
                "has not sent anything that rank could have sent: in a rehearsal one process stands for all ranks of a stage, so "
                "what only some of them send cannot be rehearsed; use smp.broadcast or smp.allgather",
                code="SMP120",
            )
        return self._own[channel].popleft()

    def look(self, other: int, *, asks: bool) -> WaitingPlace | None:
        """See :class:`Carrier`."""
        kind = self._kinds.kind_of(other)
        return None if kind == self._inner.rank else self._inner.look(kind, asks=asks)

    def went_on(self) -> None:
        """See :class:`Carrier`."""
        self._inner.went_on()

    def close(self, left: str) -> None:
        """See :class:`Carrier`."""
        self._inner.close(left)


class RehearsedControl(ControlPlane):
    """A control plane with collectives among the existing processes only; each one answers for all ranks of its kind.

    Args:
        inner: connects the processes; its ranks are kinds.
        calls: writes down the script's calls.
        said: messages of ranks that were rehearsed before.
        heard: records this rank's messages for ranks that are rehearsed after it.
    """

    speaks_for_all = True

    def __init__(
        self,
        inner: Carrier,
        kinds: Kinds,
        size: int,
        *,
        calls: CallLog | None = None,
        said: MessageLog | None = None,
        heard: MessageLog | None = None,
    ) -> None:
        super().__init__(KindsCarrier(inner, kinds, size, said, heard))
        self._kinds = kinds
        self._mine = inner.rank
        self._there = set(kinds.representatives)
        self._calls = calls
        self._said = said or MessageLog()
        self._heard = heard

    @contextlib.contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """See :class:`ControlPlane`."""
        is_outermost = not self._carrier.call
        with super().doing(call):
            if self._calls is not None and is_outermost:
                self._calls.another()
                # The ranks of a step wait for each other's tensors, even if they agree on nothing.
                if call.startswith(_STEP):
                    self._calls.of_library(self._kinds.representatives)
            yield

    def allgather(self, payload: Any, ranks: Sequence[int], channel: int = RUNTIME_CHANNEL) -> list[Any]:
        """See :class:`ControlPlane`."""
        call = self._carrier.call
        if self._calls is not None:
            self._calls.of_library(ranks)
        if self._heard is not None and any(rank in ranks for rank in self._kinds.others):
            self._heard.note(self.rank, call, channel, ranks, payload)
        there = [rank for rank in ranks if rank in self._there]
        said = [payload]
        if len(there) > 1:
            said = super().allgather(payload, there, channel)
        by_kind = {self._kinds.kind_of(rank): one for rank, one in zip(there, said, strict=True)}
        # Of a kind that no process of the group stands for, this one: groups of one stage have only its ranks.
        everyone = [by_kind.get(self._kinds.kind_of(rank), payload) for rank in ranks]
        # Ranks that were rehearsed before have left words of their own.
        for place, rank in enumerate(ranks):
            if rank in self._said.speakers:
                is_known, saying = self._said.next(rank, call, channel, ranks)
                if is_known:
                    everyone[place] = saying
        return everyone

    def gather(self, payload: Any, ranks: Sequence[int]) -> list[Any] | None:
        """See :class:`ControlPlane`."""
        everyone = self.allgather(payload, ranks)
        return everyone if self.rank == ranks[0] else None

    def arrivals(self, mine: Arrival) -> list[Arrival]:
        """See :class:`ControlPlane`; every rank is on its own host."""
        said = super().arrivals(mine)
        return [one._replace(host=self._kinds.host_name(rank)) for rank, one in enumerate(said)]

    def _others(self) -> list[int]:
        return [rank for rank in self._kinds.representatives if rank != self.rank]
