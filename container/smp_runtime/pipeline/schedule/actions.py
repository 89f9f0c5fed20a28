"""Pipeline schedules as data: what a rank runs, in which order, and the graph that an order must respect.

Nothing here needs torch or a process. A *task* is one run of a module's forward or backward, or of the step function, for
one microbatch. A task that waits for a value is cut there: a :class:`Segment` is what a rank computes without a wait, an
:class:`Action` is its name. A *schedule* (``orders``) maps every rank to the tuple of its actions in the order in which
they run; a rank never runs anything else than the next action of its order.

:mod:`.simulation` runs a schedule on a recorded graph without processes, :mod:`.planning` makes one.
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
    """A schedule cannot run: an action is missing, stands twice or waits for itself in a circle."""


class TaskKind(str, enum.Enum):
    """What a task runs. Also names the phase of a microbatch, which is forward until the script calls backward."""

    FORWARD = "F"
    BACKWARD = "B"
    STEP = "S"  # the step function's own code, on the root rank

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
    """What was recorded of one action.

    ``needs`` must all be available before it starts (besides the previous part of its own task, which is understood).
    ``gives`` are events with their time in seconds after the start of the segment; they are available at once on its own
    rank and after the transport's latency on the others.
    """

    action: Action
    rank: int
    seconds: float
    phase: TaskKind
    needs: tuple[Event, ...] = ()
    gives: tuple[tuple[Event, float], ...] = ()


Orders = Mapping[int, Sequence[Action]]


def draw(orders: Orders, *, kinds: str = "SFB", width: int = 0) -> str:
    """A text picture, one line per rank such as ``0: F0 F1 F2 F3 B0 F4``.

    Call paths and parts are left out: neighbours of the same kind and microbatch are written once.

    Args:
        orders: the schedule.
        kinds: which kinds of task to show; ``"FB"`` leaves out the step function's code.
        width: a longer line ends with ``…``; 0 means no limit.
    """
    lines = []
    margin = max((len(str(rank)) for rank in orders), default=0)
    for rank in sorted(orders):
        words: list[str] = []
        for action in orders[rank]:
            word = f"{action.kind}{action.microbatch}"
            if action.kind.value in kinds and (not words or words[-1] != word):
                words.append(word)
        line = f"{rank:>{margin}}: {' '.join(words)}".rstrip()
        lines.append(line[: width - 1] + "…" if width and len(line) > width else line)
    return "\n".join(lines)


def smooth(segments: Iterable[Segment]) -> list[Segment]:
    """The same segments with durations made equal over the microbatches, by the median.

    Only tasks of the same kind, path and rank whose *shape* agrees are averaged: as many parts, each in the same phase with
    as many needs and gives. A microbatch that took another branch keeps its own durations. The times at which events are
    given move with the duration, so that none comes after the end of its segment.
    """
    segments = list(segments)
    tasks: dict[tuple[int, TaskKind, tuple[int, ...], int], list[Segment]] = {}
    for segment in segments:
        action = segment.action
        tasks.setdefault((segment.rank, action.kind, action.path, action.microbatch), []).append(segment)
    groups: dict[Hashable, list[list[Segment]]] = {}
    for (rank, kind, path, _), parts in tasks.items():
        parts.sort(key=lambda segment: segment.action.part)
        shape = tuple((part.action.part, part.phase, len(part.needs), len(part.gives)) for part in parts)
        groups.setdefault((rank, kind, path, shape), []).append(parts)
    smoothed: dict[Action, Segment] = {}
    for alike in groups.values():
        for column in zip(*alike, strict=True):
            seconds = statistics.median(segment.seconds for segment in column)
            # No median of times exceeds that of durations, since no time exceeds its duration.
            times = [statistics.median(at) for at in zip(*_give_times(column), strict=True)]
            for segment in column:
                gives = tuple((event, at) for (event, _), at in zip(segment.gives, times, strict=True))
                smoothed[segment.action] = replace(segment, seconds=seconds, gives=gives)
    return [smoothed[segment.action] for segment in segments]


def _give_times(column: Sequence[Segment]) -> list[list[float]]:
    return [[at for _, at in segment.gives] for segment in column]


# ---- classic schedules: for tests, pictures and closed forms ----


def gpipe(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """All forwards, then all backwards.

    Idle fraction ``(p-1)/(m+p-1)``; ``m`` microbatches in flight everywhere (Huang et al., GPipe, 2019).
    """
    return {
        stage: tuple(_chain_action(kind, k, stage) for kind in "FB" for k in range(microbatches))
        for stage in range(stages)
    }


def one_f_one_b(stages: int, microbatches: int) -> dict[int, tuple[Action, ...]]:
    """Warm-up forwards, then forward and backward in turn (1F1B; Narayanan et al., PipeDream-Flush, 2021).

    Idle fraction ``(p-1)/(m+p-1)``; ``min(m, p-i)`` microbatches in flight on stage ``i``.
    """
    orders = {}
    for stage in range(stages):
        ahead = min(microbatches, stages - stage - 1)
        order = [_chain_action("F", k, stage) for k in range(ahead)]
        for k in range(microbatches):
            if k + ahead < microbatches:
                order.append(_chain_action("F", k + ahead, stage))
            order.append(_chain_action("B", k, stage))
        orders[stage] = tuple(order)
    return orders


def _chain_action(kind: str, microbatch: int, module: int) -> Action:
    return Action(TaskKind(kind), microbatch, (module,))


def chain(
    stages: int,
    microbatches: int,
    forward: float,
    backward: float | None,
    *,
    step_seconds: float = 0.0,
    step_rank: int | None = None,
    pieces: int = 1,
) -> list[Segment]:
    """The graph of a chain of modules, one after the other, as the engine would record it.

    Args:
        stages: ranks; module ``j`` of the chain lives on rank ``j % stages`` and has the path ``(j,)``.
        microbatches: how many.
        forward: seconds of one microbatch's forward on one rank, all of its modules together.
        backward: the same for backward; ``None`` for evaluation, which has none.
        step_seconds: length of each part of the step function's code: the calls, the loss, the call of backward, the end.
        step_rank: the root rank, which runs that code; ``None`` leaves it out: a schedule such as :func:`gpipe` has none.
        pieces: modules per rank; with more than one, a rank owns every ``stages``-th module (interleaved stages).
    """
    modules = stages * pieces
    segments: list[Segment] = []
    for k in range(microbatches):
        if step_rank is not None:
            segments += _step_parts(k, modules, step_seconds, step_rank, backward is not None)
        for j in range(modules):
            needs: list[Event] = [("value", k, j - 1)] if j else []
            if step_rank is not None:
                needs.append(("request", k, j))
            action = _chain_action("F", k, j)
            seconds = forward / pieces
            gives = ((("value", k, j), seconds),)
            segments.append(Segment(action, j % stages, seconds, TaskKind.FORWARD, tuple(needs), gives))
        for j in reversed(range(modules if backward is not None else 0)):
            source: Event = ("gradient", k, j + 1)
            if j == modules - 1 and step_rank is None:
                source = ("value", k, j)
            action = _chain_action("B", k, j)
            seconds = (backward or 0.0) / pieces
            gives = ((("gradient", k, j), seconds),)
            segments.append(Segment(action, j % stages, seconds, TaskKind.BACKWARD, (source,), gives))
    return segments


def _step_parts(k: int, modules: int, seconds: float, rank: int, trains: bool) -> list[Segment]:
    """The step function's code: it calls every module at once (their outputs are handles), then waits for the loss."""
    requests: list[Event] = [("request", k, j) for j in range(modules)]
    parts: list[tuple[TaskKind, list[Event], list[Event]]] = [
        (TaskKind.FORWARD, [], requests),
        (TaskKind.FORWARD, [("value", k, modules - 1)], []),
    ]
    if trains:
        parts.append((TaskKind.BACKWARD, [], [("gradient", k, modules)]))
        parts.append((TaskKind.BACKWARD, [("gradient", k, 0)], []))
    return [
        Segment(
            Action(TaskKind.STEP, k, (), number),
            rank,
            seconds,
            phase,
            tuple(needs),
            tuple((event, seconds) for event in gives),
        )
        for number, (phase, needs, gives) in enumerate(parts)
    ]
