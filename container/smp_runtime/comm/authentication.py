"""The secret that only the ranks of a job know, the seals that it makes, and how ranks come to share it."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping

from smp_config.machine.launchers import ADDRESS_VARIABLE, LOCAL_SIZE_VARIABLE, job_secret
from smp_runtime.errors import DeadlineError, SMPRuntimeError

SECRET_BYTES = 32
_TAG_BYTES = hashlib.sha256().digest_size

#: A caller sends its rank to rank 0. Linux reports the process behind a socket: process number, user, group.
_RANK = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")

#: Seconds for a rank to send its number after it has connected.
_ANSWER_SECONDS = 10.0


class ForgedError(ValueError):
    """Bytes that no rank of this job has sealed, or that were sealed for another place."""


class Seal:
    """Seals bytes for one place each, so that none can be changed, made by a stranger, or moved to another place.

    Nothing is hidden: who can read the bytes still reads them.

    Args:
        secret: what only the ranks of a job know.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def close(self, place: str, body: bytes) -> bytes:
        """Return ``body`` with its seal in front."""
        return self._tag(place, body) + body

    def open(self, place: str, sealed: bytes) -> bytes:
        """Return the body of a sealed message.

        Raises:
            ForgedError: it was not sealed for this place, with this secret.
        """
        tag, body = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(place, body)):
            raise ForgedError(f"{len(sealed):,} bytes have no seal of this job's for {place}")
        return body

    def derived(self, purpose: str, nonce: bytes) -> bytes:
        """Return a secret for one purpose, derived from a ``nonce`` that may be public."""
        return self._tag(f"secret for {purpose}", nonce)

    def _tag(self, place: str, body: bytes) -> bytes:
        return hmac.new(self._secret, place.encode() + b"\0" + body, hashlib.sha256).digest()


def secret_of(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that a launcher or the user has set for the ranks of a job, or None.

    Raises:
        ConfigError: it is short enough to be guessed.
    """
    text = job_secret(environ)
    return None if text is None else hashlib.sha256(text.encode()).digest()


def on_one_machine(environ: Mapping[str, str], size: int) -> bool:
    """Return whether, by the environment, all ranks of a job are processes of this machine."""
    if local := environ.get(LOCAL_SIZE_VARIABLE):
        return local == str(size)
    return is_loopback(environ.get(ADDRESS_VARIABLE, ""))


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address of this machine.

    ``localhost`` is the only name that counts, since it needs no look-up.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def machine_id() -> str:
    """Return an identifier of this machine, or an empty string if there is none.

    It is the same for processes that reach each other by loopback. A container with its own network counts as
    a machine.
    """
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    return ""


# -- from rank 0 to the other ranks of one machine, by the system's own word on who they are ---------------------------


def has_credentials() -> bool:
    """Return whether the system reports the user at the other end of a Unix socket without a file."""
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


class SecretKeeper:
    """The server, on rank 0, of the job's secret for this machine's other ranks, and no other user's processes."""

    def __init__(self, others: int) -> None:
        self._others = others
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"smp-secret-{secrets.token_hex(16)}"
        # A name without a file: it belongs to this machine's network, and goes away with the process.
        self._listener.bind(b"\0" + self.name.encode())
        self._listener.listen(others + 16)

    def serve(self, seconds: float) -> bytes:
        """Return the secret when every other rank has it.

        Raises:
            DeadlineError: some did not come in time.
        """
        deadline = time.monotonic() + seconds
        came: set[bytes] = set()
        with self._listener:
            while len(came) < self._others:
                # One deadline for all: each caller shortens the wait for the next.
                self._listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    caller, _ = self._listener.accept()
                except TimeoutError:
                    missing = self._others - len(came)
                    raise DeadlineError(
                        f"rank 0 waited {seconds:g} s for {missing} of {self._others + 1} ranks to join the job on this machine; "
                        "see whether all were started, or raise SMP_TIMEOUT_SECONDS"
                    ) from None
                with caller, contextlib.suppress(OSError):
                    if _user_behind(caller) == os.geteuid():
                        # A caller that sends nothing must not use up the other ranks' time.
                        caller.settimeout(_ANSWER_SECONDS)
                        rank = _received(caller, _RANK.size)
                        caller.sendall(self.secret)
                        came.add(rank)
        return self.secret


def secret_from_keeper(name: str, rank: int, seconds: float) -> bytes:
    """Fetch the secret that rank 0 serves under ``name``.

    The name is not trusted: another process may have written it. So the user at the other end is checked.

    Raises:
        SMPRuntimeError: no process answers, or it is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(b"\0" + name.encode())
            if (user := _user_behind(connection)) != os.geteuid():
                raise SMPRuntimeError(
                    f"what says to be rank 0 of this job is a process of user {user}, while rank {rank} belongs to user "
                    f"{os.geteuid()}: another user writes to the job's store; keep its port from others, or start all ranks as one "
                    "user"
                )
            connection.sendall(_RANK.pack(rank))
            return _received(connection, SECRET_BYTES)
        except OSError as error:
            raise SMPRuntimeError(
                f"rank {rank} did not get the job's secret from rank 0 ({error}), which the environment says is on the same "
                f"machine; look for the first error of rank 0; where ranks are in containers with networks of their own, set "
                f"{LOCAL_SIZE_VARIABLE} to the number of ranks in each"
            ) from None


def _user_behind(connection: socket.socket) -> int:
    """Return the user ID of the process at the other end, as reported by the system."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("it has hung up")
        data += piece
    return data
