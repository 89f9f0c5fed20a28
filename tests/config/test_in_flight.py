"""Microbatches that a stage holds: one function for the planner and the runtime."""

from __future__ import annotations

from smp_config import ModelParallelParameters
from smp_config.in_flight import default_active, in_flight_counts


def test_counts():
    assert in_flight_counts("interleaved", 4, 8, 6) == (4, 3, 2, 1)
    assert in_flight_counts("interleaved", 4, 8, 2) == (2, 2, 2, 1)
    assert in_flight_counts("simple", 4, 8, 6) == (6, 6, 6, 6), "a wave"
    assert in_flight_counts("simple", 4, 2, 6) == (2, 2, 2, 2)
    assert in_flight_counts("_only_forward", 4, 8, 6) == (1, 1, 1, 1), "nothing is kept"
    assert ModelParallelParameters(pipeline_parallel_degree=4).active_microbatches == default_active(4) == 6
