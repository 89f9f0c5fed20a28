"""The ranks at the other ends of the connections of a rank's process groups, and which connections have ended."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane

#: Most ranks of a job that exchange addresses. Each rank sends one address per connection.
_MOST_RANKS = 128

#: Kinds of addresses that can be compared between processes.
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class PeerConnections:
    """The connections of this rank to other ranks.

    Creating an instance is collective over all ranks: it returns when all ranks have come.

    Args:
        sockets: descriptor and number of each socket of the process groups.
        control: used once, to exchange addresses.
    """

    def __init__(self, sockets: Iterable[tuple[int, int]], control: ControlPlane) -> None:
        everyone = list(range(control.size))
        self._rank_of: dict[tuple[int, int], int] = {}  # by socket
        sockets = sorted(sockets)
        if control.size > _MOST_RANKS:
            control.barrier(everyone)
            return
        mine = [own for _, own, _ in _connected(sockets)]
        told = control.allgather(mine, everyone)
        owner = {tuple(address): rank for rank, addresses in enumerate(told) for address in addresses}
        for place, _, other in _connected(sockets):
            rank = owner.get(other)
            if rank is not None and rank != control.rank:
                self._rank_of[place] = rank

    def lost(self) -> list[int]:
        """Return the ranks to which a connection has ended."""
        return sorted({rank for place, rank in self._rank_of.items() if _has_ended(*place)})

    def cut(self) -> None:
        """End all connections at once, as a network that fails does; for drills."""
        for descriptor, number in self._rank_of:
            with contextlib.suppress(OSError):
                # By the number: the descriptor of a closed socket soon belongs to another file.
                if os.fstat(descriptor).st_ino != number:
                    continue
                # A duplicate, since leaving the block closes it, and the transport still owns the original.
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def _connected(
    sockets: Iterable[tuple[int, int]],
) -> Iterator[tuple[tuple[int, int], tuple[str, int], tuple[str, int]]]:
    """Yield descriptor and number, own address, and peer address of each connected socket."""
    for descriptor, number in sockets:
        with contextlib.suppress(OSError, IndexError):
            if os.fstat(descriptor).st_ino != number:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in _FAMILIES:
                    own, other = connection.getsockname()[:2], connection.getpeername()[:2]
                    yield (descriptor, number), (own[0], own[1]), (other[0], other[1])


def _has_ended(descriptor: int, number: int) -> bool:
    """Return whether a socket is closed, here or at the other end."""
    try:
        if os.fstat(descriptor).st_ino != number:
            return True
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False  # open, and nothing to read
    except OSError:
        return True
