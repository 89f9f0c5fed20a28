"""Vector clocks of the host and of every stream, and the memory accesses that they order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from smp_emulation.checked.streams.faults import StreamFault

#: Number of the host among the actors with clocks; streams count from 1.
HOST = 0


class VectorClock(dict[int, int]):
    """For each actor, the number of its last step that has happened before a point."""

    def join(self, other: Mapping[int, int]) -> None:
        """Record that all steps in ``other`` have happened before this point too."""
        for actor, time in other.items():
            if time > self.get(actor, 0):
                self[actor] = time

    def knows(self, actor: int, time: int) -> bool:
        """Return whether an actor's step has happened before this point."""
        return self.get(actor, 0) >= time


@dataclass(frozen=True)
class Access:
    """A step that reads or writes bytes of a storage.

    Attributes:
        actor: who: :data:`HOST` or a stream's number.
        time: the number of the step among the actor's.
        name: of the actor, for messages.
        what: the operation.
        line: which has asked for it.
        writes: whether it changes them.
        start: the first byte.
        stop: the one behind the last.
    """

    actor: int
    time: int
    name: str
    what: str
    line: str
    writes: bool
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.what} on {self.name}, {'writes' if self.writes else 'reads'} at {self.line}"


class History:
    """The accesses to one piece of memory that a later one may have to be ordered behind."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def note(self, access: Access, knows: VectorClock, memory: str) -> None:
        """Record an access by an actor with the clock ``knows``.

        Args:
            memory: a name for it.

        Raises:
            StreamFault: the access and an earlier one touch the same bytes without an order, and at least one writes.
        """
        kept = []
        for former in self._accesses:
            is_ordered = former.actor == access.actor or knows.knows(former.actor, former.time)
            if not is_ordered and _conflict(former, access):
                raise StreamFault(_race(former, access, memory))
            # Whatever must come behind the former access must come behind this one too: one of them is enough.
            is_replaced = is_ordered and _stands_for(access, former)
            if not is_replaced:
                kept.append(former)
        kept.append(access)
        self._accesses = kept

    def unknown_to(self, knows: VectorClock, own: Iterable[int] = ()) -> Access | None:
        """Return an access that may not have happened yet at a point, or None.

        Accesses of the host and of the actors ``own`` do not count.
        """
        for access in self._accesses:
            if access.actor not in own and access.actor != HOST and not knows.knows(access.actor, access.time):
                return access
        return None

    def forget(self, start: int, stop: int, knows: VectorClock) -> Access | None:
        """Remove the accesses to a range of bytes; return one that may not have happened yet at a point, or None."""
        # Whatever gets these bytes next has no order with their former use.
        within = [access for access in self._accesses if access.start < stop and start < access.stop]
        self._accesses = [access for access in self._accesses if access not in within]
        return next((access for access in within if not knows.knows(access.actor, access.time)), None)


def _conflict(former: Access, access: Access) -> bool:
    """Return whether two accesses touch the same bytes and one of them writes."""
    overlap = former.start < access.stop and access.start < former.stop
    one_writes = former.writes or access.writes
    return overlap and one_writes


def _stands_for(access: Access, former: Access) -> bool:
    """Return whether every later conflict with ``former`` is one with ``access`` too."""
    covers = access.start <= former.start and former.stop <= access.stop
    is_as_strict = access.writes or not former.writes
    return covers and is_as_strict


def _race(former: Access, access: Access, memory: str) -> str:
    if access.actor == HOST:
        cure = "synchronize the event or the stream on the host before it"
    elif former.actor == HOST:
        cure = "wait for the host's access before the operation is queued"
    else:
        cure = f"let {access.name} wait for {former.name} before it, by an event or wait_stream"
    return (
        f"nothing orders two accesses to {memory}: first {former}; then {access}. "
        f"On a GPU the second may come before the first has ended; {cure}"
    )
