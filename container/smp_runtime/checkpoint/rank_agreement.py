"""How the ranks of a job agree on a checkpoint: in the calls of a script, or behind its back."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from smp_records.records import FailureRecord
from smp_runtime.comm.authentication import SECRET_BYTES, ForgedError, Seal
from smp_runtime.comm.control import RUNTIME_CHANNEL, ControlPlane, timeout_seconds
from smp_runtime.errors import CheckpointError, DeadlineError
from smp_runtime.tensors.torch_private import default_store


def met_by(text: str, rank: int, host: str) -> CheckpointError:
    """Return an error that all ranks raise because one rank has hit it; the job's failure names that rank."""
    error = CheckpointError(text)
    error.failure = FailureRecord(
        rank=rank,
        host=host,
        error_type=CheckpointError.__name__,
        message=text,
        when=time.time(),
        code=error.code or "",
    )
    return error


def encode_error(error: CheckpointError | None) -> list[Any] | None:
    """Convert an error of :func:`met_by` to JSON values, for the other ranks."""
    if error is None or error.failure is None:
        return None
    return [str(error), error.failure.rank, error.failure.host]


def decode_error(words: list[Any] | None) -> CheckpointError | None:
    """Convert the JSON values of :func:`encode_error` back to an error."""
    return None if words is None else met_by(*words)


class Exchange(Protocol):
    """Brings values that JSON has to the first rank and back; every rank makes the same calls in the same order."""

    def gather(self, payload: Any) -> list[Any] | None:
        """Return every rank's value in the order of ranks, on rank 0; None elsewhere."""
        ...

    def broadcast(self, payload: Any) -> Any:
        """Return rank 0's value on every rank."""
        ...

    def finish(self) -> None:
        """Finish the exchange: block until no other rank needs this one. No calls may follow."""
        ...


class ControlExchange:
    """Over the control plane, for the thread that the script runs on."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._everyone = list(range(control.size))

    def gather(self, payload: Any) -> list[Any] | None:
        """See :class:`Exchange`."""
        return self._control.gather(payload, self._everyone)

    def broadcast(self, payload: Any) -> Any:
        """See :class:`Exchange`."""
        if self._control.rank != 0:
            return self._control.receive(0, RUNTIME_CHANNEL)
        for rank in self._everyone[1:]:
            self._control.send(payload, rank, RUNTIME_CHANNEL)
        return payload

    def finish(self) -> None:
        """Do nothing: every call has already waited for its answer."""


class StoreExchange:
    """Over a connection of its own to the store of ``torch.distributed``, for a thread that no collective may wait for.

    Whoever reaches the store's port can write to it: values are JSON, from which nothing is run, and sealed with a secret that
    only the job's ranks know. Each is sealed for its place, so that none can be moved to another.

    Args:
        store: a clone of the default store, which no other thread uses.
        title: the same on every rank, and used once.
        secret: the same on every rank, which never goes through this connection.
    """

    def __init__(self, store: Any, rank: int, size: int, title: str, secret: bytes) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._title = title
        self._seal = Seal(secret)
        self._calls = 0

    def gather(self, payload: Any) -> list[Any] | None:
        """See :class:`Exchange`."""
        self._calls += 1
        key = f"{self._title}/{self._calls}"
        if self._rank != 0:
            self._put(f"{key}/{self._rank}", payload)
            return None
        return [payload, *(self._take(f"{key}/{rank}", f"rank {rank}") for rank in range(1, self._size))]

    def broadcast(self, payload: Any) -> Any:
        """See :class:`Exchange`."""
        self._calls += 1
        key = f"{self._title}/{self._calls}"
        if self._rank == 0:
            for rank in range(1, self._size):
                self._put(f"{key}/{rank}", payload)
            return payload
        return self._take(f"{key}/{self._rank}", "rank 0")

    def finish(self) -> None:
        """See :class:`Exchange`."""
        # Rank 0 may hold the store itself: it leaves last.
        self.gather(None)

    def _put(self, key: str, payload: Any) -> None:
        self._store.set(key, self._seal.close(key, json.dumps(payload).encode()))

    def _take(self, key: str, whom: str) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=timeout_seconds()))
        except Exception as error:  # of the store's own family, which differs between versions
            raise DeadlineError(
                f"waited for {whom} to write its part of a checkpoint, but the job's store has no answer after at most "
                f"{timeout_seconds():.0f} s ({str(error).splitlines()[0]}); look for the first error of that rank, or raise "
                "SMP_TIMEOUT_SECONDS"
            ) from None
        value = self._store.get(key)
        self._store.delete_key(key)
        try:
            return json.loads(self._seal.open(key, value))
        except ForgedError:
            raise CheckpointError(
                f"what the job's store has in the place of {whom}'s part of a checkpoint ({len(value):,} bytes) is not from a rank "
                "of this job: another process writes to the store; keep its port from others, and save again"
            ) from None


@dataclass(frozen=True)
class SecondConnection:
    """A connection of a rank's own to the store of ``torch.distributed``, for another thread than the script's.

    Attributes:
        secret: what values are sealed with, the same on every rank.
    """

    store: Any
    secret: bytes


def second_connection(control: ControlPlane, prefix: str, purpose: str) -> SecondConnection | None:
    """Return another connection to the store; None if this version of PyTorch cannot make one.

    Every rank calls it. If the job has no secret, the connection's secret is sent over the control plane, where
    other processes can read it.

    Args:
        prefix: of the keys.
        purpose: of the secret.
    """
    nonce = control.broadcast(
        secrets.token_bytes(SECRET_BYTES) if control.rank == 0 else None, list(range(control.size))
    )
    secret = control.secret_for(purpose, nonce)
    import torch.distributed as dist

    store: Any = default_store()
    if not hasattr(dist.Store, "clone"):
        return None
    try:
        return SecondConnection(dist.PrefixStore(prefix, store.clone()), secret)
    except RuntimeError:  # a store of another kind
        return None
