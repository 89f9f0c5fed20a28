"""The degrees of a job that goes on with fewer ranks."""

from __future__ import annotations

import itertools

import pytest

from smp_config.errors import ConfigError
from smp_config.parameters import ModelParallelParameters
from smp_config.recovery import readers_at_start, spare_hosts
from smp_config.shrink_degrees import count_readers, describe_difference, shrink_to
from smp_config.topology import Group


def given(pp=1, tp=1, sharded=1, **more):
    more = {"prescaled_batch": True, **more} if tp > 1 and sharded > 1 else more
    return ModelParallelParameters.from_mp_parameters(
        {"partitions": pp, "tensor_parallel_degree": tp, "sharded_data_parallel_degree": sharded, "ddp": True, **more}
    )


def degrees(parameters):
    return (
        parameters.pipeline_parallel_degree,
        parameters.tensor_parallel_degree,
        parameters.sharded_data_parallel_degree,
    )


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        ((2, 2, 1), 4, (2, 2, 1)),  # a replica less
        ((2, 1, 1), 6, (2, 1, 1)),
        ((4, 1, 1), 2, (2, 1, 1)),
        ((4, 1, 1), 3, (3, 1, 1)),
        ((2, 2, 1), 2, (1, 2, 1)),  # tensor parallelism before stages
        ((1, 4, 1), 2, (1, 2, 1)),
        ((1, 4, 1), 3, (1, 1, 1)),
        ((1, 1, 8), 4, (1, 1, 4)),
        ((1, 1, 8), 6, (1, 1, 2)),
        ((2, 1, 2), 2, (2, 1, 1)),
        ((2, 2, 2), 6, (1, 2, 1)),
        ((1, 8, 2), 12, (1, 2, 2)),
        ((1, 1, 1), 3, (1, 1, 1)),
    ],
)
def test_the_nearest_degrees(before, ranks, after):
    found = shrink_to(given(*before), ranks)
    assert degrees(found) == after
    found.topology(ranks)


def test_of_all_degrees_that_fit_those_with_the_least_state_on_a_rank():
    for pp, tp, sharded, ranks in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 4), range(1, 13)):
        found = degrees(shrink_to(given(pp, tp, sharded), ranks))
        assert all(now <= before for now, before in zip(found, (pp, tp, sharded), strict=True))
        if ranks % (pp * tp) == 0 and ranks // (pp * tp) % sharded == 0:
            assert found == (pp, tp, sharded)
        for other in itertools.product(range(1, pp + 1), (1, 2, 4), (1, 2, 4)):
            if other[1] > tp or other[2] > sharded:
                continue
            try:
                given(*other).topology(ranks)
            except ConfigError:
                continue
            assert other[0] * other[1] * other[2] <= found[0] * found[1] * found[2]


@pytest.mark.parametrize(
    ("before", "sharded", "ranks", "after"),
    [
        (4, 1, 4, (4, 1)),
        (4, 1, 3, (1, 1)),
        (4, 1, 2, (2, 1)),
        (4, 1, 6, (2, 1)),
        (2, 4, 4, (2, 4)),  # a copy of the state over several groups of sequences
        (2, 4, 6, (2, 2)),
        (4, 2, 2, (2, 2)),
    ],
)
def test_sequences_stay_shared_out_over_as_many_ranks_as_fit(before, sharded, ranks, after):
    found = shrink_to(given(sharded=sharded, context_parallel_degree=before), ranks)
    assert (found.context_parallel_degree, found.sharded_data_parallel_degree) == after
    topology = found.topology(ranks)
    assert count_readers(found, ranks) == topology.size(Group.DP) // after[0]


def test_other_settings_stay_and_follow_the_degrees():
    before = given(1, 4, microbatches=4, bf16=True, expert_parallel_degree=4)
    found = shrink_to(before, 2)
    assert found.to_mp_parameters() == {
        **before.to_mp_parameters(), "tensor_parallel_degree": 2, "expert_parallel_degree": 2,
    }  # fmt: skip
    assert describe_difference(before, found) == "tensor_parallel_degree 4 → 2"
    assert describe_difference(before, before) == ""


def test_without_ddp_the_ranks_that_are_left_make_one_replica():
    alone = ModelParallelParameters.from_mp_parameters({"partitions": 4})
    assert degrees(shrink_to(alone, 3)) == (3, 1, 1)
    assert shrink_to(alone, 6) is None
    assert shrink_to(ModelParallelParameters.from_mp_parameters({"partitions": 2}), 3) is None


def test_readers():
    assert count_readers(given(2, 2), 8) == 8 // 2 == given(2, 2).topology(8).size(Group.DP)
    assert count_readers(given(2, 2, prescaled_batch=True), 8) == 2
    assert readers_at_start({}) is None
    assert readers_at_start({"SMP_READERS_AT_START": "4"}) == 4


@pytest.mark.parametrize("text", ["-1", "3", "two"])
def test_spare_hosts_that_cannot_be(text):
    assert spare_hosts({}, 1) == 0
    assert spare_hosts({"SMP_SPARE_HOSTS": "2"}, 3) == 2
    with pytest.raises(ConfigError, match=r"SMP_SPARE_HOSTS is .*: set a whole number from 0 to 2"):
        spare_hosts({"SMP_SPARE_HOSTS": text}, 3)
