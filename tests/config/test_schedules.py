"""The traits of schedules: one record of each, for the planner and the runtime."""

from __future__ import annotations

import itertools

from smp_config import ModelParallelParameters
from smp_config.schedules import DOCUMENTED, SCHEDULES, TRAITS, default_active, in_flight_counts


def test_counts():
    assert in_flight_counts("interleaved", 4, 8, 6) == (4, 3, 2, 1)
    assert in_flight_counts("interleaved", 4, 8, 2) == (2, 2, 2, 1)
    assert in_flight_counts("simple", 4, 8, 6) == (6, 6, 6, 6), "a wave"
    assert in_flight_counts("simple", 4, 2, 6) == (2, 2, 2, 2)
    assert in_flight_counts("_only_forward", 4, 8, 6) == (1, 1, 1, 1), "nothing is kept"
    assert ModelParallelParameters(pipeline_parallel_degree=4).active_microbatches == default_active(4) == 6


def test_every_schedule_has_traits_and_an_order():
    from smp_runtime.pipeline.schedule.policies import POLICIES

    assert set(SCHEDULES) == TRAITS.keys() == POLICIES.keys()
    assert DOCUMENTED == ("interleaved", "zero_bubble", "simple")
    for name, policy in POLICIES.items():
        assert (policy.wave(3, 2) is not None) == TRAITS[name].has_waves, name
        assert policy.splits_backward == TRAITS[name].splits_backward, name


def test_ranks_of_schedules_are_those_of_their_forms():
    """What ``keeps`` and ``waits`` promise to the search holds for every pipeline."""
    trained = [traits for traits in TRAITS.values() if traits.trains]
    for one, other in itertools.permutations(trained, 2):
        for stages, count, most in itertools.product((2, 3, 4, 8), (1, 2, 5, 8, 16), (2, 4, 9, 16)):
            most = min(most, count)
            kept = [[traits.in_flight(stage, stages, most) for stage in range(stages)] for traits in (one, other)]
            if one.keeps <= other.keeps:
                assert all(a <= b for a, b in zip(*kept, strict=True)), (one, other, stages, count, most)
            for forwards in (1, 2):
                if one.waits <= other.waits and most >= min(stages, count):  # the pipeline is filled
                    waiting = [traits.idle(stages, count, most, forwards) for traits in (one, other)]
                    assert waiting[0] <= waiting[1] + 1e-12, (one, other, stages, count, most)
