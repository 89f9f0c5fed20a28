"""Microbatches that a stage holds: one function for the planner and the runtime."""

from __future__ import annotations

from smp_config import ModelParallelParameters
from smp_config.in_flight import default_active, in_flight_counts


def test_counts():
    assert in_flight_counts(4, 8, 6, backward_first=True) == (4, 3, 2, 1)
    assert in_flight_counts(4, 8, 2, backward_first=True) == (2, 2, 2, 1)
    assert in_flight_counts(4, 8, 6, backward_first=False) == (6, 6, 6, 6), "a wave"
    assert in_flight_counts(4, 2, 6, backward_first=False) == (2, 2, 2, 2)
    assert ModelParallelParameters(pipeline_parallel_degree=4).active_microbatches == default_active(4) == 6
