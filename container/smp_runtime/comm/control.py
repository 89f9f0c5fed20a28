"""The control plane: the ranks of the job, and small Python objects that they exchange.

One protocol, three carriers (:mod:`smp_runtime.comm.control_transports`), chosen in :func:`connect`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from smp_config import ConfigError
from smp_config.formats.rank_lists import ranks_text
from smp_config.machine.launchers import Started, require_meeting_place, started_by
from smp_config.machine.shared_gpu import GLOO
from smp_records.rank_record import current_record
from smp_records.script_lines import is_runtime_module, script_line
from smp_runtime.comm.control_transports import MpiTransport, SoloTransport, StoreTransport, process_group_size
from smp_runtime.comm.waiting import ENDED, Carrier, left_error
from smp_runtime.comm.waiting import timeout_seconds as timeout_seconds
from smp_runtime.errors import (
    ConnectionLostError,
    DeadlineError,
    RankLeftError,
    SMPError,
    SMPRuntimeError,
    SMPUserError,
)

#: Message channels, so that the runtime's own messages never match a script's, nor a script's ``allgather`` its ``send``.
USER_CHANNEL = 1
RUNTIME_CHANNEL = 2
USER_COLLECTIVE_CHANNEL = 3

#: Seconds for ranks that have left to report it, after a connection was lost.
_ANSWER_SECONDS = 1.5

#: Texts in errors of PyTorch's collectives that another rank's end may cause.
_LOST = re.compile(
    r"(?i)gloo|nccl|c10d|TCPStore|connection (closed|reset|refused|was)|socket|broken pipe|remote process"
)
#: Of those, errors about a connection that has ended.
_CUT_OFF = re.compile(r"(?i)connection (closed|reset|refused|was|lost)|broken pipe|remote process|socket|pair closure")
_TIMED_OUT = re.compile(r"(?i)timed out|timeout")


def host_name() -> str:
    """Return the name of this rank's host as the launcher announced it, else the machine's host name.

    Several hosts may be simulated on one machine.
    """
    return os.environ.get("SMP_HOST") or os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


class Arrival(NamedTuple):
    """Data that a rank sends to all others when it joins the job.

    It is a plain tuple, so that it can be sent in a job without a secret too.
    """

    host: str  # as the launcher announced it
    settings: str  # all that it was configured with
    instance: str | None  # its type
    gpus: list[str]  # that it sees
    process_mode: bool = False  # whether this project's launcher has started all ranks as processes of one machine
    shared_gpu: str = GLOO  # backend of ranks that share a GPU


class ControlPlane:
    """Object messages and small collectives between ranks, on any carrier.

    Collectives are built from pairs of messages: they carry a few Python objects at start and in a script's own
    calls, never tensors of the training step.
    """

    #: Whether this process stands for ranks that do not exist. Those would do the same as this process.
    speaks_for_all = False

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.rank = carrier.rank
        self.size = carrier.size
        #: Returns the ranks that tensors can no longer reach. It is set by the owner of the connections.
        self.lost_ranks: Callable[[], Sequence[int]] = tuple

    @contextlib.contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """Run the block as part of the public call ``call``, which error messages name.

        Inside another public call it changes nothing.

        Raises:
            RankLeftError: in place of an error about a lost connection, if other ranks have left the job.
        """
        if self._carrier.call:
            yield
            return
        self._carrier.call = call
        current_record().call(call)
        try:
            yield
        except (RankLeftError, DeadlineError) as error:
            if not _comes_from_us(error.__traceback__):
                raise
            plain = type(error)(*error.args)
            plain.accused = error.accused
            raise plain from None  # the runtime's frames before the wait do not help the script
        except RuntimeError as error:
            told = self.explained(error)
            if told is None:
                raise
            raise told from (None if isinstance(told, RankLeftError) else error)
        finally:
            self._carrier.call = ""

    def explained(self, error: BaseException) -> SMPRuntimeError | None:
        """Return a clearer error for an error of PyTorch's collectives, or None for any other error.

        The new error names the ranks that have left, or those to which the connection is lost.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, SMPError) or not _LOST.search(str(error)):
            return None
        if left := self._who_left():
            return left_error(self._carrier, left)
        said = next(iter(str(error).splitlines()), "").partition(". This is")[0]
        call = self._carrier.call
        file, line = script_line()
        at = f" ({os.path.basename(file)}:{line})" if file else ""
        if _TIMED_OUT.search(said):
            return DeadlineError(
                f"rank {self.rank} waited {timeout_seconds():g} s in {call or 'a collective'}{at} for another rank ({said}); let "
                "every rank make the same calls in the same order, or raise SMP_TIMEOUT_SECONDS"
            )
        if not _CUT_OFF.search(said):
            return None
        lost = tuple(self.lost_ranks())
        whom = f"rank {lost[0]}" if lost else "another rank"
        if len(lost) > 1:
            whom = f"ranks {ranks_text(lost)}"
        cut_off = ConnectionLostError(
            f"rank {self.rank} has lost its connection to {whom} in {call or 'a collective'}{at}: it ended without a word from "
            f"there ({said}); see the log of {whom} and of its host: the process may have been killed, or the network between "
            "the hosts may have failed"
        )
        cut_off.accused = lost
        return cut_off

    def _who_left(self) -> dict[int, str]:
        """Return ranks that have left the job, and how they left.

        It asks briefly, since the lost connection may have been theirs.
        """
        others = self._others()
        began, asks = time.monotonic(), True
        while time.monotonic() - began < _ANSWER_SECONDS:
            places = {rank: self._carrier.look(rank, asks=asks) for rank in others}
            if left := {rank: place.left for rank, place in places.items() if place is not None and place.left}:
                return left
            asks = False
            time.sleep(0.02)
        return {}

    def _others(self) -> list[int]:
        """Return the ranks of other processes."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def arrivals(self, mine: Arrival) -> list[Arrival]:
        """Exchange arrival data between all ranks, and return it by rank; all ranks must call it."""
        everyone = self.allgather(tuple(mine), list(range(self.size)))
        return [Arrival(*one) for one in everyone]

    def send(self, payload: Any, dest: int, channel: int = USER_CHANNEL) -> None:
        """Send an object to a global rank; returns when it has been received there."""
        self._carrier.send(payload, self._peer(dest, "send to"), channel)

    def receive(self, source: int, channel: int = USER_CHANNEL) -> Any:
        """Receive the next object from a global rank."""
        return self._carrier.receive(self._peer(source, "receive from"), channel)

    #: Members of a group that one of them serves; in a larger one it would be busy for seconds with sending all to all.
    _MOST_THROUGH_LEADER = 32

    def allgather(self, payload: Any, ranks: Sequence[int], channel: int = RUNTIME_CHANNEL) -> list[Any]:
        """Return every member's object, in the order of ``ranks``; all members must call it."""
        leader = ranks[0]
        if len(ranks) > self._MOST_THROUGH_LEADER:
            return self._allgather_by_tree(payload, ranks, channel)
        if self.rank != leader:
            self._send_part(payload, leader, channel)
            return self._receive_part(leader, channel)
        # A send returns when it was received, so the leader receives from all before it answers the first.
        gathered = [payload if rank == leader else self._receive_part(rank, channel, answers=True) for rank in ranks]
        for rank in ranks:
            if rank != leader:
                self._send_part(gathered, rank, channel)
        return gathered

    def _send_part(self, payload: Any, dest: int, channel: int) -> None:
        """Send this rank's part of a collective, with the public call that it belongs to."""
        self.send((self._call_of_thread(), payload), dest, channel)

    def _receive_part(self, source: int, channel: int, *, answers: bool = False) -> Any:
        """Receive another rank's part of a collective.

        Args:
            answers: whether the other rank waits for an answer. It gets one before an error, so that it raises the same.

        Raises:
            SMPUserError: the part belongs to another public call than this rank's, so the ranks do not agree any more.
        """
        theirs, payload = self.receive(source, channel)
        mine = self._call_of_thread()
        if mine and theirs and mine != theirs:
            file, line = script_line()
            at = f" ({os.path.basename(file)}:{line})" if file else ""
            if answers:
                self._send_part(None, source, channel)
            raise SMPUserError(
                f"rank {self.rank} has called {mine}{at}, but rank {source} {theirs}; make the same calls on every rank, in the "
                "same order: look for an `if` on the rank around one of the two",
                code="SMP311",
            )
        return payload

    def _call_of_thread(self) -> str:
        """Return the public call in which this rank is, empty in a thread that works beside the script."""
        return self._carrier.call if threading.current_thread() is threading.main_thread() else ""

    def _allgather_by_tree(self, payload: Any, ranks: Sequence[int], channel: int) -> list[Any]:
        """Run :meth:`allgather` in a number of rounds that is logarithmic in the number of ranks.

        No rank sends more often than that.
        """
        me, size = ranks.index(self.rank), len(ranks)
        found, step = {me: payload}, 1
        while step < size and not me & step:
            if me + step < size:
                found.update(self._receive_part(ranks[me + step], channel, answers=True))
            step *= 2
        if me:  # it has all that those above it have, up to ``me + step``
            self._send_part(found, ranks[me - step], channel)
            found = self._receive_part(ranks[me - step], channel)
        while (step := step // 2) > 0:
            if me + step < size:
                self._send_part(found, ranks[me + step], channel)
        return [found[position] for position in range(size)]

    def gather(self, payload: Any, ranks: Sequence[int]) -> list[Any] | None:
        """Return every member's object on the first member, and None on the others; all members must call it."""
        leader = ranks[0]
        if self.rank != leader:
            self._send_part(payload, leader, RUNTIME_CHANNEL)
            return None
        parts = []
        for rank in ranks:
            part = payload if rank == leader else self._receive_part(rank, RUNTIME_CHANNEL)
            parts.append(part)
        return parts

    def broadcast(self, payload: Any, ranks: Sequence[int]) -> Any:
        """Return the first member's object on every member; all members must call it."""
        return self.allgather(payload, ranks)[0]

    def barrier(self, ranks: Sequence[int], channel: int = RUNTIME_CHANNEL) -> None:
        """Return when every member has arrived."""
        self.allgather(None, ranks, channel)

    @property
    def has_secret(self) -> bool:
        """Return whether a rank can distinguish messages of this job's ranks from those of other processes."""
        return self._carrier.seal is not None

    def secret_for(self, purpose: str, nonce: bytes) -> bytes:
        """Return a secret for one purpose that only the ranks of this job know.

        If the job has no secret (:class:`~smp_runtime.comm.control_transports.StoreTransport`), this returns the
        nonce. Then any process that reads the ranks' messages knows it.

        Args:
            nonce: a nonce of one rank, which the other ranks have received.
        """
        return nonce if self._carrier.seal is None else self._carrier.seal.derived(purpose, nonce)

    def close(self, left: str = ENDED) -> None:
        """Leave the job; later messages are errors.

        Args:
            left: how, for others that wait for this rank: :data:`ENDED` or :data:`FAILED`.
        """
        self._carrier.close(left)

    def _peer(self, rank: int, verb: str) -> int:
        if not 0 <= rank < self.size:
            raise SMPUserError(f"cannot {verb} rank {rank}: this job has ranks 0 to {self.size - 1}", code="SMP311")
        if rank == self.rank:
            raise SMPUserError(
                f"rank {rank} cannot {verb} itself: name another rank from 0 to {self.size - 1}", code="SMP311"
            )
        return rank


def _comes_from_us(trace: types.TracebackType | None) -> bool:
    """Return whether a traceback contains no code of the script."""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__"))
        if name != "contextlib" and not is_runtime_module(name):
            return False
        trace = trace.tb_next
    return True


def connect(environ: Mapping[str, str] | None = None) -> ControlPlane:
    """Join the job that started this process, or start a job of one process.

    Ranks started by MPI use MPI, and other ranks meet at a store. If the script or its caller has initialized
    ``torch.distributed``, as Ray Train does, its ranks are those of the job. The environment need not name them.

    Raises:
        ConfigError: variables of launchers are incomplete, or contradict one another.
        SMPRuntimeError: the other ranks cannot be reached.
    """
    environ = os.environ if environ is None else environ
    try:
        started = started_by(environ)
    except ConfigError:
        if not process_group_size() > 1:
            raise
        started = None  # variables left over from another job do not matter to ranks that have met
    if started is not None and started.launcher.speaks_mpi:
        return ControlPlane(_mpi(started))
    if process_group_size() > 1:
        return ControlPlane(StoreTransport.of_process_group(environ))
    if started is not None:
        require_meeting_place(started, environ)
        return ControlPlane(StoreTransport.at_meeting_place(started.rank, started.size, environ))
    return ControlPlane(SoloTransport())


def _mpi(started: Started) -> MpiTransport:
    """Return the transport to ranks that MPI has started.

    mpi4py may use another MPI library than the launcher's, which then does not know the other ranks. That is an
    error.
    """
    try:
        carrier = MpiTransport()
    except ImportError as error:
        raise SMPRuntimeError(
            f"this process was started by mpirun, but mpi4py cannot be imported ({error}); install it with pip install mpi4py"
        ) from error
    if (carrier.rank, carrier.size) != (started.rank, started.size):
        raise SMPRuntimeError(
            f"MPI says that this is rank {carrier.rank} of {carrier.size}, but {started.said} were set by its launcher, "
            f"{started.launcher.value}: the MPI library that mpi4py uses does not know that launcher, so every process would train "
            "alone; use the mpirun that belongs to mpi4py's MPI, or start the ranks with 'smp-launch run SCRIPT', which needs no "
            "MPI"
        )
    return carrier
