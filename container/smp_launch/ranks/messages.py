"""Messages over a socket of this machine's, with descriptors, to and from processes of the same user alone."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

#: Bytes of a message, in front of it.
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # process, user, group

#: Bytes of a message at most: an environment and the names of some thousand modules are far below it.
_MOST_BYTES = 64 * 2**20

#: Descriptors of files in one message, at most.
_MOST_DESCRIPTORS = 8


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the system vouches that the other side is a process of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def connect(path: str, seconds: float) -> socket.socket:
    """Return a connection to the process that listens at ``path``.

    Raises:
        OSError: no process of this user listens there.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(path)
        # Before anything is sent: another user may have made a socket at this path.
        if not is_own_user(connection):
            raise PermissionError(f"{path} belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, content: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send plain JSON values, and open files with them."""
    raw = json.dumps(content).encode("ascii")
    head = _LENGTH.pack(len(raw))
    socket.send_fds(connection, [head], descriptors)
    connection.sendall(raw)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors.

    Raises:
        EOFError: the other side has ended.
        ValueError: it is no message of this protocol.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_DESCRIPTORS)
    try:
        head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
        if not head:
            raise EOFError("the other side has ended")
        (length,) = _LENGTH.unpack(head)
        if length > _MOST_BYTES:
            raise ValueError(f"a message of {length:,} bytes")
        return json.loads(_exactly(connection, length)), descriptors
    except BaseException:  # received descriptors are open in this process, and no one else would close them
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other side has ended within a message")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
