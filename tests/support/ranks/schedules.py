"""Schedules to compare planned ones with: the classics and their graphs, pictures, noise, and one that nobody else has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from smp_runtime.pipeline.schedule.actions import Action, Event, Orders, Segment, TaskKind
from smp_runtime.pipeline.schedule.policies import Policy
from smp_runtime.pipeline.schedule.simulation import simulate


class InPairs(Policy):
    """A schedule of its own: always two microbatches together, both forwards before the first backward, higher one first."""

    def wave(self, microbatch: int, active: int) -> int | None:
        return microbatch // min(2, active)

    def urgency(self, phase: TaskKind, microbatch: int) -> tuple[int, ...]:
        return microbatch // 2, phase is TaskKind.BACKWARD, -microbatch


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


def slowdowns(
    orders: Orders, segments: Sequence[Segment], *, active: int, latency: float, noise: float, samples: int
) -> list[float]:
    """Makespan ÷ makespan without noise, when every segment takes up to ``noise`` more or less than recorded."""
    draw = random.Random(0)
    quiet = simulate(orders, segments, active=active, latency=latency).makespan
    others = [
        [replace(s, seconds=s.seconds * draw.uniform(1 - noise, 1 + noise)) for s in segments] for _ in range(samples)
    ]
    return [simulate(orders, other, active=active, latency=latency).makespan / quiet for other in others]


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


def split(segments: Sequence[Segment], part: float) -> list[Segment]:
    """The same record with this part of each backward segment as gradients of weights, which come later."""
    found = []
    for segment in segments:
        if segment.action.kind is not TaskKind.BACKWARD:
            found.append(segment)
            continue
        action, rest = segment.action, (1 - part) * segment.seconds
        ready: Event = ("w", action.microbatch, action.path)
        gives = tuple((event, min(at, rest)) for event, at in segment.gives)
        found.append(replace(segment, seconds=rest, gives=(*gives, (ready, rest))))
        later = replace(action, kind=TaskKind.WEIGHTS)
        found.append(Segment(later, segment.rank, part * segment.seconds, TaskKind.BACKWARD, (ready,)))
    return found
