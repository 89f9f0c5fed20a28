"""Pipeline schedules as data: the actions of a rank, their order, and the graph that an order must respect.

Nothing here needs torch or a process. A *task* is one run of a module's forward or backward, or of the step
function, for one microbatch. A task that waits for a value is cut there: a :class:`Segment` is the part
that a rank computes without a wait, an :class:`Action` is its name. A *schedule* (``orders``) maps every
rank to the tuple of its actions in the order in which they run. A rank never runs anything else than the
next action of its order.

:mod:`.simulation` runs a schedule on a recorded graph without processes, :mod:`.planner` makes one.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from smp_runtime.errors import SMPRuntimeError

Event = tuple[Hashable, ...]
"""The name of something that becomes available: a value, a gradient or a request."""


class ScheduleError(SMPRuntimeError):
    """An error in a schedule: an action is missing, is listed twice or waits for itself in a cycle."""

    code = "SMP506"


class TaskKind(str, enum.Enum):
    """The kind of a task. Also names the phase of a microbatch, which is forward until the script calls backward."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "S"  # the step function's own code, on the root rank
    WEIGHTS = "W"  # gradients of weights that a backward pass has left for later

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One segment of one task of one microbatch, by name."""

    kind: TaskKind
    microbatch: int
    path: tuple[int, ...] = ()  # call numbers from the step function down; () for the step function itself
    part: int = 0  # number of the segment in its task

    def __str__(self) -> str:
        where = "".join(f"/{number}" for number in self.path)
        return f"{self.kind}{self.microbatch}{where}" + (f".{self.part}" if self.part else "")


@dataclass(frozen=True, slots=True)
class Segment:
    """The record of one action.

    ``needs`` must all be available before it starts. The previous part of its own task must be done too; it is
    not listed. ``gives`` are events with their time in seconds after the start of the segment; they are
    available at once on its own rank and after the transport's latency on the others.
    """

    action: Action
    rank: int
    seconds: float
    phase: TaskKind
    needs: tuple[Event, ...] = ()
    gives: tuple[tuple[Event, float], ...] = ()
    label: str = ""  # the module's path; empty for the step function


Orders = Mapping[int, Sequence[Action]]


def smooth(segments: Iterable[Segment]) -> list[Segment]:
    """Return the same segments with equal durations over the microbatches, by the median.

    Only tasks of the same kind, path and rank with the same *shape* are averaged: as many parts, each in the
    same phase with as many needs and gives. A microbatch that took another branch keeps its own durations. The
    times of given events move with the duration, so that none comes after the end of its segment.
    """
    segments = list(segments)
    smoothed: dict[Action, Segment] = {}
    for alike in _tasks_by_shape(segments):
        for column in zip(*alike, strict=True):
            smoothed.update(_averaged(column))
    return [smoothed[segment.action] for segment in segments]


def _tasks_by_shape(segments: Iterable[Segment]) -> Iterable[list[list[Segment]]]:
    """Return lists of tasks that are averaged with each other, each task as its segments."""
    tasks: dict[tuple[int, TaskKind, tuple[int, ...], int], list[Segment]] = {}
    for segment in segments:
        action = segment.action
        tasks.setdefault((segment.rank, action.kind, action.path, action.microbatch), []).append(segment)
    groups: dict[Hashable, list[list[Segment]]] = {}
    for (rank, kind, path, _), parts in tasks.items():
        parts.sort(key=lambda segment: segment.action.part)
        shape = tuple((part.action.part, part.phase, len(part.needs), len(part.gives)) for part in parts)
        groups.setdefault((rank, kind, path, shape), []).append(parts)
    return groups.values()


def _averaged(column: Sequence[Segment]) -> dict[Action, Segment]:
    """Return the same part of several tasks, with the median of its duration and of the times of its events."""
    seconds = statistics.median(segment.seconds for segment in column)
    # No median of times exceeds that of durations, since no time exceeds its duration.
    same_events = zip(*(segment.gives for segment in column), strict=True)
    times = []
    for gives_of_event in same_events:
        times.append(statistics.median(at for _, at in gives_of_event))
    averaged = {}
    for segment in column:
        events = [event for event, _ in segment.gives]
        gives = tuple(zip(events, times, strict=True))
        averaged[segment.action] = replace(segment, seconds=seconds, gives=gives)
    return averaged


#: Seconds of a part of a task, by its phase, if durations must not matter. Backward computes two products for each one
#: of forward; one of the two is for gradients of weights.
_NOMINAL = {TaskKind.STEP: 0.01, TaskKind.BACKWARD: 0.02, TaskKind.WEIGHTS: 0.01}
#: Of the step function before its first call of another stage, which as a rule only hands on its arguments.
_NOMINAL_BEGIN = 0.0001


def nominal_durations(segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments with durations that depend only on their phase, so each run plans from the same ones.

    The events that a segment gives are spread over it evenly, in the order in which they came.
    """
    segments = list(segments)
    last: dict[tuple[TaskKind, tuple[int, ...], int], int] = {}
    for segment in segments:
        key = segment.action.kind, segment.action.path, segment.action.microbatch
        last[key] = max(last.get(key, 0), segment.action.part)

    def seconds_of(segment: Segment) -> float:
        action = segment.action
        is_begin = action.kind is TaskKind.STEP and action.part == 0
        has_more_parts = last[action.kind, action.path, action.microbatch] > 0
        if is_begin and has_more_parts:
            return _NOMINAL_BEGIN
        return _NOMINAL.get(segment.phase, _NOMINAL[TaskKind.STEP])

    found = []
    for segment in segments:
        seconds = seconds_of(segment)
        share = seconds / max(len(segment.gives), 1)
        gives = tuple((event, share * number) for number, (event, _) in enumerate(segment.gives, 1))
        found.append(replace(segment, seconds=seconds, gives=gives))
    return found
