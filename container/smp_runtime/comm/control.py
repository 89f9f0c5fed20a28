"""The control plane: who is there, and small Python objects between ranks.

One protocol, three carriers, chosen in :func:`connect`: MPI under ``mpirun``, a ``TCPStore`` under ``torchrun``,
nothing at all for a single process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from smp_config import ConfigError, limits
from smp_runtime.errors import DeadlineError, SMPRuntimeError, SMPUserError

#: Message channels, so that the runtime's own messages never match a script's, nor a script's ``allgather`` its ``send``.
USER_CHANNEL = 1
RUNTIME_CHANNEL = 2
USER_COLLECTIVE_CHANNEL = 3


def timeout_seconds() -> float:
    """The deadline of every wait, in seconds."""
    try:
        return limits.timeout_seconds(os.environ)
    except ConfigError as error:
        raise SMPUserError(str(error)) from None


def host_name() -> str:
    """This rank's host, as the launcher announced it: several may be simulated on one machine."""
    return os.environ.get("SMP_HOST") or os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


class Carrier(Protocol):
    """Moves one pickled object from one rank to another; both calls return when the object has been received."""

    rank: int
    size: int

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """Send an object to rank ``dest``."""

    def receive(self, source: int, channel: int) -> Any:
        """The next object from rank ``source`` on this channel."""

    def close(self) -> None:
        """Give up the connection."""


class _Backoff:
    """Waits a little longer each time, up to 1 ms, until the deadline; ranks share cores with each other."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._seconds = timeout_seconds()
        self._deadline = time.monotonic() + self._seconds
        self._pause = 20e-6

    def wait(self) -> None:
        if time.monotonic() > self._deadline:
            raise DeadlineError(
                f"waited {self._seconds:.0f} s to {self._what}; the other rank never made the matching call: check that "
                "every rank reaches it, or raise SMP_TIMEOUT_SECONDS"
            )
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, 1e-3)


class SoloCarrier:
    """One process alone: there is nobody to talk to."""

    rank = 0
    size = 1

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot send to rank {dest}: this job has one process")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        raise SMPUserError(f"cannot receive from rank {source}: this job has one process")

    def close(self) -> None:
        """There is no connection."""


class MpiCarrier:
    """Messages over MPI; synchronous sends, polled so that every wait has a deadline."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        request = self._comm.issend(payload, dest=dest, tag=channel)
        backoff = _Backoff(f"send to rank {dest}")
        while not request.test()[0]:
            backoff.wait()

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        backoff = _Backoff(f"receive from rank {source}")
        while (message := self._comm.improbe(source=source, tag=channel)) is None:
            backoff.wait()
        return message.recv()

    def close(self) -> None:
        """Free the communicator, unless MPI has ended."""
        if not self._mpi.Is_finalized():
            self._comm.Free()


class StoreCarrier:
    """Messages over a ``TCPStore``: for ``torchrun`` and other launchers that set ``MASTER_ADDR`` and ``RANK``."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        import torch.distributed as dist

        self.rank = int(environ["RANK"])
        self.size = int(environ["WORLD_SIZE"])
        rendezvous = dist.rendezvous("env://", rank=self.rank, world_size=self.size)
        base, _, _ = next(iter(rendezvous))
        self._store = dist.PrefixStore("smp-control", base)
        self._store.set_timeout(timedelta(seconds=timeout_seconds()))
        self._sequence: dict[tuple[int, int, int], int] = defaultdict(int)

    def _key(self, source: int, dest: int, channel: int) -> str:
        number = self._sequence[source, dest, channel]
        self._sequence[source, dest, channel] = number + 1
        return f"{channel}/{source}/{dest}/{number}"

    @contextlib.contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        import torch.distributed as dist

        try:
            yield
        except dist.DistStoreError as error:
            raise DeadlineError(
                f"waited {timeout_seconds():.0f} s to {what} ({error}); check that every rank makes the matching call, "
                "or raise SMP_TIMEOUT_SECONDS"
            ) from None

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """See :class:`Carrier`."""
        key = self._key(self.rank, dest, channel)
        self._store.set(key, pickle.dumps(payload))  # type: ignore[arg-type]  # bytes work, the stub says str
        with self._deadline(f"send to rank {dest}"):
            self._store.wait([key + "/received"])
        self._store.delete_key(key + "/received")

    def receive(self, source: int, channel: int) -> Any:
        """See :class:`Carrier`."""
        key = self._key(source, self.rank, channel)
        with self._deadline(f"receive from rank {source}"):
            payload = self._store.get(key)
        self._store.delete_key(key)
        self._store.set(key + "/received", "1")
        return pickle.loads(payload)

    def close(self) -> None:
        """The store closes with the last reference to it."""


class ControlPlane:
    """Object messages and small collectives between ranks, on any carrier.

    Collectives are built from pairs of messages: they carry a few Python objects at start and in a script's own
    calls, never tensors of the training step.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.rank = carrier.rank
        self.size = carrier.size

    def send(self, payload: Any, dest: int, channel: int = USER_CHANNEL) -> None:
        """Send an object to a global rank; returns when it has been received there."""
        self._carrier.send(payload, self._peer(dest, "send to"), channel)

    def receive(self, source: int, channel: int = USER_CHANNEL) -> Any:
        """Receive the next object from a global rank."""
        return self._carrier.receive(self._peer(source, "receive from"), channel)

    def allgather(self, payload: Any, ranks: Sequence[int], channel: int = RUNTIME_CHANNEL) -> list[Any]:
        """Every member's object, in the order of ``ranks``; all members call it."""
        leader = ranks[0]
        if self.rank != leader:
            self.send(payload, leader, channel)
            return self.receive(leader, channel)
        gathered = [payload if rank == leader else self.receive(rank, channel) for rank in ranks]
        for rank in ranks:
            if rank != leader:
                self.send(gathered, rank, channel)
        return gathered

    def gather(self, payload: Any, ranks: Sequence[int]) -> list[Any] | None:
        """Every member's object on the first member, None on the others; all members call it."""
        leader = ranks[0]
        if self.rank != leader:
            self.send(payload, leader, RUNTIME_CHANNEL)
            return None
        return [payload if rank == leader else self.receive(rank, RUNTIME_CHANNEL) for rank in ranks]

    def broadcast(self, payload: Any, ranks: Sequence[int]) -> Any:
        """The first member's object on every member; all members call it."""
        return self.allgather(payload, ranks)[0]

    def barrier(self, ranks: Sequence[int], channel: int = RUNTIME_CHANNEL) -> None:
        """Return when every member has arrived."""
        self.allgather(None, ranks, channel)

    def close(self) -> None:
        """Release the carrier; later messages are errors."""
        self._carrier.close()

    def _peer(self, rank: int, verb: str) -> int:
        if not 0 <= rank < self.size:
            raise SMPUserError(f"cannot {verb} rank {rank}: this job has ranks 0 to {self.size - 1}")
        if rank == self.rank:
            raise SMPUserError(f"rank {rank} cannot {verb} itself: name another rank from 0 to {self.size - 1}")
        return rank


def connect(environ: Mapping[str, str] | None = None) -> ControlPlane:
    """Join the job that started this process: MPI's, else ``torchrun``'s, else a job of one process."""
    environ = os.environ if environ is None else environ
    if int(environ.get("OMPI_COMM_WORLD_SIZE", environ.get("PMI_SIZE", "0"))) > 0:
        try:
            return ControlPlane(MpiCarrier())
        except ImportError as error:
            raise SMPRuntimeError(
                f"this process was started by mpirun, but mpi4py cannot be imported ({error}); install it with "
                "pip install mpi4py"
            ) from error
    if int(environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in environ:
        return ControlPlane(StoreCarrier(environ))
    return ControlPlane(SoloCarrier())
