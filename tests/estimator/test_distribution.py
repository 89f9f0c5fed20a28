"""The distribution dictionary against the hyperparameters that a job carries."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.platform.jobs import model_parallel

from smp_config import ConfigError, ModelParallelParameters
from smp_estimator.settings import distribution as strategies
from smp_estimator.settings import translation


def read(distribution: Any, *, hosts: int | None = 1, process_mode: bool = True, instance_type: str = "local") -> Any:
    return strategies.read(distribution, instance_type=instance_type, hosts=hosts, process_mode=process_mode).settings


def test_hyperparameters_are_those_of_the_platform() -> None:
    settings = read(model_parallel(8, partitions=2, ddp=True, microbatches=4), instance_type="ml.p4d.24xlarge")
    assert translation.hyperparameters(settings) == {
        "mp_parameters": {"partitions": 2, "pipeline_parallel_degree": 2, "ddp": True, "microbatches": 4},
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": "-x FI_PROVIDER=efa -x NCCL_PROTO=simple -x FI_EFA_USE_DEVICE_RDMA=1",
        "sagemaker_instance_type": "ml.p4d.24xlarge",
        "sagemaker_distributed_dataparallel_enabled": False,
    }


@pytest.mark.parametrize(
    "distribution",
    [
        model_parallel(4, pipeline_parallel_degree=2, tensor_parallel_degree=2, ddp=True),
        {**model_parallel(2), "mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x A=1"}},
        {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "--verbose"}}},
        {"mpi": {"enabled": True, "processes_per_host": 3}},
    ],
)
def test_what_is_sent_reads_back(distribution: dict[str, Any]) -> None:
    settings = read(distribution)
    encoded = {name: json.dumps(value) for name, value in translation.hyperparameters(settings).items()}
    again = read(translation.from_hyperparameters(encoded))
    assert translation.hyperparameters(again) == translation.hyperparameters(settings)


def with_options(text: str) -> Any:
    distribution = model_parallel(2, ddp=True)
    distribution["mpi"]["custom_mpi_options"] = text
    return read(distribution)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('-x "A=1   2" --map-by  socket', "-x 'A=1   2' --map-by socket"),
        ("-x 'A=1' -x B=\"2\"", "-x A=1 -x B=2"),
        (
            "-x 'A=--mca btl_vader_single_copy_mechanism none' --mca btl_vader_single_copy_mechanism none",
            "-x 'A=--mca btl_vader_single_copy_mechanism none'",
        ),
    ],
)
def test_options_are_sent_as_mpirun_reads_them(given: str, sent: str) -> None:
    carried = translation.hyperparameters(with_options(given))
    assert carried["sagemaker_mpi_custom_mpi_options"] == sent
    assert translation.from_hyperparameters(carried)["mpi"]["custom_mpi_options"] == sent


def test_a_stock_image_tears_quoted_options() -> None:
    assert translation.stock_image_conflicts(with_options("-x 'A=1' -verbose")) == []
    with pytest.raises(
        ConfigError, match=r"splits at every blank.*\"Tree'\" as a word.*environment=\{'A': 'Ring Tree'\}"
    ):
        translation.stock_image_conflicts(with_options('-x "A=Ring Tree"'))
    with pytest.raises(ConfigError, match="give image_uri instead"):
        translation.stock_image_conflicts(with_options("--mca rmaps 'my map'"))
    with pytest.raises(ConfigError, match="splits at every blank"):
        translation.stock_image_conflicts(with_options("""-x "A='b'" """))
    mirrored = translation.hyperparameters(with_options(""), {"SMDDP_LOG": "a b"})
    assert mirrored["sagemaker_mpi_custom_mpi_options"] == "", "the environment carries it"


def test_parameters_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps({"pipeline_parallel_degree": 2, "microbatches": 2}))
    distribution = model_parallel(2)
    distribution["smdistributed"]["modelparallel"]["parameters"] = str(path)
    assert read(distribution).model_parallel.microbatches == 2


@pytest.mark.parametrize("placement", ["DPT", "PTD", "spread"])
def test_accepts_what_the_sdk_refuses(placement: str) -> None:
    settings = read(
        model_parallel(8, partitions=2, default_partition=1, auto_partition=False, placement_strategy=placement)
    )
    assert settings.model_parallel.placement_strategy == placement


def test_one_process_per_host_by_default_in_process_mode(caplog: pytest.LogCaptureFixture) -> None:
    distribution = model_parallel()
    del distribution["mpi"]["processes_per_host"]
    with caplog.at_level(logging.WARNING):
        settings = read(distribution)
    assert settings.mpi.processes_per_host == 1
    assert "one process per host" in caplog.text
    with pytest.raises(ConfigError, match="processes_per_host is missing"):
        read(distribution, process_mode=False)


def test_spare_hosts_have_no_ranks() -> None:
    given = model_parallel(2, partitions=4, ddp=True)
    where: dict[str, Any] = {"instance_type": "local", "process_mode": True}
    assert strategies.read(given, hosts=3, environment={"SMP_SPARE_HOSTS": "1"}, **where).settings == read(
        given, hosts=2
    )
    with pytest.raises(ConfigError, match="6 processes"):
        strategies.read(given, hosts=3, **where)
    with pytest.raises(
        ConfigError, match=r"SMP_SPARE_HOSTS is '3'; it says how many of the job's 3 host\(s\) wait as spares"
    ):
        strategies.read(given, hosts=3, environment={"SMP_SPARE_HOSTS": "3"}, **where)


def test_world_size_is_explained() -> None:
    with pytest.raises(ConfigError) as caught:
        read(model_parallel(3, pipeline_parallel_degree=2, tensor_parallel_degree=2, ddp=True), hosts=2)
    message = str(caught.value)
    assert "pipeline_parallel_degree 2 × tensor_parallel_degree 2 = 4" in message
    assert "6 processes = mpi.processes_per_host 3 × instance_count 2" in message
    assert "set processes_per_host to 2" in message


def test_sharding_that_does_not_divide_is_explained() -> None:
    with pytest.raises(
        ConfigError, match=r"sharded_data_parallel_degree is 3.*processes_per_host 4 × instance_count 1"
    ):
        read(model_parallel(4, sharded_data_parallel_degree=3, ddp=True))


def test_replicas_without_ddp_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    read(model_parallel(2))
    assert "ddp is false" in caplog.text


def test_at_most_one_process_per_gpu() -> None:
    with pytest.raises(ConfigError, match=r"processes_per_host is 16, but ml.p4d.24xlarge has 8 GPUs.*at most 8"):
        read(model_parallel(16, ddp=True), instance_type="ml.p4d.24xlarge")
    read(model_parallel(16, ddp=True), instance_type="ml.c5.xlarge")
    read(model_parallel(16, ddp=True), instance_type="ml.p99.unheard_of")


def test_too_long_parameters_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"take 3\d{3} characters as JSON, but the service accepts 2500"):
        read(model_parallel(2, ddp=True, partition_file="x" * 3000))


def test_every_known_parameter_survives() -> None:
    sent = translation.hyperparameters(read(model_parallel(2, ddp=True, fp16=True, _match_weights=True)))[
        "mp_parameters"
    ]
    assert ModelParallelParameters.from_mp_parameters(sent).match_weights is True


def test_instance_groups() -> None:
    groups = [SimpleNamespace(instance_group_name=name) for name in ("cpu", "gpu")]
    chosen = strategies.group_names({**model_parallel(), "instance_groups": [groups[1]]}, groups)
    assert chosen["instance_groups"] == ["gpu"]
    assert strategies.group_names(model_parallel(), groups[:1])["instance_groups"] == ["cpu"]
    with pytest.raises(ConfigError, match="exactly one trains"):
        strategies.group_names(model_parallel(), groups)
    with pytest.raises(ConfigError, match="did you mean 'gpu'"):
        strategies.group_names({"instance_groups": ["gpus"]}, groups)
    with pytest.raises(ConfigError, match="without instance_groups"):
        strategies.group_names({"instance_groups": ["gpu"]}, None)


def test_strategies_of_the_sdk_are_left_to_it() -> None:
    assert not strategies.is_ours({"torch_distributed": {"enabled": True}})
    assert not strategies.is_ours({"mpi": {"enabled": True}})
    assert strategies.is_ours({"mpi": {"enabled": True}}, process_mode=True)
    assert not strategies.is_ours(None)


@pytest.mark.parametrize("process_mode", [False, True])
def test_version_2_of_the_library_is_recognized_before_its_launcher(process_mode: bool) -> None:
    parameters = {"hybrid_shard_degree": 8, "sm_activation_offloading": True}
    distribution = {
        "torch_distributed": {"enabled": True},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
    }
    read(distribution, instance_type=None, hosts=8, process_mode=process_mode)
    distribution["smdistributed"]["modelparallel"]["parameters"] = {"ddp": True}
    with pytest.raises(ConfigError, match=r"'ddp': it belongs to version 1 .*in place of \"torch_distributed\""):
        read(distribution, instance_type=None, hosts=1, process_mode=process_mode)
    by_mpi = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
        "mpi": {"enabled": True, "processes_per_host": 8},
    }
    with pytest.raises(ConfigError, match=r"'hybrid_shard_degree': it belongs to version 2 .*\"torch_distributed\""):
        read(by_mpi, instance_type=None, hosts=1, process_mode=process_mode)


def test_degrees_that_do_not_fit_have_the_code_of_these() -> None:
    for degree in (3, 16):
        with pytest.raises(ConfigError, match="one model replica takes") as caught:
            read(model_parallel(8, tensor_parallel_degree=degree, ddp=True), process_mode=False)
        assert caught.value.code == "SMP102"
