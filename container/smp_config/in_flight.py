"""How many microbatches a pipeline stage holds at once: what the planner counts with and the runtime partitions for."""

from __future__ import annotations


def in_flight_counts(stages: int, microbatches: int, active: int, *, backward_first: bool) -> tuple[int, ...]:
    """Microbatches whose activations each stage keeps at once.

    Backward first (1F1B): at most p − i at stage i of p (Narayanan et al. 2019, PipeDream). All forward passes first: in
    waves of ``active`` microbatches, each of which every stage holds whole before its first backward pass.

    Args:
        stages: their number.
        microbatches: in a step.
        active: most in flight at once (``active_microbatches``).
        backward_first: the interleaved schedule; otherwise all forward passes come before the backward passes.
    """
    most = max(1, min(microbatches, active))
    return tuple(min(most, stages - stage) if backward_first else most for stage in range(stages))


def default_active(stages: int) -> int:
    """``active_microbatches`` where it is not given."""
    return stages + 2


__all__ = ["default_active", "in_flight_counts"]
