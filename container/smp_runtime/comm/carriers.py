"""What carries small objects between ranks: MPI under ``mpirun``, a ``TCPStore`` under ``torchrun``, nothing for one process."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from smp_runtime.comm.waiting import FAILED, Place, Wait, script_s_call, timeout_seconds
from smp_runtime.errors import SMPRuntimeError, SMPUserError

#: Where ranks tell where they are; no channel of :mod:`smp_runtime.comm.control`.
_PLACES_CHANNEL = 4

#: In jobs of so many ranks each tells all others when it leaves; in larger ones those that it has spoken with.
_TELLS_ALL = 64

#: Longest pauses between two looks for a message; a store serves all ranks at once.
_MPI_PAUSE_SECONDS = 1e-3
_STORE_PAUSE_SECONDS = 5e-3


class SoloCarrier:
    """One process alone: there is nobody to talk to."""

    rank = 0
    size = 1
    call = ""

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot send to rank {dest}: this job has one process")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot receive from rank {source}: this job has one process")

    def look(self, other: int, *, asks: bool) -> Place | None:
        """See :class:`Carrier`."""
        return None

    def went_on(self) -> None:
        """Nobody was asked."""

    def close(self, left: str) -> None:
        """There is no connection."""


class MpiCarrier:
    """Messages over MPI; synchronous sends, polled so that every wait has a deadline.

    A rank that leaves tells it to the others at once, since ``MPI_Finalize`` then keeps it until all have left, without a word.
    One that fails ends without ``MPI_Finalize``, so that mpirun ends the others.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.call = ""
        #: Who is told when this rank leaves. In a large job not all: a connection to each would be made for that.
        self._contacts = set(range(self.size)) if self.size <= _TELLS_ALL else set()
        self._places: dict[int, Place] = {}
        self._told: list[Any] = []  # requests that are not complete
        atexit.register(self._at_exit)

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        self._contacts.add(dest)
        request = self._comm.issend(payload, dest=dest, tag=channel)
        with Wait(self, dest, _MPI_PAUSE_SECONDS) as wait:
            while not request.test()[0]:
                wait.pause()

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        self._contacts.add(source)
        with Wait(self, source, _MPI_PAUSE_SECONDS) as wait:
            while (message := self._comm.improbe(source=source, tag=channel)) is None:
                wait.pause()
        return message.recv()

    def look(self, other: int, *, asks: bool) -> Place | None:
        """See :class:`Carrier`."""
        if asks and not self._has_left(other):
            self._places.pop(other, None)
            self._tell(other, Place(self.call or script_s_call()), asks=True)
        self._hear()
        return self._places.get(other)

    def went_on(self) -> None:
        """Who has heard where this rank was asks again."""

    def _tell(self, other: int, place: Place, *, asks: bool) -> None:
        self._told = [request for request in self._told if not request.test()[0]]
        self._told.append(self._comm.isend((asks, place), dest=other, tag=_PLACES_CHANNEL))

    def _hear(self) -> None:
        """Take what others have told of their places, and answer those that asked."""
        status = self._mpi.Status()
        while (
            found := self._comm.improbe(source=self._mpi.ANY_SOURCE, tag=_PLACES_CHANNEL, status=status)
        ) is not None:
            source = status.Get_source()
            asked, place = found.recv()
            if not self._has_left(source):
                self._places[source] = place
            if asked:
                self._tell(source, Place(self.call or script_s_call()), asks=False)

    def _has_left(self, other: int) -> bool:
        return other in self._places and bool(self._places[other].left)

    def close(self, left: str) -> None:
        """See :class:`Carrier`. The communicator stays: others may still use it, and freeing it is a call of all."""
        if left == FAILED or self._mpi.Is_finalized():
            return  # mpirun ends the others
        for other in self._contacts - {self.rank}:
            self._tell(other, Place(left=left), asks=False)

    def _at_exit(self) -> None:
        """Where an exception ends the process, see to its end before ``MPI_Finalize``, which would wait for the others."""
        if getattr(sys, "last_value", None) is not None:
            # The interpreter lets go of this last, when files are written and exit handlers have run.
            sys.__dict__["smp_ends_without_mpi"] = _EndsProcess()


class _EndsProcess:
    """Ends the process as failed when nothing holds this any more."""

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


class StoreCarrier:
    """Messages over a ``TCPStore``: for ``torchrun`` and other launchers that set ``MASTER_ADDR`` and ``RANK``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        import torch.distributed as dist

        self.rank = int(environ["RANK"])
        self.size = int(environ["WORLD_SIZE"])
        self.call = ""
        self._lost = dist.DistNetworkError
        rendezvous = dist.rendezvous("env://", rank=self.rank, world_size=self.size)
        base, _, _ = next(iter(rendezvous))
        # Some versions of PyTorch take the same store when an agent starts the ranks again.
        self._store = dist.PrefixStore(f"smp-control/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)
        self._store.set_timeout(timedelta(seconds=timeout_seconds()))
        self._sequence: dict[tuple[int, int, int], int] = defaultdict(int)
        #: How often this rank has joined; all have equally often.
        self._joined = self._store.add(f"joined/{self.rank}", 1)

    def _key(self, source: int, dest: int, channel: int) -> str:
        number = self._sequence[source, dest, channel]
        self._sequence[source, dest, channel] = number + 1
        return f"{self._joined}/{channel}/{source}/{dest}/{number}"

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        key = self._key(self.rank, dest, channel)
        self._store.set(key, pickle.dumps(payload))  # type: ignore[arg-type]  # bytes work, the stub says str
        self._await(key + "/received", dest)
        self._store.delete_key(key + "/received")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        key = self._key(source, self.rank, channel)
        self._await(key, source)
        payload = self._store.get(key)
        self._store.delete_key(key)
        self._store.set(key + "/received", "1")
        return pickle.loads(payload)

    def _await(self, key: str, other: int) -> None:
        """Return when ``other`` has set the key. Not by the store's own wait, which sees nothing else meanwhile."""
        try:
            with Wait(self, other, _STORE_PAUSE_SECONDS) as wait:
                while not self._store.check([key]):
                    wait.pause()
        except self._lost as error:
            raise SMPRuntimeError(
                f"rank {self.rank} waits in {self.call or script_s_call()} for rank {other}, but the store of this job is gone "
                f"({str(error).splitlines()[0]}): the process that keeps it, rank 0 where no agent does, has ended; let every rank "
                "make the same calls, and look for the first error of that rank"
            ) from None

    def look(self, other: int, *, asks: bool) -> Place | None:
        """See :class:`Carrier`."""
        if asks:
            self._tell(Place(self.call or script_s_call()))
        place = self._place(other)
        found: Place | None = pickle.loads(self._store.get(place)) if self._store.check([place]) else None
        return found

    def went_on(self) -> None:
        """This rank waits no more. The key stays: another rank may be about to read it, and would wait for it."""
        self._tell(Place())

    def close(self, left: str) -> None:
        """See :class:`Carrier`; the store itself closes with the last reference to it."""
        with contextlib.suppress(RuntimeError):  # it is gone with the rank that had it
            self._tell(Place(left=left))

    def _tell(self, place: Place) -> None:
        self._store.set(self._place(self.rank), pickle.dumps(place))  # type: ignore[arg-type]  # as above

    def _place(self, rank: int) -> str:
        return f"{self._joined}/place/{rank}"
