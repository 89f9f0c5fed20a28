"""Connections between every two ranks of a group, made once and authenticated: TCP, or a UNIX socket on one host."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smp_runtime.errors import DeadlineError, SMPRuntimeError

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane

_TOKEN_BYTES = 32
#: Token of the group, then the caller's position in it.
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")
_BUFFER_BYTES = 4 * 2**20
_ASK_FOR_ADDRESS = 0x8915  # SIOCGIFADDR of Linux

#: A silent peer is probed: an interrupted network is noticed after about half a minute, not after hours.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def own_address() -> str:
    """Return the address at which other ranks of the job reach this process.

    It belongs to the interface of ``GLOO_SOCKET_IFNAME``, else to the one that leads to ``MASTER_ADDR``, else to
    the host name.
    """
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        address = _address_of_interface(name.strip())
        if address is not None:
            return address
    target = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # a datagram socket: it only looks up the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SMPRuntimeError(
            f"this rank cannot find its own address: {target!r} (from MASTER_ADDR or the host name) gives {error}; set "
            "GLOO_SOCKET_IFNAME to the network interface between the hosts, such as eth0"
        ) from error


def _address_of_interface(name: str) -> str | None:
    if not name:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ASK_FOR_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None  # no such interface, or none of its addresses is IPv4
        return socket.inet_ntoa(answer[20:24])


def connect_all(control: ControlPlane, ranks: Sequence[int], seconds: float) -> dict[int, socket.socket]:
    """Connect to every other member of ``ranks``; all members call it.

    Args:
        control: exchanges the addresses and the secret that distinguishes members from strangers.
        ranks: global ranks; members are named by their position here.

    Returns:
        Blocking sockets by position.

    Raises:
        DeadlineError: a member did not connect in time; the message names it.
        SMPRuntimeError: a member cannot be reached.
    """
    mine = list(ranks).index(control.rank)
    if len(ranks) == 1:
        return {}
    deadline = time.monotonic() + seconds
    address = own_address()
    with contextlib.ExitStack() as undo:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((address, 0))
        listener.listen(len(ranks) + 16)
        port = listener.getsockname()[1]
        inside = undo.enter_context(_listen_inside(len(ranks) + 16))
        name = inside.getsockname() if inside.fileno() >= 0 else b""
        everyone = control.allgather((address, port, name, secrets.token_bytes(_TOKEN_BYTES)), ranks)
        # It never goes by a way that others can read.
        token = control.secret_for("stages", everyone[0][-1])
        made: dict[int, socket.socket] = {}
        # Higher positions call lower ones. A call is complete once it lies in the other's queue, so no rank waits
        # for another one before all calls are out.
        for position, (host, its_port, its_name, _) in enumerate(everyone[:mine]):
            connection = _call_inside(its_name, deadline) if host == address else None
            connection = connection or _call(host, its_port, position, ranks, deadline)
            made[position] = undo.enter_context(connection)
            connection.sendall(_HELLO.pack(token, mine))
        listeners = [each for each in (listener, inside) if each.fileno() >= 0]
        for position, connection in _answer(listeners, token, mine, ranks, deadline).items():
            made[position] = undo.enter_context(connection)
            connection.setblocking(True)
            connection.sendall(_HELLO.pack(token, mine))  # fits the empty buffer
        for position in range(mine):
            _expect_reply(made[position], token, position, ranks, deadline)
        for connection in made.values():
            _tune(connection)
        listener.close()
        inside.close()
        undo.pop_all()
        return made


def _listen_inside(queue: int) -> socket.socket:
    """Return a listener for ranks of the same host; it is closed if the system does not support it.

    Messages of these ranks need not go through the host's network.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform != "linux":
        listener.close()
        return listener
    # A name without a file: only processes of this network namespace find it, and it goes away with them.
    listener.bind(b"\0smp-" + secrets.token_hex(16).encode())
    listener.listen(queue)
    return listener


def _call_inside(name: bytes, deadline: float) -> socket.socket | None:
    """Connect to a rank by its listener's name; None if no rank answers, as in another network namespace."""
    if not name:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        connection.connect(name)
    except OSError:
        connection.close()
        return None
    return connection


def _call(host: str, port: int, position: int, ranks: Sequence[int], deadline: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
    except OSError as error:
        raise SMPRuntimeError(
            f"stage {position} (rank {ranks[position]}) said that it listens on {host} port {port}, but connecting gives "
            f"{error}; check that it still runs and that the hosts may reach each other's ports, or set "
            "GLOO_SOCKET_IFNAME to the interface between them"
        ) from error


def _answer(
    listeners: Sequence[socket.socket], token: bytes, mine: int, ranks: Sequence[int], deadline: float
) -> dict[int, socket.socket]:
    """Accept a connection from every higher position; callers that do not know the token are disconnected."""
    missing = set(range(mine + 1, len(ranks)))
    accepted: dict[int, socket.socket] = {}
    # Callers that have not identified themselves yet: a silent one must not block the others.
    callers: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        try:
            while missing:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if time.monotonic() > deadline:
                    _close(accepted.values())
                    raise _late(missing, ranks)
                for key, _ in events:
                    caller = cast("socket.socket", key.fileobj)
                    if caller in listeners:
                        with contextlib.suppress(OSError):  # the caller may have gone again
                            caller, _ = caller.accept()
                            caller.setblocking(False)
                            callers[caller] = b""
                            selector.register(caller, selectors.EVENT_READ)
                        continue
                    piece = _received(caller, _HELLO.size - len(callers[caller]))
                    callers[caller] += piece
                    if piece and len(callers[caller]) < _HELLO.size:
                        continue
                    selector.unregister(caller)
                    position = _introduced(callers.pop(caller), token)
                    if position in missing:
                        missing.discard(position)
                        accepted[position] = caller
                    else:
                        caller.close()
        finally:
            _close(callers)
    return accepted


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes; empty if the other side is gone."""
    try:
        return connection.recv(size)
    except OSError:
        return b""


def _introduced(hello: bytes, token: bytes) -> int:
    """Return the position of a caller that knows the token, else -1."""
    if len(hello) != _HELLO.size:
        return -1
    its_token, position = _HELLO.unpack(hello)
    return int(position) if hmac.compare_digest(its_token, token) else -1


def _expect_reply(
    connection: socket.socket, token: bytes, position: int, ranks: Sequence[int], deadline: float
) -> None:
    said = b""
    while len(said) < _HELLO.size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            piece = connection.recv(_HELLO.size - len(said))
        except TimeoutError:
            raise _late({position}, ranks) from None
        except OSError:
            piece = b""
        if not piece:
            break
        said += piece
    if _introduced(said, token) != position:
        raise SMPRuntimeError(
            f"stage {position} (rank {ranks[position]}) closed the connection while the stages introduced themselves; "
            "it probably ended: look for the first error in its log"
        )


def _late(missing: set[int], ranks: Sequence[int]) -> DeadlineError:
    names = ", ".join(f"{position} (rank {ranks[position]})" for position in sorted(missing))
    return DeadlineError(
        f"stage(s) {names} did not connect in time; check that they still run and that the hosts may reach each other's "
        "ports, set GLOO_SOCKET_IFNAME to the interface between the hosts, or raise SMP_TIMEOUT_SECONDS"
    )


def _tune(connection: socket.socket) -> None:
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        if _most_buffer(option) >= _BUFFER_BYTES:
            # A smaller size would only replace the system's own tuning, so it is all or nothing.
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _most_buffer(option: int) -> int:
    name = "wmem_max" if option == socket.SO_SNDBUF else "rmem_max"
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):
        return 0
