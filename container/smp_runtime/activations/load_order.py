"""The order in which backward uses kept activations, read from the previous step or a pipeline's planned order.

The *tape* of a step is the sequence of forward and backward passes of regions on this rank. A *task* of the horizon is one
entry of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

Place = tuple[int | None, tuple[int, ...]]


class RegionKey(NamedTuple):
    """A use of a region."""

    place: Place  # microbatch, and call numbers of the pipeline task that runs it forward
    number: int  # position among the regions of that task


class TapeEntry(NamedTuple):
    """One task of the tape."""

    kind: str  # "F" or "B"
    key: RegionKey


class Tape:
    """A record of a step's tasks, which predicts the tasks within the horizon (a number of tasks)."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._record: list[tuple[Hashable, TapeEntry]] = []
        self._last: list[tuple[Hashable, TapeEntry]] = []
        self._expected: list[TapeEntry] | None = None
        self._position = 0
        self._has_begun = False
        self._numbers: dict[Place, int] = {}

    def begin_step(self) -> None:
        """Begin a new step, which is expected to follow the order of the previous one."""
        if any(entry.kind == "B" for _, entry in self._record):
            self._last = self._record
        self._record = []
        self._expected = None
        self._has_begun = False
        self._position = 0
        self._numbers.clear()

    def new_key(self, place: Place) -> RegionKey:
        """Return the key of a region's use that begins now."""
        number = self._numbers.get(place, 0)
        self._numbers[place] = number + 1
        return RegionKey(place, number)

    def requests(self) -> list[int]:
        """Return how many regions each request of another stage has run, for one microbatch of this step.

        It is the microbatch with the most requests.
        """
        found: dict[int | None, list[int]] = {}
        for (microbatch, path), count in self._numbers.items():
            if path:
                found.setdefault(microbatch, []).append(count)
        return max(found.values(), key=len, default=[])

    def note(self, entry: TapeEntry, action: Hashable = None, order: Sequence[Hashable] | None = None) -> None:
        """Record that a task begins.

        Args:
            action: of the pipeline that it belongs to.
            order: of the actions of this stage, if one is planned.
        """
        if not self._has_begun:
            self._has_begun = True
            self._expected = self._in_order(order)
        self._record.append((action, entry))
        if self._expected is not None:
            if self._position < len(self._expected) and self._expected[self._position] == entry:
                self._position += 1
            else:
                self._expected = None

    @property
    def entries(self) -> list[TapeEntry]:
        """Return the tasks of the step so far."""
        return [entry for _, entry in self._record]

    @property
    def is_followed(self) -> bool:
        """Return whether the step has followed the expected order so far."""
        return self._expected is not None

    def coming(self, live: Iterable[RegionKey]) -> list[RegionKey]:
        """Return the uses with a backward pass within the horizon.

        Args:
            live: uses between their forward and backward passes, in order.
        """
        if self._expected is not None:
            ahead = self._expected[self._position : self._position + self._horizon]
            return [entry.key for entry in ahead if entry.kind == "B"]
        # Nothing is known: the oldest microbatch comes first, and in it the last region.
        newest_first = list(live)[::-1]
        newest_first.sort(key=lambda key: -1 if key.place[0] is None else key.place[0])
        return newest_first[: self._horizon]

    def _in_order(self, order: Sequence[Hashable] | None) -> list[TapeEntry] | None:
        if not self._last:
            return None
        as_it_was = [entry for _, entry in self._last]
        if order is None:
            return as_it_was
        done: dict[Hashable, list[TapeEntry]] = {}
        for action, entry in self._last:
            done.setdefault(action, []).append(entry)
        planned = [entry for action in order for entry in done.get(action, ())]
        # A step that waited more often had other actions than the planned ones.
        if len(planned) != len(as_it_was):
            return as_it_was
        return planned
