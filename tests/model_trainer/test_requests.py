"""``train()`` in the cloud, which moto plays: what is sent, what travels with it, and what is shown of the job."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import IMAGE, ROLE
from support.platform.sdk3 import require_sdk_3, trainer

require_sdk_3()

from sagemaker.core.inputs import TrainingInput  # noqa: E402 - only where it is installed
from sagemaker.core.parameter import ContinuousParameter  # noqa: E402
from sagemaker.core.training.configs import CheckpointConfig, InputData, StoppingCondition, Tag  # noqa: E402
from sagemaker.core.utils.exceptions import FailedStatusError  # noqa: E402
from sagemaker.train.distributed import Torchrun  # noqa: E402
from sagemaker.train.model_trainer import ModelTrainer as StockModelTrainer  # noqa: E402
from sagemaker.train.tuner import HyperparameterTuner  # noqa: E402

from smp_config import ConfigError  # noqa: E402
from smp_estimator.cloud import image_table, images  # noqa: E402
from smp_estimator.model_trainer import ModelParallel, ModelTrainer  # noqa: E402
from smp_estimator.sdk.functions import config_for_framework  # noqa: E402

PARALLEL = {"parameters": {"partitions": 4, "ddp": True, "placement_strategy": "PTD"}, "processes_per_host": 8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_estimator.cloud.log.POLL_SECONDS", 0.02)


def carried(request: dict[str, Any]) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in request["HyperParameters"].items()}


def keys(cloud: Any, address: str) -> dict[str, Any]:
    """What lies under an address, by the last part of its name."""
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    found = cloud.boto.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
    return {row["Key"].removeprefix(prefix).lstrip("/"): row["Key"] for row in found}


def channel(request: dict[str, Any], name: str) -> str:
    return next(
        row["DataSource"]["S3DataSource"]["S3Uri"] for row in request["InputDataConfig"] if row["ChannelName"] == name
    )


def test_the_request_carries_what_that_of_an_estimator_does(cloud: Any, script: Path) -> None:
    made = trainer(
        script,
        sagemaker_session=cloud.session,
        parallel=PARALLEL,
        hyperparameters={"steps": 10},
        tags=[Tag(key="team", value="nlp")],
        environment={"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192"},
        checkpoint_config=CheckpointConfig(s3_uri="s3://bucket/checkpoints"),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=3600, max_wait_time_in_seconds=7200),
        compute={"enable_managed_spot_training": True, "keep_alive_period_in_seconds": None},
    )
    made.train({"train": "s3://bucket/data"}, wait=False)
    (sent,) = cloud.requests
    assert carried(sent) == {
        "steps": 10,
        "mp_parameters": {
            "partitions": 4,
            "pipeline_parallel_degree": 4,
            "ddp": True,
            "placement_strategy": "PTD",
        },
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 8,
        "sagemaker_mpi_custom_mpi_options": "-x FI_PROVIDER=efa -x NCCL_PROTO=simple -x FI_EFA_USE_DEVICE_RDMA=1 "
        "-x SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192",
        "sagemaker_distributed_dataparallel_enabled": False,
        "sagemaker_instance_type": "ml.p4d.24xlarge",
    }
    assert sent["RoleArn"] == ROLE
    assert sent["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert sent["Tags"] == [{"Key": "team", "Value": "nlp"}]
    assert sent["CheckpointConfig"] == {"S3Uri": "s3://bucket/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    assert sent["EnableManagedSpotTraining"] is True
    assert sent["ResourceConfig"]["InstanceCount"] == 2
    assert channel(sent, "train") == "s3://bucket/data"
    assert {row["Name"] for row in sent["AlgorithmSpecification"]["MetricDefinitions"]} >= {"loss", "step"}
    assert made.environment == {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192"}, "as it was given"


def test_the_shell_that_is_told_to_stop_is_the_one_that_passes_it_on(cloud: Any, script: Path) -> None:
    trainer(script, sagemaker_session=cloud.session).train(wait=False)
    specification = cloud.requests[0]["AlgorithmSpecification"]
    assert specification["ContainerEntrypoint"] == ["/bin/bash"]
    drivers = "/opt/ml/input/data/sm_drivers"
    assert specification["ContainerArguments"] == [
        "-c",
        f"chmod +x {drivers}/sm_train.sh && exec {drivers}/sm_train.sh",
    ]


@pytest.mark.parametrize("kind", [ModelTrainer, StockModelTrainer], ids=["own", "stock"])
def test_what_travels(kind: Any, cloud: Any, script: Path) -> None:
    made = trainer(script, sagemaker_session=cloud.session, parallel=PARALLEL)
    if kind is StockModelTrainer:
        given = {"compute": made.compute, "source_code": made.source_code, "distributed": ModelParallel(**PARALLEL)}
        made = kind(training_image=IMAGE, role=ROLE, sagemaker_session=cloud.session, **given)
    made.train(wait=False)
    (sent,) = cloud.requests
    held = keys(cloud, channel(sent, "sm_drivers"))
    assert {
        "sm_train.sh",
        "distributed_drivers/smp_driver.py",
        "distributed_drivers/smp_entry.py",
        "distributed_drivers/forward_signals.sh",
        "distributed_drivers/smp_requirements.txt",
    } < held.keys()
    assert any(name.startswith("distributed_drivers/smp_estimator-") for name in held)
    assert set(keys(cloud, channel(sent, "code"))) == {"train.py", "helper.py"}
    s3 = cloud.boto.client("s3")
    config = json.loads(s3.get_object(Bucket="bucket", Key=held["distributed.json"])["Body"].read())
    assert config == ModelParallel(**PARALLEL).model_dump()
    text = s3.get_object(Bucket="bucket", Key=held["sm_train.sh"])["Body"].read().decode()
    assert "distributed_drivers/smp_driver.py & . /opt/ml/input/data/sm_drivers/distributed_drivers/forward_" in text


def test_channels_in_every_form(cloud: Any, script: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    made = trainer(script, sagemaker_session=cloud.session)
    for given in (
        {"train": "s3://bucket/t"},
        [InputData(channel_name="train", data_source="s3://bucket/t")],
        InputData(channel_name="train", data_source="s3://bucket/t"),
        {"train": TrainingInput("s3://bucket/t")},
    ):
        cloud.requests.clear()
        made.train(given, wait=False)
        assert channel(cloud.requests[0], "train") == "s3://bucket/t"
    made.train("s3://bucket/u", wait=False)
    assert channel(cloud.requests[-1], "training") == "s3://bucket/u"
    made.train({"train": f"file://{tmp_path / 'data'}"}, wait=False)
    assert list(keys(cloud, channel(cloud.requests[-1], "train"))) == ["a.txt"]


def test_the_newest_stock_image(cloud: Any, script: Path) -> None:
    made = trainer(script, sagemaker_session=cloud.session, training_image=None)
    registry, _, name = made.training_image.rpartition("/")
    assert re.fullmatch(r"\d{12}\.dkr\.ecr\.us-east-1\.amazonaws\.com", registry)
    newest = max(config_for_framework("pytorch-amzn2023")["training"]["versions"], key=images.version_numbers)
    assert re.fullmatch(rf"pytorch:{newest}-cu\d+-amzn2023-sagemaker", name)
    assert images.is_stock(made.training_image)


def test_a_stock_image_for_older_gpus(cloud: Any, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    compute = {"instance_type": "ml.p3.16xlarge"}
    with caplog.at_level(logging.WARNING, logger="smp_estimator"):
        made = trainer(script, sagemaker_session=cloud.session, training_image=None, compute=compute)
    assert made.training_image.endswith("/pytorch-training:2.8.0-gpu-py312"), "CUDA 13 has no code for V100"
    said = [record.getMessage() for record in caplog.records if "patched" in record.getMessage()]
    assert len(said) == 1, said
    assert "no stock image with code for V100 GPUs that is known here is still patched" in said[0]


def test_an_image_that_is_no_longer_patched(cloud: Any, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = trainer(script, sagemaker_session=cloud.session, training_image=None).training_image.rpartition("/")[0]
    for name, warned in (("pytorch-training:2.9.0-gpu-py312", 1), ("pytorch:2.13-cu133-amzn2023-sagemaker", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="smp_estimator"):
            trainer(script, sagemaker_session=cloud.session, training_image=f"{registry}/{name}")
        said = [record.getMessage() for record in caplog.records if "patched" in record.getMessage()]
        assert len(said) == warned, said
        assert all("leave training_image out" in sentence for sentence in said), said


def test_the_table_has_what_the_sdk_says_of_the_newer_repository() -> None:
    """The floor of the extra, and whatever newer version is installed; an image that the table lacks is taken from the SDK."""
    told = config_for_framework("pytorch-amzn2023")["training"]["versions"]
    assert {"2.11", "2.12", "2.13", "2.14"} <= told.keys()
    for version, said in told.items():
        for processor, row in image_table.rows_of(version).items():
            assert row.repository == said["repository"]
            assert row.tag == f"{said['tag_prefix']}-{said['container_version'][processor]}"
            assert not row.regions_without & said["registries"].keys()


def test_other_configurations_are_the_sdk_s_business(cloud: Any, script: Path) -> None:
    made = trainer(script, sagemaker_session=cloud.session, parallel=Torchrun(process_count_per_node=8))
    made.train(wait=False)
    assert "mp_parameters" not in cloud.requests[0].get("HyperParameters", {})
    assert "exec" not in cloud.requests[0]["AlgorithmSpecification"]["ContainerArguments"][1]


def test_the_log_of_all_hosts_and_the_progress(
    cloud: Any, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(script, sagemaker_session=cloud.session)
    made.train(wait=False)
    name = made.latest_training_job.training_job_name
    cloud.write(f"{name}/algo-1-1", "hello", 'smp-progress {"step":2,"total_steps":4,"loss":1.5}')
    cloud.write(f"{name}/algo-2-1", "world")
    made._watch(True)
    said = capsys.readouterr().out
    assert "[algo-1] hello" in said
    assert "[algo-2] world" in said
    assert "step 2/4" in said
    assert "smp-progress" not in said
    assert made.model_data.endswith("/output/model.tar.gz")


def test_a_failed_job_says_why(cloud: Any, script: Path) -> None:
    made = trainer(script, sagemaker_session=cloud.session)
    made.train(wait=False)
    cloud.set_status(made.latest_training_job.training_job_name, "Failed", reason="rank 3 (algo-2): ValueError: boom")
    for logs in (True, False):
        with pytest.raises(FailedStatusError, match=r"Failure Reason: rank 3 \(algo-2\): ValueError: boom"):
            made._watch(logs)


def test_a_bucket_in_another_region_is_said(cloud: Any, script: Path, caplog: pytest.LogCaptureFixture) -> None:
    s3 = cloud.boto.client("s3", region_name="eu-west-1")
    s3.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    made = trainer(script, sagemaker_session=cloud.session, checkpoint_config=CheckpointConfig(s3_uri="s3://far/c"))
    with caplog.at_level(logging.WARNING, logger="smp_estimator"):
        made.train({"train": "s3://far/t", "test": TrainingInput("s3://far/u"), "near": "s3://bucket/v"}, wait=False)
    said = [record.getMessage() for record in caplog.records if "eu-west-1" in record.getMessage()]
    assert [sentence.split(" (")[0] for sentence in said] == [
        "channel 'train'",
        "channel 'test'",
        "checkpoint_config.s3_uri",
    ]


def test_a_dry_run_sends_nothing(cloud: Any, script: Path) -> None:
    trainer(script, sagemaker_session=cloud.session).train({"train": "s3://bucket/t"}, dry_run=True)
    assert not cloud.requests


def test_a_pipeline_gets_the_same_request(cloud: Any, script: Path) -> None:
    from sagemaker.core.workflow.pipeline_context import PipelineSession
    from sagemaker.mlops.workflow.steps import TrainingStep

    session = PipelineSession(boto_session=cloud.boto, default_bucket="bucket")
    made = trainer(script, sagemaker_session=session, parallel=PARALLEL)
    step = TrainingStep(name="train", step_args=made.train({"train": "s3://bucket/t"}))
    request = step.arguments
    assert json.loads(request["HyperParameters"]["mp_parameters"])["partitions"] == 4
    assert "exec" in request["AlgorithmSpecification"]["ContainerArguments"][1]
    assert not cloud.requests


def test_what_only_a_pipeline_knows(cloud: Any, script: Path) -> None:
    from sagemaker.core.workflow.parameters import ParameterInteger, ParameterString
    from sagemaker.core.workflow.pipeline_context import PipelineSession
    from sagemaker.mlops.workflow.steps import TrainingStep

    session = PipelineSession(boto_session=cloud.boto, default_bucket="bucket")
    compute = {
        "instance_type": ParameterString(name="Type", default_value="ml.p4d.24xlarge"),
        "instance_count": ParameterInteger(name="Hosts", default_value=2),
    }
    steps = ParameterInteger(name="Steps", default_value=3)
    made = trainer(script, sagemaker_session=session, compute=compute, hyperparameters={"steps": steps})
    request = TrainingStep(name="train", step_args=made.train()).arguments
    assert request["ResourceConfig"]["InstanceCount"] is compute["instance_count"]
    assert "sagemaker_instance_type" not in request["HyperParameters"], "the container knows it"


def test_what_a_defaults_file_has_is_sent_with_what_is_added(
    cloud: Any, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    defaults = {"Environment": {"HTTPS_PROXY": "http://proxy:3128"}, "EnableNetworkIsolation": True}
    config = {**cloud.session.sagemaker_config}
    config["SageMaker"] = {**config["SageMaker"], "TrainingJob": defaults}
    monkeypatch.setattr(cloud.session, "sagemaker_config", config)
    options = "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384"
    made = trainer(
        script,
        sagemaker_session=cloud.session,
        parallel={**PARALLEL, "custom_mpi_options": options},
        training_image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker",
    )
    made.train(wait=False)
    sent = cloud.requests[-1]
    assert sent["Environment"] == {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384", **defaults["Environment"]}
    assert sent["EnableNetworkIsolation"] is True
    assert "networking.enable_network_isolation is True" in caplog.text


@pytest.mark.parametrize("stock", [False, True])
def test_a_tuner_whose_jobs_would_train_without_the_library_is_refused(cloud: Any, script: Path, stock: bool) -> None:
    made = trainer(
        script, sagemaker_session=cloud.session, parallel=PARALLEL, kind=StockModelTrainer if stock else ModelTrainer
    )
    tuner = HyperparameterTuner(
        made, "loss", {"lr": ContinuousParameter(0.1, 0.2)}, [{"Name": "loss", "Regex": "loss=(.*)"}]
    )
    with pytest.raises(
        ConfigError, match=r"HyperparameterTuner .* would train without ModelParallel: call .*train\(\)"
    ):
        tuner.tune(wait=False)
    assert not cloud.requests


def preferring(*kinds: str, **more: Any) -> dict[str, Any]:
    """``compute`` with two instances of each of some types."""
    from sagemaker.core.shapes import InstancePreference

    preferences = [InstancePreference(instance_type=kind, instance_count=2) for kind in kinds]
    return {"instance_type": None, "instance_count": None, "instance_preferences": preferences, **more}


SIXTEEN = {"parameters": {"pipeline_parallel_degree": 16, "microbatches": 16, "ddp": True}, "processes_per_host": 8}


def test_each_preferred_instance_is_checked_with_its_own_count(cloud: Any, script: Path) -> None:
    both = preferring("ml.p4d.24xlarge", "ml.p5.48xlarge")
    made = trainer(script, sagemaker_session=cloud.session, compute=both, parallel=SIXTEEN)
    made.train(wait=False)
    assert len(cloud.requests[-1]["ResourceConfig"]["InstancePreferences"]) == 2
    assert "FI_PROVIDER=efa" in carried(cloud.requests[-1])["sagemaker_mpi_custom_mpi_options"]
    assert "sagemaker_instance_type" not in carried(cloud.requests[-1])
    with pytest.raises(ConfigError, match=r"compute\.instance_preferences\[1\] \(ml\.p3\.8xlarge\): .*8.*4"):
        trainer(script, compute=preferring("ml.p4d.24xlarge", "ml.p3.8xlarge"), parallel=SIXTEEN)
    more = {**SIXTEEN["parameters"], "tensor_parallel_degree": 2}
    with pytest.raises(ConfigError, match=r"compute\.instance_preferences\[0\] \(ml\.p4d\.24xlarge\): .*16"):
        trainer(script, compute=both, parallel={**SIXTEEN, "parameters": more})
    mixed = preferring("ml.p4d.24xlarge", "ml.p3.8xlarge")
    with pytest.raises(
        ConfigError, match=r"processes_per_host is left out, and compute\.instance_preferences have diff"
    ):
        trainer(script, compute=mixed, parallel={"parameters": {"ddp": True}})
    with pytest.raises(ConfigError, match=r"compute\.instance_preferences\[1\] \(p5\): "):
        trainer(script, compute=preferring("ml.p4d.24xlarge", "p5"), parallel=SIXTEEN)


def test_what_only_some_preferred_instances_need_is_said(
    cloud: Any, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = preferring("ml.p4d.24xlarge", "ml.p3.16xlarge")
    trainer(script, sagemaker_session=cloud.session, compute=mixed, parallel=SIXTEEN).train(wait=False)
    assert "FI_PROVIDER" not in carried(cloud.requests[-1])["sagemaker_mpi_custom_mpi_options"]
    assert (
        "compute.instance_preferences differ in what their networks need, and FI_EFA_USE_DEVICE_RDMA, FI" in caplog.text
    )


def test_preferred_instances_choose_a_stock_image(cloud: Any, script: Path) -> None:
    both = preferring("ml.p4d.24xlarge", "ml.p5.48xlarge")
    made = trainer(script, sagemaker_session=cloud.session, compute=both, parallel=SIXTEEN, training_image=None)
    assert made.training_image.startswith("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch")


def test_instance_groups_of_other_configurations_are_the_sdk_s_business(cloud: Any, script: Path) -> None:
    from sagemaker.core.shapes import InstanceGroup

    kinds = [("one", "ml.p4d.24xlarge"), ("two", "ml.g5.48xlarge")]
    groups = [InstanceGroup(instance_group_name=n, instance_type=kind, instance_count=1) for n, kind in kinds]
    compute = {"instance_type": None, "instance_count": None, "instance_groups": groups}
    for kind in (ModelTrainer, StockModelTrainer):
        trainer(script, sagemaker_session=cloud.session, compute=compute, parallel=Torchrun(), kind=kind).train(
            wait=False
        )
    ours, theirs = ({k: v for k, v in r.items() if k in ("ResourceConfig", "HyperParameters")} for r in cloud.requests)
    assert ours == theirs
