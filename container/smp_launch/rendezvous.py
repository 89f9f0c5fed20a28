"""A port on which the ranks of a job meet, kept free for them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

PORT_VARIABLE = "MASTER_PORT"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that the system gives to nobody else; only who names it can listen there.

    It is bound here without listening, and by others too, if they allow sharing as the stores of PyTorch do. So nothing
    can take it between now and the moment when the first rank listens, nor between two process groups of one script.
    """
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(socket.socket(socket.AF_INET6))
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 as well
            _bind(held, "::")
        except OSError:  # no IPv6 here
            held = stack.enter_context(socket.socket(socket.AF_INET))
            _bind(held, "")
        yield held.getsockname()[1]


def _bind(held: socket.socket, address: str) -> None:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
