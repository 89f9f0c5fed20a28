"""What carries small objects between ranks: MPI under ``mpirun``, a ``TCPStore`` under ``torchrun``, nothing for one process."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp_config.launchers import ELASTIC_VARIABLE
from smp_runtime.comm.waiting import FAILED, Place, Wait, script_s_call, timeout_seconds
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.tensors.torch_private import default_store

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
    """Messages over a store of PyTorch: for ``torchrun`` and all others whose ranks meet without MPI.

    Args:
        store: reaches all ranks.
        environ: of this process.

    Raises:
        SMPRuntimeError: another process has this rank, or ranks know different numbers of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, environ: Mapping[str, str]) -> None:
        self.rank, self.size = rank, size
        self.call = ""
        self._lost = dist.DistNetworkError
        # Some versions of PyTorch take the same store when an agent starts the ranks again.
        self._store = dist.PrefixStore(f"smp-control/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        self._store.set_timeout(timedelta(seconds=timeout_seconds()))
        self._sequence: dict[tuple[int, int, int], int] = defaultdict(int)
        self._require_same_job(environ)
        #: How often this rank has joined; all have equally often.
        self._joined = self._store.add(f"joined/{self.rank}", 1)

    @classmethod
    def at_meeting_place(cls, rank: int, size: int, environ: Mapping[str, str]) -> StoreCarrier:
        """Meet the others at ``MASTER_ADDR`` and ``MASTER_PORT``, where rank 0 or torchrun's agent keeps a store.

        Raises:
            SMPRuntimeError: nobody was there in time, or the port is taken.
        """
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        patience = timeout_seconds()
        try:
            meeting = dist.rendezvous("env://", rank=rank, world_size=size, timeout=timedelta(seconds=patience))
            store, _, _ = next(iter(meeting))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            said = str(error).splitlines()[0]
            named = f"{place}, which MASTER_ADDR and MASTER_PORT name"
            if rank == 0 and "joined" in said:
                raise SMPRuntimeError(
                    f"rank 0 of {size} waited {patience:g} s for the other ranks at {named} ({said}); see whether all {size} were "
                    "started, with these values and a RANK of their own, and whether they reach that port, or raise "
                    "SMP_TIMEOUT_SECONDS"
                ) from None
            if rank == 0:
                raise SMPRuntimeError(
                    f"rank 0 of {size} cannot keep the store of the job at {named} ({said}); rank 0 must run on that host, and "
                    "nothing else may use the port, such as another job, or another process that is rank 0 of this one: give each "
                    "job a MASTER_PORT of its own, and each process its RANK"
                ) from None
            raise SMPRuntimeError(
                f"rank {rank} of {size} waited {patience:g} s for the store of the job at {named} ({said}); rank 0 keeps it: see "
                "whether it runs there, and whether this host reaches that port, or raise SMP_TIMEOUT_SECONDS"
            ) from None
        return cls(store, rank, size, environ)

    @classmethod
    def of_process_group(cls, environ: Mapping[str, str]) -> StoreCarrier:
        """The ranks of ``torch.distributed``, which the script has started, through the store at which they have met."""
        return cls(default_store(), dist.get_rank(), dist.get_world_size(), environ)

    def _require_same_job(self, environ: Mapping[str, str]) -> None:
        """Notice ranks of another launch, which would take each other's messages or wait for ever."""
        if ELASTIC_VARIABLE in environ:
            return  # its agents count the ranks, and the store may be that of ranks before
        said = int(self._store.compare_set("size", "", str(self.size)))
        if said != self.size:
            raise SMPRuntimeError(
                f"this process is rank {self.rank} of {self.size}, but another that has come to the same store is one of {said}: "
                "ranks of two launches meet at one MASTER_ADDR and MASTER_PORT, or WORLD_SIZE differs between hosts; start all "
                "ranks with the same WORLD_SIZE, and each job with a MASTER_PORT of its own"
            )
        me = f"{socket.gethostname()} process {os.getpid()} started {_start_of_process()}"
        first = self._store.compare_set(f"who/{self.rank}", "", me).decode()
        if first != me:
            raise SMPRuntimeError(
                f"two processes are rank {self.rank} of {self.size}: {_place(first)} and {_place(me)}; the same RANK was given "
                "twice, or a rank was started again while the others of its job go on: give each its own RANK, and restart all "
                "together"
            )

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


def process_group_size() -> int:
    """Ranks of ``torch.distributed``, where the script has started it; else 0."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


def _start_of_process() -> str:
    """When this process began, in ticks of the system: numbers of processes repeat, and containers have the same."""
    try:
        return Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def _place(who: str) -> str:
    return who.partition(" started ")[0]
