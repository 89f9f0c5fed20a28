"""Pipeline arithmetic: idle fraction, microbatches in flight, and which layers a stage holds."""

from __future__ import annotations

from smp_config import ConfigError
from smp_config.in_flight import SCHEDULES, default_active, in_flight_counts


def idle_fraction(stages: int, microbatches: int) -> float:
    """Part of a step in which a stage waits, for GPipe and 1F1B alike: (p − 1) / (m + p − 1).

    Source: Huang et al. 2019 (GPipe) and Narayanan et al. 2021, for stages of equal time and free communication.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def in_flight(schedule: str, stage: int, stages: int, microbatches: int, active: int | None = None) -> int:
    """Microbatches whose activations a stage holds at once.

    All forwards first ("simple"): all of a wave, which has ``active`` of the m microbatches. Backward first
    ("interleaved", 1F1B): min(m, p − i) at stage i counted from 0 (Narayanan et al. 2019, PipeDream). Never more than
    ``active`` (``active_microbatches``; None: its default).

    Raises:
        ConfigError: a stage that does not exist, or an unknown schedule.
    """
    _at_least_one(stages=stages, microbatches=microbatches)
    if not 0 <= stage < stages:
        raise ConfigError(
            f"stage {stage} does not exist; pipeline_parallel_degree {stages} makes stages 0 to {stages - 1}: use one of these"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"pipeline is {schedule!r}; schedules are 'interleaved' and 'simple': use one of them")
    most = default_active(stages) if active is None else active
    return in_flight_counts(schedule, stages, microbatches, most)[stage]


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """The layers of a stage when they are divided evenly; the first stages get one more when it does not come out.

    The automatic partition balances by cost and may put fewer layers beside the embedding; this is its simple bound.
    """
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel_degree is {stages}, but the model has {layers} layers, so {stages - layers} stages would "
            f"hold none; use a degree of at most {layers}"
        )
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (1 if stage < more else 0))


def _at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it is a count: set it to 1 or more")
