"""Chains of pipeline stages in seconds, and what the runtime's simulator makes of them with each schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from smp_config.schedules import in_flight_counts
from smp_runtime.pipeline.schedule.actions import Action, Segment, TaskKind
from smp_runtime.pipeline.schedule.simulation import simulate


def segments(
    forward: Sequence[float], backward: Sequence[float], microbatches: int, weights: Sequence[float] | None = None
) -> Iterator[Segment]:
    """A chain of stages, by the seconds of one microbatch; ``weights``: of backward, what gradients of weights take apart."""
    stages = len(forward)
    if weights is not None:
        backward = [whole - late for whole, late in zip(backward, weights, strict=True)]
    for m in range(microbatches):
        for at in range(stages):
            if weights is not None:
                action = Action(TaskKind.WEIGHTS, m, (at,))
                yield Segment(action, at, weights[at], TaskKind.BACKWARD, needs=(("B", m, at),))
            for kind, seconds, before in (
                (TaskKind.FORWARD, forward[at], ("F", m, at - 1) if at else None),
                (TaskKind.BACKWARD, backward[at], ("B", m, at + 1) if at < stages - 1 else ("F", m, at)),
            ):
                yield Segment(
                    Action(kind, m, (at,)),
                    at,
                    seconds,
                    kind,
                    needs=() if before is None else (before,),
                    gives=(((kind.value, m, at), seconds),),
                )


def pieces_in_turn(stages: int, pieces: int, microbatches: int) -> Iterator[Segment]:
    """A chain of which each stage owns several pieces, in turn; a microbatch takes a stage 1 s forward and 2 s backward."""
    last = stages * pieces - 1
    for m in range(microbatches):
        for at in range(last + 1):
            for kind, seconds, before in (
                (TaskKind.FORWARD, 1.0 / pieces, ("F", m, at - 1) if at else None),
                (TaskKind.BACKWARD, 2.0 / pieces, ("B", m, at + 1) if at < last else ("F", m, at)),
            ):
                needs = () if before is None else (before,)
                gives = (((kind.value, m, at), seconds),)
                yield Segment(Action(kind, m, (at,)), at % stages, seconds, kind, needs=needs, gives=gives)


def orders(stages: int, microbatches: int, active: int, schedule: str = "interleaved") -> dict[int, list[Action]]:
    """1F1B, GPipe in waves, or ZB-H1 (its weights may wait where others may begin meanwhile)."""
    found = {}
    counts = in_flight_counts("interleaved", stages, microbatches, active)
    later = active >= min(microbatches, stages + 2)
    for at, warm in enumerate(counts):
        waiting = counts[0] - warm if later else 0
        if schedule == "simple":
            kinds = [
                kind
                for first in range(0, microbatches, active)
                for kind in "FB"
                for _ in range(min(active, microbatches - first))
            ]
        elif schedule == "zero_bubble":
            turns = ["F"] * warm + ["B", "F"] * waiting + ["B", "W", "F"] * microbatches
            kinds = turns + ["B"] * microbatches + ["W"] * microbatches
        else:
            kinds = ["F"] * warm + ["B", "F"] * microbatches
        done = dict.fromkeys("FBW", 0)
        found[at] = []
        for kind in kinds:
            if done[kind] < microbatches:
                found[at].append(Action(TaskKind(kind), done[kind], (at,)))
                done[kind] += 1
    return found


@functools.cache
def makespan(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    microbatches: int,
    active: int,
    latency: float,
    weights: tuple[float, ...] | None = None,
    schedule: str = "interleaved",
) -> float:
    """Seconds of a pass of the pipeline, as the runtime's simulator runs its order.

    As the runtime's planner does, it takes the order of all forward passes first where that is faster, over slow links.
    """
    if schedule != "simple":
        stiff = makespan(forward, backward, microbatches, active, latency, None, "simple")
        return min(stiff, _of_one_order(forward, backward, microbatches, active, latency, weights, schedule))
    return _of_one_order(forward, backward, microbatches, active, latency, weights, schedule)


def _of_one_order(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    microbatches: int,
    active: int,
    latency: float,
    weights: tuple[float, ...] | None,
    schedule: str,
) -> float:
    run = simulate(
        orders(len(forward), microbatches, active, schedule),
        segments(forward, backward, microbatches, weights),
        active=active,
        latency=latency,
    )
    return run.makespan
