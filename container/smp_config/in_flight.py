"""What a step has in flight: microbatches at a stage, by the schedule of the pipeline, and buckets of gradients.

Planning counts with it before a job starts, and the runtime partitions for it and fills the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

#: What ``pipeline`` may be; :mod:`smp_runtime.pipeline.schedule.policies` says how each runs.
Schedule = Literal["interleaved", "zero_bubble", "simple", "_only_forward"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

#: Default of ``bucket_cap_mb``, in bytes.
BUCKET_CAP_BYTES = 25 * 2**20

#: Below this latency outweighs what an earlier start wins.
_SMALLEST_BUCKET = 2**20

#: Microbatches at a stage of a pipeline, from its position, the number of stages, and the most that are in flight.
_RULES: Mapping[str, Callable[[int, int, int], int]] = {
    # Backward first (1F1B): Narayanan et al. 2019, PipeDream.
    "interleaved": lambda stage, stages, most: min(most, stages - stage),
    # Likewise, but later stages keep as many as the first, until their gradients of weights have come (ZB-H1: Qi et al. 2023).
    "zero_bubble": lambda stage, stages, most: min(most, stages),
    # All forward passes first: every stage holds a whole wave before its first backward pass.
    "simple": lambda stage, stages, most: most,
    # Without backward passes nothing is kept for later.
    "_only_forward": lambda stage, stages, most: 1,
}


def in_flight_counts(schedule: str, stages: int, microbatches: int, active: int) -> tuple[int, ...]:
    """Microbatches of a step whose activations each stage keeps at once; ``active``: most in flight (``active_microbatches``)."""
    most = max(1, min(microbatches, active))
    return tuple(_RULES[schedule](stage, stages, most) for stage in range(stages))


def default_active(stages: int, pieces: int = 1) -> int:
    """``active_microbatches`` where it is not given; ``pieces``: of each stage (``virtual_stages``).

    A microbatch that comes through every stage several times lets others begin in between, twice as many as there are stages
    (Narayanan et al. 2021, section 2.2, begins fewer than that before the first backward pass).
    """
    return stages + 2 if pieces == 1 else max(stages + 2, 2 * stages)


def effective_bucket_bytes(total_bytes: int, cap_bytes: int = BUCKET_CAP_BYTES) -> int:
    """The size at which buckets are closed: at most ``cap_bytes``, an eighth of a small model.

    The last bucket of a step has nothing to hide behind, so it should be a small part of the whole.
    """
    return min(cap_bytes, max(_SMALLEST_BUCKET, total_bytes // 8))
