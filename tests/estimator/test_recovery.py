"""Arguments about lost ranks become variables of the job, and a plan counts what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from support.platform.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator.settings.recovery import with_recovery


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ({"max_restarts": 10}, {"SMP_MAX_RESTARTS": "10"}),
        ({"memory_checkpoint": True}, {"SMP_MEMORY_CHECKPOINT": "1"}),
        ({"memory_checkpoint": False}, {"SMP_MEMORY_CHECKPOINT": "0"}),
        ({"memory_checkpoint": {}}, {"SMP_MEMORY_CHECKPOINT": "1"}),
        (
            {"memory_checkpoint": {"steps": 4}, "max_restarts": 0},
            {"SMP_MEMORY_CHECKPOINT": "1", "SMP_MEMORY_CHECKPOINT_STEPS": "4", "SMP_MAX_RESTARTS": "0"},
        ),
    ],
)
def test_arguments_become_variables(make: Any, arguments: dict[str, Any], variables: dict[str, str]) -> None:
    made = make(environment={"A": "b"}, **arguments)
    assert made.environment == {"A": "b", **variables}
    assert make(environment={**variables}, **arguments).environment == variables  # said twice alike


def test_without_them_the_environment_is_what_was_given(make: Any) -> None:
    given = {"SMP_MAX_RESTARTS": "3"}
    assert make(environment=given).environment == given
    assert not make().environment
    assert with_recovery(given, None, None) is given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_restarts": -1}, "max_restarts is -1; give a whole number from 0 to 10,000"),
        ({"max_restarts": 10_001}, "from 0 to 10,000"),
        ({"max_restarts": True}, "max_restarts is True"),
        ({"max_restarts": "3"}, "max_restarts is '3'"),
        ({"memory_checkpoint": 1}, 'memory_checkpoint is 1; .* write True, False, or {"steps": 10}'),
        ({"memory_checkpoint": {"step": 1}}, "memory_checkpoint is {'step': 1}"),
        ({"memory_checkpoint": {"steps": 0}}, "is 0; give a whole number from 1 to 1,000,000"),
        ({"memory_checkpoint": True, "environment": ["A"]}, "environment is"),
        (
            {"max_restarts": 2, "environment": {"SMP_MAX_RESTARTS": "3"}},
            "max_restarts says SMP_MAX_RESTARTS=2, and environment has SMP_MAX_RESTARTS=3; .* remove one",
        ),
    ],
)
def test_arguments_that_say_something_else(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**arguments)


def test_a_plan_has_the_shared_memory_of_the_copies() -> None:
    from smp_estimator.planning import plan

    cluster = ("ml.p4d.24xlarge", 2)
    with_it = plan(10**9, *cluster, {"ddp": True}, environment={"SMP_MEMORY_CHECKPOINT": "1"})
    assert with_it.memory_checkpoint_bytes == 2 * 12 * with_it.request.shape.parameters  # fp32 with Adam, replicas once
    assert "memory checkpoints take 24.3 GB of /dev/shm on a host of the instance's 1,237 GB" in " ".join(
        str(with_it).split()
    )
    assert with_it.to_dict()["memory_checkpoint_bytes_per_host"] == with_it.memory_checkpoint_bytes
    without = plan(10**9, *cluster, {"ddp": True})
    assert without.memory_checkpoint_bytes == 0
    assert "shared memory" not in str(without)


@pytest.mark.parametrize(
    ("parameters", "bytes_per_parameter"),
    [
        ({"ddp": True, "bf16": True}, 14),
        ({"ddp": True, "pipeline_parallel_degree": 16, "microbatches": 16}, 6),  # half of the stages on each host
        ({"ddp": True, "shard_optimizer_state": True}, 4 + 4),  # weights, and half of the state
        ({"ddp": True, "sharded_data_parallel_degree": 16, "sdp_param_persistence_threshold": 0}, 6),
        ({"ddp": True, "sharded_data_parallel_degree": 8, "bf16": True, "sdp_param_persistence_threshold": 0}, 14),
    ],
)
def test_a_host_keeps_what_its_ranks_have(parameters: dict[str, Any], bytes_per_parameter: int) -> None:
    from smp_estimator.planning import ModelShape, plan

    shape = ModelShape(layers=64, hidden=1024, heads=16, vocabulary=1024, sequence=128)
    made = plan(shape, "ml.p4d.24xlarge", 2, parameters, environment={"SMP_MEMORY_CHECKPOINT": "1"})
    expected = 2 * bytes_per_parameter * shape.parameters
    assert made.memory_checkpoint_bytes == pytest.approx(expected, rel=0.03)


def test_a_plan_says_where_there_is_too_little_room() -> None:
    from smp_estimator.planning import plan

    wanted = {"SMP_MEMORY_CHECKPOINT": "1"}
    half = plan(30 * 10**9, "ml.p4d.24xlarge", 1, {"ddp": True, "sharded_data_parallel_degree": 8}, environment=wanted)
    assert any("more than half of the host's 1,237 GB" in note for note in half.notes)
    whole = plan(60 * 10**9, "ml.p4d.24xlarge", 1, {"ddp": True, "sharded_data_parallel_degree": 8}, environment=wanted)
    assert any("so that the ranks would train without" in note for note in whole.notes)


def test_the_estimators_plan_reads_the_argument(make: Any) -> None:
    made = make(memory_checkpoint=True, instance_count=1, distribution=model_parallel(processes=2, ddp=True))
    planned = made.plan(10**8, processes_per_host=2)
    assert planned.memory_checkpoint_bytes == 24 * planned.request.shape.parameters  # fp32 with Adam
