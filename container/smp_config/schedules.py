"""The schedules of a pipeline, as a record of traits for each; planning and the runtime use them.

A new schedule is a record here, and the order of its tasks in :mod:`smp_runtime.pipeline.schedule.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

#: What ``pipeline`` may be.
Schedule = Literal["interleaved", "zero_bubble", "simple", "_only_forward"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

#: Default of ``pipeline``.
DEFAULT_SCHEDULE: Schedule = "interleaved"


@dataclass(frozen=True)
class ScheduleTraits:
    """What planning and the runtime ask of a schedule.

    Attributes:
        description: for the documentation of ``pipeline``; empty for a schedule that is not documented.
        in_flight: microbatches that a stage keeps, from its position, the number of stages, and the most that are in flight.
        idle: part of a step in which a stage waits, from stages, microbatches, the most in flight, and forward passes, which count
            2 where checkpointing computes them again and 1 otherwise.
        keeps: rank among the schedules by microbatches that are kept: a higher one keeps no less.
        waits: the same by the time that stages wait.
        splits_backward: gradients of weights are computed apart from those of inputs.
        has_waves: all forward passes of a wave come before its first backward pass.
        trains: there are backward passes.
    """

    description: str
    in_flight: Callable[[int, int, int], int]
    idle: Callable[[int, int, int, int], float]
    keeps: int
    waits: int
    splits_backward: bool = False
    has_waves: bool = False
    trains: bool = True


def _idle_of_1f1b(stages: int, microbatches: int, most: int, forwards: int) -> float:
    """Return the idle share of 1F1B: (p − 1) / (m + p − 1), independent of the time of a pass.

    See Narayanan et al. 2021, for stages of equal time and free communication. With fewer microbatches in flight than
    stages the pipeline never fills: a microbatch begins when another has passed all p stages. So m of them take ⌈m/a⌉ · p
    times of a stage, plus the times by which the last ones follow each other.
    """
    waves = -(-microbatches // most)
    return 1 - microbatches / max(microbatches + stages - 1, waves * stages + (microbatches - 1) % most)


def _idle_of_gpipe(stages: int, microbatches: int, most: int, forwards: int) -> float:
    """Return the idle share of GPipe: (p − 1) / (m + p − 1) for one wave (Huang et al. 2019).

    Each wave fills and empties the pipeline.
    """
    waves = -(-microbatches // most)
    return 1 - microbatches / (microbatches + waves * (stages - 1))


def _idle_of_zero_bubble(stages: int, microbatches: int, most: int, forwards: int) -> float:
    """Return the idle share of the zero bubble schedule: (p − 1) / (3m + p − 1), as in Qi et al. 2023 (ZB-H1).

    It is (p − 1) / (2m + p − 1) where forward passes are computed again.

    Forward passes, gradients of inputs and gradients of weights take a unit of time each; recomputed forward passes come
    before gradients of inputs. A stage waits for forward passes and gradients of inputs of the stages before it, and
    computes its own gradients of weights meanwhile. If no more microbatches are in flight than there are stages, a
    microbatch of the next wave waits for one that has come through all of them, and for gradients of weights that were
    computed before. With one wave these fill the remaining time. The last form matches the runtime's planner; it is up
    to 8 % above where the last wave is not whole.
    """
    forward, inputs, weights = 1, forwards, 1
    whole = forward + inputs + weights
    seconds = microbatches * whole + (stages - 1) * (whole - 2 * weights)
    if most <= stages:
        through, waves = stages * (forward + inputs) + weights, -(-microbatches // most)
        follow = (forward + inputs) * (microbatches - 1)
        if waves > 1:
            through, follow = waves * through, (microbatches - 1) % most * whole + (waves - 1) * (most - 1) * weights
        seconds = max(seconds, through + follow)
    return 1 - microbatches * whole / seconds


TRAITS: Mapping[str, ScheduleTraits] = {
    # 1F1B (Narayanan et al. 2019, PipeDream).
    "interleaved": ScheduleTraits(
        "backward first",
        in_flight=lambda stage, stages, most: min(most, stages - stage),
        idle=_idle_of_1f1b,
        keeps=0,
        waits=1,
    ),
    # Later stages keep as many as the first, until their gradients of weights have come (ZB-H1: Qi et al. 2023).
    "zero_bubble": ScheduleTraits(
        "likewise, gradients of weights where a stage would idle",
        in_flight=lambda stage, stages, most: min(most, stages),
        idle=_idle_of_zero_bubble,
        keeps=1,
        waits=0,
        splits_backward=True,
    ),
    # GPipe: every stage holds a whole wave before its first backward pass.
    "simple": ScheduleTraits(
        "all forwards, then all backwards",
        in_flight=lambda stage, stages, most: most,
        idle=_idle_of_gpipe,
        keeps=2,
        waits=2,
        has_waves=True,
    ),
    # Nothing is kept for later.
    "_only_forward": ScheduleTraits(
        "",
        in_flight=lambda stage, stages, most: 1,
        idle=_idle_of_1f1b,
        keeps=0,
        waits=1,
        trains=False,
    ),
}

#: Schedules to choose from, the default first.
DOCUMENTED = tuple(name for name, traits in TRAITS.items() if traits.description)


def describe() -> str:
    """Return one sentence that describes the documented schedules."""
    return "; ".join(f"{name}: {TRAITS[name].description}" for name in DOCUMENTED) + "."


def in_flight_counts(schedule: str, stages: int, microbatches: int, active: int) -> tuple[int, ...]:
    """Return, for each stage, the number of microbatches with activations in memory at once.

    Args:
        active: most microbatches in flight (``active_microbatches``).
    """
    most = max(1, min(microbatches, active))
    return tuple(TRAITS[schedule].in_flight(stage, stages, most) for stage in range(stages))


def default_active(stages: int, pieces: int = 1) -> int:
    """Return the default of ``active_microbatches``; ``pieces``: of each stage (``virtual_stages``).

    A microbatch that passes every stage several times lets others begin in between, twice as many as there are stages
    (Narayanan et al. 2021, section 2.2, begins fewer than that before the first backward pass).
    """
    return stages + 2 if pieces == 1 else max(stages + 2, 2 * stages)
