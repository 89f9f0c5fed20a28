"""Settings that no job can have, as somebody may write them: refused at once, with the setting named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
from support.faults import hostile
from support.platform.jobs import model_parallel

from smp_config import ConfigError, JobSettings, ModelParallelParameters, Topology
from smp_config.limits import MOST_RANKS, timeout_seconds
from smp_config.topology import Group

Make = Callable[..., Any]


def _mpi(**mpi: Any) -> dict[str, Any]:
    return {**model_parallel(2, ddp=True), "mpi": {"enabled": True, **mpi}}


def _endless() -> dict[str, Any]:
    made = model_parallel(2, ddp=True)
    made["smdistributed"]["modelparallel"]["parameters"]["self"] = made
    return made


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            {"distribution": _mpi(processes_per_host=100_000)},
            "100000 processes = mpi.processes_per_host 100000 × instance_count 1",
        ),
        ({"distribution": _mpi(processes_per_host=10**30)}, "at most 9223372036854775807, got one of 31 digits"),
        ({"distribution": _mpi(processes_per_host=10**5000)}, "'processes_per_host'] is a whole number of 16610 bits"),
        (
            {"instance_count": 1_000_000},
            "instance_count is 1000000; it is a number of hosts, and no job has more than 131,072",
        ),
        ({"instance_count": 10**5000}, "instance_count is an int that cannot be written out"),
        ({"distribution": model_parallel(2, ddp=True, sdp_gradient_clipping=10**400)}, "got one of 401 digits"),
        (
            {"distribution": model_parallel(2, ddp=True, sdp_gradient_clipping=float("inf"))},
            "must be a number, got inf",
        ),
        (
            {"distribution": _mpi(processes_per_host=2, custom_mpi_options="-x A=\0")},
            "'custom_mpi_options'] holds the character NUL",
        ),
        ({"distribution": _mpi(processes_per_host=2, custom_mpi_options="-x A=1 " * 9000)}, "has 63,000 characters"),
        ({"distribution": _endless()}, "is nested more than 64 levels deep"),
        ({"distribution": {**model_parallel(2), "instance_groups": 5}}, 'distribution["instance_groups"] is 5, an int'),
        ({"environment": {"A=B": "1"}}, "an environment variable is called 'A=B'"),
        ({"environment": {"": "1"}}, "an environment variable is called ''"),
        ({"environment": {0: "1"}}, "an environment variable is called 0"),
        ({"environment": {"A\0": "1"}}, "a name in environment holds the character NUL"),
        ({"environment": {"A": "a\0b"}}, "environment['A'] holds the character NUL"),
        ({"environment": {"A": "\ud800"}}, "environment['A'] holds half of a surrogate pair"),
        ({"environment": {"HF_TOKEN": b"s3cr3t-value"}}, "environment variable 'HF_TOKEN' is ***, a bytes"),
        ({"environment": {"SMP_TIMEOUT_SECONDS": "nan"}}, "SMP_TIMEOUT_SECONDS is 'nan'"),
        ({"environment": {"SMP_TIMEOUT_SECONDS": "inf"}}, "SMP_TIMEOUT_SECONDS is 'inf'"),
        ({"environment": {"SMP_TIMEOUT_SECONDS": "1e18"}}, "at most 1,000,000,000"),
        ({"environment": {"SMP_NCCL_THROTTLE_LIMIT": "9" * 30}}, "SMP_NCCL_THROTTLE_LIMIT is '999"),
        ({"environment": {"SMP_TIMELINE": "9" * 5000}}, "SMP_TIMELINE is '999"),
        ({"environment": {"SMP_EMULATE_CUDA": "checked:²"}}, "the seed of an order of work"),
        ({"environment": {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": str(8192 * 10**30)}}, "no memory has so many"),
        ({"hyperparameters": {"a=b": 1}}, "a hyperparameter is called 'a=b'"),
        ({"hyperparameters": {"": 1}}, "a hyperparameter is called ''"),
        ({"hyperparameters": {"a": "\0"}}, "hyperparameters['a'] holds the character NUL"),
        ({"hyperparameters": {"a": 10**5000}}, "hyperparameters['a'] is a whole number of 16610 bits"),
        ({"hyperparameters": {"a": {1: 2, "1": 3}}}, "'1' stands twice"),
        ({"hyperparameters": {"api_key": {1, 2}}}, "hyperparameter 'api_key' is ***, a set"),
        ({"dependencies": 5}, "dependencies is 5, an int"),
        ({"base_job_name": 5}, "base_job_name is 5, an int"),
        (
            {"entry_point": "s3://bucket/train.py"},
            "entry_point is 's3://bucket/train.py'; the script is one of the files",
        ),
        ({"output_path": "file://" + "x" * 300}, "output_path is"),
        ({"output_path": "file://~nobody-of-this-name/x"}, "there is no such home folder"),
    ],
)
def test_refused_at_once(make: Make, arguments: dict[str, Any], part: str) -> None:
    arguments = dict(arguments)
    given = {"distribution": model_parallel(2, ddp=True), **arguments}
    with hostile.alarm(5), pytest.raises(ConfigError) as caught:
        make(**given)
    assert part in str(caught.value)


def test_names_may_be_paths(make: Make) -> None:
    estimator = make(base_job_name=PurePosixPath("training"), instance_type=PurePosixPath("local"))
    assert (estimator.base_job_name, estimator.instance_type) == ("training", "local")


@pytest.mark.parametrize("name", ["x" * 300 + ".py", "x/" * 3000 + "y.py", "a\0.py"])
def test_a_script_that_no_file_system_can_have(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, match="entry_point"):
        make(entry_point=name).fit(logs=False)


@pytest.mark.parametrize(
    ("carried", "part"),
    [
        ({"sagemaker_instance_type": 5}, "sagemaker_instance_type is 5"),
        ({"sagemaker_distribution_instance_groups": "ab"}, "is 'ab', a str"),
        ({"sagemaker_distributed_dataparallel_enabled": "yes"}, "enabled is 'yes'"),
        ({"sagemaker_mpi_enabled": True, "sagemaker_mpi_custom_mpi_options": 0}, "custom_mpi_options is 0"),
        ({"mp_parameters": "[" * 5000}, "more than 64 levels"),
        ({"mp_parameters": '{"microbatches": 1, "microbatches": 2}'}, "'microbatches' stands twice"),
    ],
)
def test_what_a_job_carries(carried: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSettings.from_hyperparameters(carried, are_decoded=True)
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["1e999", '{"a": 1, "a": 2}', "9" * 5000, "[" * 5000, "[1e999]"])
def test_what_would_lose_something_as_a_value_stays_text(text: str) -> None:
    from smp_config.job import decoded_hyperparameter

    assert decoded_hyperparameter(text) == text


def test_the_largest_job_is_laid_out_at_once() -> None:
    with hostile.alarm(60.0):
        topology = ModelParallelParameters.from_mp_parameters({"ddp": True, "tensor_parallel_degree": 8}).topology(
            MOST_RANKS
        )
        assert len(topology.groups(Group.TP)) == MOST_RANKS // 8
    with pytest.raises(ConfigError, match="more than the 131,072"):
        Topology(MOST_RANKS + 1)
    assert timeout_seconds({"SMP_TIMEOUT_SECONDS": "1e9"}) == 1e9
