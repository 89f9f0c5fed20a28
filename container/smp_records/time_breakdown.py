"""The times of a rank by kind of activity, counted as it goes, in a part of its record that others read.

The kinds are those of the host's time. If a GPU computes while the host runs ahead, waiting for the GPU counts for the
phase in which the host does it. A step's length is right all the same.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_records.records import PaceRecord

#: Kinds of a rank's time. Between two steps it is the script's turn, which mostly means that data is loaded.
START, BETWEEN, STEP, REDUCTION, UPDATE, SAVE = range(6)
_KINDS = 6

# Kind and when it began, steps, updates, stage, bytes on the device, computed by tasks; then seconds, collectives, waits by kind.
_FIELDS = struct.Struct(f"<QdQQqQd{3 * _KINDS}d")
#: In a record.
BYTES = _FIELDS.size


@dataclass(frozen=True)
class TimeReading:
    """The counters of a rank since it began.

    Attributes:
        when: time of the reading, in seconds of the machine's monotonic clock.
        steps: number of steps begun.
        updates: number of updates of its optimizers.
        stage: stage of its pipeline; 0 without one.
        device_bytes: bytes that PyTorch holds on the GPU; 0 without one.
        computed: seconds of a pipeline's tasks on this rank; 0 without a pipeline.
        seconds: seconds by kind.
        collectives: those of ``seconds`` spent waiting for the end of collectives.
        waits: those of ``seconds`` spent waiting for other ranks in other ways, if a wait took more than a moment.
    """

    when: float
    steps: int
    updates: int
    stage: int
    device_bytes: int
    computed: float
    seconds: tuple[float, ...]
    collectives: tuple[float, ...]
    waits: tuple[float, ...]


class TimeBreakdown:
    """The counters of this process.

    Threads of a pipeline count too, one at a time as its tasks run; should two meet, some microseconds are lost.

    Args:
        clock: seconds that all processes of the machine agree on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._map: mmap.mmap | None = None
        self._at = 0
        self._kind, self._since = START, clock()
        self._steps = self._updates = self._stage = self._device_bytes = 0
        self._computed = 0.0
        self._seconds, self._collectives, self._waits = ([0.0] * _KINDS for _ in range(3))

    def keep_in(self, record: mmap.mmap, at: int) -> None:
        """Keep the counters in ``record`` from now on, so that other processes can read them."""
        self._map, self._at = record, at
        self._write()

    def enter(self, kind: int) -> None:
        """Count the time from now on for another kind of work."""
        if kind != self._kind:
            now = self._clock()
            self._seconds[self._kind] += now - self._since
            self._kind, self._since = kind, now
            self._write()

    def begin_step(self) -> None:
        """Count a step that begins."""
        self._steps += 1
        self.enter(STEP)

    def updated(self) -> None:
        """Count an update of an optimizer."""
        self._updates += 1

    def add_task(self, seconds: float) -> None:
        """Add the seconds that a task of the pipeline has computed."""
        self._computed += seconds

    def add_collective(self, seconds: float) -> None:
        """Add the seconds that the rank has waited for a collective."""
        self._collectives[self._kind] += seconds

    def add_wait(self, seconds: float) -> None:
        """Add the seconds that the rank has waited for another rank."""
        self._waits[self._kind] += seconds

    def tell(self, *, stage: int | None = None, device_bytes: int | None = None) -> None:
        """Set the pipeline stage and the bytes on the device for readers. None keeps the former value."""
        self._stage = self._stage if stage is None else stage
        self._device_bytes = self._device_bytes if device_bytes is None else device_bytes

    def read(self) -> TimeReading:
        """Return the counters up to now."""
        return _reading(self._fields(), self._clock())

    def _fields(self) -> tuple[float, ...]:
        numbers = self._steps, self._updates, self._stage, self._device_bytes, self._computed
        return (self._kind, self._since, *numbers, *self._seconds, *self._collectives, *self._waits)

    def _write(self) -> None:
        if self._map is not None:
            _FIELDS.pack_into(self._map, self._at, *self._fields())


def read_counters(record: bytes, at: int, now: float) -> TimeReading | None:
    """Read the counters of a rank from its record; return None if the record has no such numbers.

    Args:
        at: offset in the record at which the counters begin.
        now: time on the machine's monotonic clock.
    """
    fields = _FIELDS.unpack_from(record, at)
    return _reading(fields, now) if fields[0] < _KINDS else None


def _reading(fields: tuple[float, ...], now: float) -> TimeReading:
    kind, since, steps, updates, stage, device_bytes, computed, *rest = fields
    seconds = rest[:_KINDS]
    seconds[int(kind)] += max(0.0, now - since)  # of what goes on
    return TimeReading(
        now,
        int(steps),
        int(updates),
        int(stage),
        int(device_bytes),
        computed,
        tuple(seconds),
        tuple(rest[_KINDS : 2 * _KINDS]),
        tuple(rest[2 * _KINDS :]),
    )


def _differences(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [max(0.0, late - early) for early, late in zip(before, after, strict=True)]


def record_between(before: TimeReading, after: TimeReading, rank: int) -> PaceRecord:
    """Return a rank's work between two readings.

    The caller adds other values, such as memory, which no counter has.
    """
    from smp_records.records import PaceRecord

    seconds = _differences(before.seconds, after.seconds)
    collectives = _differences(before.collectives, after.collectives)
    waits = _differences(before.waits, after.waits)
    # A wait counts when it ends, and may have begun before the first reading: no part is longer than its kind's time.
    collectives = [min(c, s) for c, s in zip(collectives, seconds, strict=True)]
    waits = [min(w, s - c) for w, s, c in zip(waits, seconds, collectives, strict=True)]
    own = [s - c - w for s, c, w in zip(seconds, collectives, waits, strict=True)]
    tasks, idle = min(after.computed - before.computed, seconds[STEP]), 0.0
    if tasks > 0:  # in a pipeline, the main thread waits for the step while other threads compute
        own[STEP] = max(0.0, tasks - collectives[STEP])
        idle, waits[STEP] = seconds[STEP] - max(tasks, collectives[STEP]), 0.0
    return PaceRecord(
        rank=rank,
        stage=max(0, after.stage),
        step=after.steps,
        steps=max(0, after.steps - before.steps),
        seconds=max(0.0, after.when - before.when),
        compute=own[STEP] + own[REDUCTION] + own[UPDATE],
        collectives=sum(collectives),
        waiting=sum(waits) + idle,
        data=own[BETWEEN],
        saving=own[SAVE],
    )
