"""Transports of small objects between ranks: MPI under ``mpirun``, a store under ``torchrun``, none for one process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import secrets
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp_config.machine.launchers import ELASTIC_VARIABLE, SECRET_VARIABLE
from smp_runtime.comm import plain_data
from smp_runtime.comm.authentication import (
    SECRET_BYTES,
    ForgedError,
    Seal,
    SecretKeeper,
    has_credentials,
    on_one_machine,
    secret_from_keeper,
    secret_of,
)
from smp_runtime.comm.rendezvous import store_at_meeting_place
from smp_runtime.comm.waiting import FAILED, Wait, WaitingPlace, script_s_call, timeout_seconds
from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.tensors.torch_private import default_store

#: Channel on which ranks report their waiting place. It is no channel of :mod:`smp_runtime.comm.control`.
_PLACES_CHANNEL = 4

#: In jobs of up to this many ranks, each reports to all others when it leaves. In larger jobs, it reports only to ranks
#: that it has exchanged messages with.
_TELLS_ALL = 64

#: Longest pauses between two looks for a message; a store serves all ranks at once.
_MPI_PAUSE_SECONDS = 1e-3
_STORE_PAUSE_SECONDS = 5e-3

#: A message of more bytes goes through the store in parts. PyTorch's store closes the connection on a value above 8 MiB.
_PART_BYTES = 4 * 2**20

#: The first byte of each part, under its seal: whether the message ends with it.
LAST_PART, PART_BEFORE_OTHERS = b".", b"+"


class SoloTransport:
    """The transport of a job of one process, which has no other rank to communicate with."""

    rank = 0
    size = 1
    call = ""

    def __init__(self) -> None:
        self.seal = Seal(secrets.token_bytes(SECRET_BYTES))

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot send to rank {dest}: this job has one process", code="SMP311")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot receive from rank {source}: this job has one process", code="SMP311")

    def look(self, other: int, *, asks: bool) -> WaitingPlace | None:
        """See :class:`Carrier`."""
        return None

    def went_on(self) -> None:
        """Do nothing: there is no other rank to ask."""

    def close(self, left: str) -> None:
        """Do nothing: there is no connection."""


class MpiTransport:
    """Messages over MPI, with synchronous sends that are polled so that every wait has a deadline.

    A rank that leaves reports it to the others at once, since ``MPI_Finalize`` then blocks silently until all have
    left. A rank that fails ends without ``MPI_Finalize``, so that mpirun ends the others.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.call = ""
        # Messages of MPI go by its own connections; this is for what ranks exchange by others.
        drawn = secrets.token_bytes(SECRET_BYTES) if self.rank == 0 else None
        self.seal = Seal(self._comm.bcast(drawn))
        #: Ranks that get a report when this rank leaves. In a large job not all do: each would need a connection for it.
        self._contacts = set(range(self.size)) if self.size <= _TELLS_ALL else set()
        self._places: dict[int, WaitingPlace] = {}
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

    def look(self, other: int, *, asks: bool) -> WaitingPlace | None:
        """See :class:`Carrier`."""
        if asks and not self._has_left(other):
            # Its former answer may be of an earlier wait.
            self._places.pop(other, None)
            self._tell(other, WaitingPlace(self.call or script_s_call()), asks=True)
        self._hear()
        return self._places.get(other)

    def went_on(self) -> None:
        """Do nothing: a rank that has received this rank's place asks again."""

    def _tell(self, other: int, place: WaitingPlace, *, asks: bool) -> None:
        self._told = [request for request in self._told if not request.test()[0]]
        self._told.append(self._comm.isend((asks, place), dest=other, tag=_PLACES_CHANNEL))

    def _hear(self) -> None:
        """Receive the places that other ranks have reported, and answer the ranks that asked."""
        status = self._mpi.Status()
        while (
            found := self._comm.improbe(source=self._mpi.ANY_SOURCE, tag=_PLACES_CHANNEL, status=status)
        ) is not None:
            source = status.Get_source()
            asked, place = found.recv()
            if not self._has_left(source):
                self._places[source] = place
            if asked:
                self._tell(source, WaitingPlace(self.call or script_s_call()), asks=False)

    def _has_left(self, other: int) -> bool:
        return other in self._places and bool(self._places[other].left)

    def close(self, left: str) -> None:
        """See :class:`Carrier`. The communicator stays: others may still use it, and freeing it is a call of all."""
        if left == FAILED or self._mpi.Is_finalized():
            return  # mpirun ends the others
        for other in self._contacts - {self.rank}:
            self._tell(other, WaitingPlace(left=left), asks=False)

    def _at_exit(self) -> None:
        """Make the process exit before ``MPI_Finalize``, which would wait for the others, if an exception ends it."""
        if getattr(sys, "last_value", None) is not None:
            # The interpreter frees this last, when files are written and exit handlers have run.
            sys.__dict__["smp_ends_without_mpi"] = _EndsProcess()


class _EndsProcess:
    """Ends the process as failed when nothing holds this any more."""

    def __del__(self, end: Callable[[int], None] = os._exit) -> None:
        end(1)


class StoreTransport:
    """Messages over a PyTorch store: for ``torchrun``, and all other jobs that start their ranks without MPI.

    Any process that reaches the store's port can read and write all its contents. So each message is sealed for its
    place with a secret of the job. A message without a valid seal is neither trusted nor unpickled.

    The secret comes from the environment. If it has none and all ranks are on one machine, rank 0 creates one. It
    shares it with processes that run as the same user, as reported by the system. Without a secret, only plain data
    is read (:mod:`smp_runtime.comm.plain_data`).

    Args:
        store: a store that all ranks reach.
        environ: the environment of this process.

    Raises:
        SMPRuntimeError: another process has this rank, or ranks disagree on the number of ranks.
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
        self._environ = environ
        self._seal: Seal | None = None
        self._has_met = False  # whether this rank knows if there is a secret
        #: By rank, what messages to it are sealed for, besides their place: those of a former job with the same secret are not.
        self._nonces = {self.rank: secrets.token_hex(16)}
        self._store.set(self._nonce(self.rank), self._nonces[self.rank])

    @classmethod
    def at_meeting_place(cls, rank: int, size: int, environ: Mapping[str, str]) -> StoreTransport:
        """Join the other ranks at ``MASTER_ADDR`` and ``MASTER_PORT``, where rank 0 or torchrun's agent serves a store.

        Raises:
            SMPRuntimeError: the others were not there in time, or the port is taken.
        """
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        patience = timeout_seconds()
        try:
            store = store_at_meeting_place(rank, size, environ, patience)
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
    def of_process_group(cls, environ: Mapping[str, str]) -> StoreTransport:
        """Return a transport over the store of ``torch.distributed``, which the script has initialized."""
        return cls(default_store(), dist.get_rank(), dist.get_world_size(), environ)

    def _require_same_job(self, environ: Mapping[str, str]) -> None:
        """Notice ranks of another launch, which would take each other's messages or wait for ever."""
        if ELASTIC_VARIABLE in environ:
            return  # its agents count the ranks, and the store may be that of ranks before
        said = self._store.compare_set("size", "", str(self.size)).decode(errors="replace")
        if said != str(self.size):
            raise SMPRuntimeError(
                f"this process is rank {self.rank} of {self.size}, but another that has come to the same store is one of {said}: "
                "ranks of two launches meet at one MASTER_ADDR and MASTER_PORT, or WORLD_SIZE differs between hosts; start all "
                "ranks with the same WORLD_SIZE, and each job with a MASTER_PORT of its own"
            )
        me = f"{socket.gethostname()} process {os.getpid()} started {_start_of_process()}"
        first = self._store.compare_set(f"who/{self.rank}", "", me).decode(errors="replace")
        if first != me:
            raise SMPRuntimeError(
                f"two processes are rank {self.rank} of {self.size}: {_place(first)} and {_place(me)}; the same RANK was given "
                "twice, or a rank was started again while the others of its job go on: give each its own RANK, and restart all "
                "together"
            )

    @property
    def seal(self) -> Seal | None:
        """See :class:`Carrier`. It is there from this rank's first message on, for which all ranks must have come."""
        if not self._has_met:
            secret = self._secret()
            self._seal, self._has_met = (None if secret is None else Seal(secret)), True
        return self._seal

    def _secret(self) -> bytes | None:
        """Return the secret that only the ranks of this job know, or None if no safe way to share one exists."""
        if (given := secret_of(self._environ)) is not None:
            return given
        if self.size == 1 or not (has_credentials() and on_one_machine(self._environ, self.size)):
            return None
        key = f"{self._joined}/keeper"
        if self.rank == 0:
            keeper = SecretKeeper(self.size - 1)
            self._store.set(key, keeper.name)
            return keeper.serve(timeout_seconds())
        self._await(key, 0)
        return secret_from_keeper(self._store.get(key).decode(errors="replace"), self.rank, timeout_seconds())

    def _key(self, source: int, dest: int, channel: int) -> str:
        number = self._sequence[source, dest, channel]
        self._sequence[source, dest, channel] = number + 1
        return f"{self._joined}/{channel}/{source}/{dest}/{number}"

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        seal = self.seal
        # Before the message counts: what cannot be written is not waited for.
        body = memoryview(plain_data.to_bytes(payload) if seal is None else pickle.dumps(payload))
        key = self._key(self.rank, dest, channel)
        parts = max(1, -(-len(body) // _PART_BYTES))
        for number in range(parts):
            start = number * _PART_BYTES
            mark = LAST_PART if number == parts - 1 else PART_BEFORE_OTHERS
            # Each waits for the one before it, so the process that keeps the store has one part in memory.
            self._send_part(f"{key}/{number}", mark + body[start : start + _PART_BYTES], dest)

    def _send_part(self, key: str, message: bytes, dest: int) -> None:
        if (seal := self.seal) is not None:
            message = seal.close(self._place_of_message(key, dest), message)
        with self._store_is_there(dest):
            self._store.set(key, message)  # type: ignore[arg-type]  # bytes work, though the stub declares str
        self._await(key + "/received", dest)
        self._store.delete_key(key + "/received")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        key = self._key(source, self.rank, channel)
        parts = [self._receive_part(f"{key}/0", source)]
        while parts[-1][:1] == PART_BEFORE_OTHERS:
            parts.append(self._receive_part(f"{key}/{len(parts)}", source))
        body = b"".join(memoryview(part)[1:] for part in parts)
        return self._data_of(body, source) if self.seal is None else pickle.loads(body)

    def _receive_part(self, key: str, source: int) -> bytes:
        """Return a mark and the bytes behind it.

        Raises:
            SMPRuntimeError: they are not from a rank of this job.
        """
        seal = self.seal
        self._await(key, source)
        with self._store_is_there(source):
            message = self._store.get(key)
            self._store.delete_key(key)
            self._store.set(key + "/received", "1")
        try:
            part = message if seal is None else seal.open(self._place_of_message(key, self.rank), message)
            if part[:1] not in (LAST_PART, PART_BEFORE_OTHERS):
                raise ForgedError(f"{len(message):,} bytes have no mark of a part")
        except ForgedError:
            raise SMPRuntimeError(
                f"{self._told(message, source)} is not from a rank of this job: another process writes to the store, or "
                f"{SECRET_VARIABLE} is another on that host; keep the store's port from others, and give all hosts one secret"
            ) from None
        return part

    def _data_of(self, message: bytes, source: int) -> Any:
        try:
            return plain_data.from_bytes(message)
        except ValueError as error:
            raise SMPRuntimeError(
                f"{self._told(message, source)} was not read: {error}; either another process writes to the store, from whose "
                f"port others must be kept, or that rank has a secret and this one has none: set {SECRET_VARIABLE} to one random "
                "text on all hosts"
            ) from None

    def _told(self, message: bytes, source: int) -> str:
        return f"what the job's store has in the place of a message from rank {source} to rank {self.rank} ({len(message):,} bytes)"

    def _place_of_message(self, key: str, dest: int) -> str:
        """Return the place for which a message is sealed: its key and the receiver's nonce."""
        if dest not in self._nonces:
            self._await(self._nonce(dest), dest)
            self._nonces[dest] = self._store.get(self._nonce(dest)).decode(errors="replace")
        return f"{key} {self._nonces[dest]}"

    def _nonce(self, rank: int) -> str:
        return f"{self._joined}/nonce/{rank}"

    def _await(self, key: str, other: int) -> None:
        """Return when ``other`` has set the key. Not by the store's own wait, which sees nothing else meanwhile."""
        with self._store_is_there(other), Wait(self, other, _STORE_PAUSE_SECONDS) as wait:
            while not self._store.check([key]):
                wait.pause()

    @contextlib.contextmanager
    def _store_is_there(self, other: int) -> Iterator[None]:
        """Raise an error that names what this rank was doing if the store is lost inside.

        Raises:
            SMPRuntimeError: the process that keeps the store has ended.
        """
        try:
            yield
        except self._lost as error:
            raise SMPRuntimeError(
                f"rank {self.rank} waits in {self.call or script_s_call()} for rank {other}, but the store of this job is gone "
                f"({str(error).splitlines()[0]}): the process that keeps it, rank 0 where no agent does, has ended; let every rank "
                "make the same calls, and look for the first error of that rank"
            ) from None

    def look(self, other: int, *, asks: bool) -> WaitingPlace | None:
        """See :class:`Carrier`."""
        if asks:
            self._tell(WaitingPlace(self.call or script_s_call()))
        key = self._place(other)
        if not self._has_met or not self._store.check([key]):
            return None
        told = self._store.get(key)
        try:
            words = json.loads(told if self._seal is None else self._seal.open(key, told))
            return WaitingPlace(str(words["call"]), str(words["left"]))
        except (ValueError, LookupError, TypeError):  # from a stranger: it is no report of that rank
            return None

    def went_on(self) -> None:
        """Report that this rank no longer waits.

        The key stays in the store: another rank may be about to read it, and would wait for it.
        """
        self._tell(WaitingPlace())

    def close(self, left: str) -> None:
        """See :class:`Carrier`; the store itself closes with the last reference to it."""
        with contextlib.suppress(RuntimeError):  # it is gone with the rank that had it
            self._tell(WaitingPlace(left=left))

    def _tell(self, place: WaitingPlace) -> None:
        if self._has_met:
            key, words = self._place(self.rank), json.dumps(asdict(place)).encode()
            self._store.set(key, words if self._seal is None else self._seal.close(key, words))  # type: ignore[arg-type]  # as above

    def _place(self, rank: int) -> str:
        return f"{self._joined}/place/{rank}"


def process_group_size() -> int:
    """Return the world size of ``torch.distributed`` if the script has initialized it, else 0."""
    if not dist.is_available():
        return 0
    return dist.get_world_size() if dist.is_initialized() else 0


def _start_of_process() -> str:
    """Return the start time of this process in system ticks, or an empty string.

    Process numbers repeat, and containers use the same ones.
    """
    try:
        # The start stands 20th behind the program's name, which may contain spaces.
        return Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def _place(who: str) -> str:
    return who.partition(" started ")[0]
