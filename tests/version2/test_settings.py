"""Settings of version 2 that cannot work are refused before a launch, with the wrong value and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from smp_config import ConfigError, JobSettings
from smp_config.version2.parameters import Version2Parameters

#: Processes of a host, and hosts.
PROCESSES, HOSTS = 4, 2

FLAGS = ("sm_activation_offloading", "fsdp_cache_flush_warnings", "allow_empty_shards", "fp8")

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"hybrid_shard_degree": -1}, "hybrid_shard_degree is -1", "from 0 to the number of processes"),
    ({"hybrid_shard_degree": "8"}, "hybrid_shard_degree is '8', a str", "a whole number"),
    ({"hybrid_shard_degree": True}, "hybrid_shard_degree is True, a bool", "a whole number"),
    ({"hybrid_shard_degree": 2.5}, "hybrid_shard_degree is 2.5", "a whole number"),
    (
        {"hybrid_shard_degree": 3},
        "hybrid_shard_degree is 3, and the job has 8 processes",
        "use one of 1, 2, 4, 8, or 0",
    ),
    ({"hybrid_shard_degree": 16}, "hybrid_shard_degree is 16, and the job has 8 processes", "1, 2, 4, 8"),
    *[({name: "true"}, f"{name} is 'true', a str", "without quotes") for name in FLAGS],
    *[({name: 1}, f"{name} is 1, an int", "true or false") for name in FLAGS],
    *[({name: None}, f"{name} is None", "or leave it out") for name in FLAGS],
    ({"activation_loading_horizon": 0}, "activation_loading_horizon is 0", "1 or more"),
    ({"activation_loading_horizon": "2"}, "activation_loading_horizon is '2'", "1 or more"),
    ({"activation_loading_horizon": False}, "activation_loading_horizon is False", "1 or more"),
    ({"tensor_parallel_degree": 0}, "tensor_parallel_degree is 0", "from 1 to the number of processes"),
    ({"tensor_parallel_degree": [2]}, "tensor_parallel_degree is [2], a list", "a whole number"),
    ({"tensor_parallel_degree": 3}, "tensor_parallel_degree is 3, and the job has 8", "a multiple of 3 processes"),
    ({"tensor_parallel_degree": 16}, "tensor_parallel_degree is 16, and the job has 8", "use one of 1, 2, 4, 8"),
    ({"context_parallel_degree": 0}, "context_parallel_degree is 0", "from 1"),
    ({"context_parallel_degree": "2"}, "context_parallel_degree is '2'", "a whole number"),
    ({"context_parallel_degree": 3}, "context_parallel_degree is 3, and the job has 8", "use one of 1, 2, 4, 8"),
    ({"expert_parallel_degree": -2}, "expert_parallel_degree is -2", "from 1"),
    ({"expert_parallel_degree": 1.5}, "expert_parallel_degree is 1.5", "a whole number"),
    ({"expert_parallel_degree": 3}, "expert_parallel_degree is 3, and the job has 8", "use one of 1, 2, 4, 8"),
    ({"expert_parallel_degree": 16}, "expert_parallel_degree is 16, and the job has 8", "a multiple of 16 processes"),
    ({"random_seed": -1}, "random_seed is -1", "0 or more"),
    ({"random_seed": "123456"}, "random_seed is '123456', a str", "such as 12345"),
    ({"random_seed": 2**64}, "random_seed is 18446744073709551616", "a whole number"),
    # crossed
    ({"hybrid_shard_degree": 8, "tensor_parallel_degree": 2}, "8 processes", "1, 2, 4, or 0"),
    ({"hybrid_shard_degree": 3, "tensor_parallel_degree": 2}, "4 of them for each part", "1, 2, 4, or 0"),
    ({"hybrid_shard_degree": 2, "tensor_parallel_degree": 8}, "1 of them for each part", "use one of 1, or 0"),
    ({"hybrid_shard_degree": 4, "tensor_parallel_degree": 6}, "tensor_parallel_degree is 6", "use one of 1, 2, 4, 8"),
    ({"context_parallel_degree": 4, "tensor_parallel_degree": 4}, "context_parallel_degree is 4", "use one of 1, 2"),
    ({"context_parallel_degree": 2, "expert_parallel_degree": 2}, "expert_parallel_degree is 2", "one of them"),
    ({"context_parallel_degree": 2, "fp8": True}, "context_parallel_degree is 2 and fp8 is true", "one of them"),
    ({"expert_parallel_degree": 8, "tensor_parallel_degree": 2}, "expert_parallel_degree is 8", "use one of 1, 2, 4"),
    ({"expert_parallel_degree": 2, "hybrid_shard_degree": 8}, "4 of them with the same experts", "1, 2, 4, or 0"),
    # other names
    ({"tensor_paralel_degree": 2}, "no parameter 'tensor_paralel_degree'", "did you mean 'tensor_parallel_degree'"),
    ({"hybrid_shard": 8}, "no parameter 'hybrid_shard'", "correct its name"),
    ({7: 8}, "no parameter 7", "remove it"),
    ({"ddp": True}, "'ddp': it belongs to version 1", '"mpi": {"enabled": True'),
    ({"partitions": 2, "hybrid_shard_degree": 2}, "'partitions': it belongs to version 1", "remove it"),
    ({"microbatches": 4}, "'microbatches': it belongs to version 1", '"mpi"'),
]


@pytest.mark.parametrize(("given", "wrong", "remedy"), WRONG, ids=lambda value: str(value)[:70])
def test_what_cannot_work_is_refused(given: dict[str, Any], wrong: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Version2Parameters.from_parameters(given).topology(PROCESSES * HOSTS)
    said = str(caught.value)
    assert wrong in said
    assert remedy in said
    assert caught.value.code in ("SMP101", "SMP102")


def test_the_table_has_three_of_each_setting() -> None:
    for name in Version2Parameters.model_fields:
        assert sum(list(given) == [name] for given, _, _ in WRONG) >= 3, name
    assert len(WRONG) >= 40


@pytest.mark.parametrize(
    ("given", "tensor", "sharded"),
    [
        ({}, 1, 1),
        ({"hybrid_shard_degree": 8}, 1, 8),
        ({"tensor_parallel_degree": 2}, 2, 4),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, 2, 1),
        ({"tensor_parallel_degree": 4, "hybrid_shard_degree": 2}, 4, 2),
        ({"expert_parallel_degree": 2}, 1, 4),
        ({"expert_parallel_degree": 4, "hybrid_shard_degree": 2}, 1, 2),
        ({"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, 2, 2),
    ],
)
def test_what_works_is_laid_out(given: dict[str, Any], tensor: int, sharded: int) -> None:
    topology = Version2Parameters.from_parameters(given).topology(PROCESSES * HOSTS)
    assert (topology.tensor, topology.sharded, topology.pipeline) == (tensor, sharded, 1)
    assert topology.expert == given.get("expert_parallel_degree", 1)


@pytest.mark.parametrize(
    ("distribution", "named"),
    [
        ({"torch_distributed": True}, 'distribution["torch_distributed"] is True'),
        ({"torch_distributed": {}}, 'torch_distributed has no "enabled"'),
        ({"torch_distributed": {"enabled": "yes"}}, "without quotes"),
        ({"torch_distributed": {"enabled": True, "processes": 2}}, "unknown key 'processes'"),
        ({"torch_distributed": {"enabled": True, "processes_per_host": 0}}, "processes_per_host is 0"),
        ({"torch_distributed": {"enabled": True}, "mpi": {"enabled": True}}, "torch_distributed and mpi"),
    ],
)
def test_a_wrong_launch_is_refused(distribution: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSettings.from_distribution({"smdistributed": {"modelparallel": {"enabled": True}}, **distribution})
    assert named in str(caught.value)


def test_the_json_of_a_job_is_read_or_named() -> None:
    assert Version2Parameters.from_given('{"hybrid_shard_degree": 2}').hybrid_shard_degree == 2
    assert Version2Parameters.from_given(None) == Version2Parameters.from_parameters({})
    for text, named in (("{", "no JSON"), ("[1]", "a list"), ('{"ddp": true}', "version 1")):
        with pytest.raises(ConfigError, match=named):
            Version2Parameters.from_given(text)


def test_settings_without_effect_are_named_once_they_are_given() -> None:
    given = {"sm_activation_offloading": True, "random_seed": 3, "allow_empty_shards": False, "hybrid_shard_degree": 2}
    said = Version2Parameters.from_parameters(given).warnings()
    assert said == []
    given |= {"allow_empty_shards": True, "sm_activation_offloading": False, "activation_loading_horizon": 3}
    said = Version2Parameters.from_parameters(given).warnings()
    assert [sentence.split(" is ")[0] for sentence in said] == ["allow_empty_shards", "activation_loading_horizon"]
    assert Version2Parameters.from_parameters({}).warnings() == []
