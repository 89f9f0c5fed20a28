"""In the cloud the estimator is the SDK's, with our hyperparameters; moto plays the service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from estimator.fakes import FAKE_BOOTSTRAP, model_parallel
from moto import mock_aws

from smp_config import ConfigError
from smp_estimator import ProcessSession, SMPEstimator

ROLE = "arn:aws:iam::123456789012:role/service-role/me"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/smp:1"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    from sagemaker.session import Session

    config = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
    monkeypatch.setattr("sagemaker.session.time.sleep", lambda _: None)  # its polls of a job that is done
    with mock_aws():
        boto = boto3.Session(region_name="us-east-1")
        boto.client("s3").create_bucket(Bucket="bucket")
        yield Session(boto_session=boto, default_bucket="bucket", sagemaker_config=config)


@pytest.fixture
def requests(cloud: Any) -> list[dict[str, Any]]:
    """Every CreateTrainingJob request."""
    seen: list[dict[str, Any]] = []
    events = cloud.sagemaker_client.meta.events
    events.register("provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: seen.append(dict(params)))
    return seen


def estimator(cloud: Any, script: Path, **arguments: Any) -> SMPEstimator:
    given: dict[str, Any] = {
        "entry_point": "train.py",
        "source_dir": str(script),
        "role": ROLE,
        "image_uri": IMAGE,
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 2,
        "sagemaker_session": cloud,
        **arguments,
    }
    return SMPEstimator(**given)


def test_request_carries_the_distribution(cloud: Any, requests: list[dict[str, Any]], script: Path) -> None:
    job = estimator(
        cloud,
        script,
        distribution=model_parallel(8, partitions=4, ddp=True, placement_strategy="PTD"),
        hyperparameters={"steps": 10},
        use_spot_instances=True,
        max_wait=90000,
        checkpoint_s3_uri="s3://bucket/checkpoints",
    )
    job.fit({"train": "s3://bucket/data"}, wait=False)
    sent = requests[0]
    carried = {name: json.loads(value) for name, value in sent["HyperParameters"].items()}
    assert carried["mp_parameters"] == {
        "partitions": 4,
        "pipeline_parallel_degree": 4,
        "ddp": True,
        "placement_strategy": "PTD",
    }
    assert carried["sagemaker_mpi_num_of_processes_per_host"] == 8
    assert carried["sagemaker_instance_type"] == "ml.p4d.24xlarge"
    assert carried["sagemaker_program"] == "train.py"
    assert carried["steps"] == 10
    assert sent["AlgorithmSpecification"]["TrainingImage"] == IMAGE
    assert sent["EnableManagedSpotTraining"] is True
    assert sent["CheckpointConfig"] == {"S3Uri": "s3://bucket/checkpoints"}
    assert sent["RoleArn"] == ROLE


def test_attach_restores_the_distribution(cloud: Any, script: Path) -> None:
    job = estimator(
        cloud,
        script,
        distribution=model_parallel(8, partitions=2, ddp=True),
        output_kms_key="key",
        hyperparameters={"steps": 10},
    )
    job.fit(wait=False)
    attached = SMPEstimator.attach(job.latest_training_job.name, sagemaker_session=cloud)
    parameters = attached.distribution["smdistributed"]["modelparallel"]["parameters"]
    assert parameters["pipeline_parallel_degree"] == 2
    assert attached.distribution["mpi"]["processes_per_host"] == 8
    assert attached._hyperparameters["steps"] == 10
    assert not [name for name in attached._hyperparameters if "mpi" in name or name == "mp_parameters"]


@pytest.mark.parametrize(
    "distribution",
    [{"torch_distributed": {"enabled": True}}, {"mpi": {"enabled": True, "processes_per_host": 2}}, None],
)
def test_other_strategies_are_the_sdk_s(cloud: Any, script: Path, distribution: Any) -> None:
    from sagemaker.pytorch import PyTorch

    arguments: dict[str, Any] = {
        "entry_point": "train.py",
        "source_dir": str(script),
        "role": ROLE,
        "framework_version": "2.0.1",
        "py_version": "py310",
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 1,
        "sagemaker_session": cloud,
        "distribution": distribution,
        "hyperparameters": {"steps": 10},
    }
    ours, stock = SMPEstimator(**arguments), PyTorch(**arguments)
    assert ours.hyperparameters() == stock.hyperparameters()
    assert ours.training_image_uri() == stock.training_image_uri()


def test_errors_are_found_before_anything_is_sent(cloud: Any, requests: list[dict[str, Any]], script: Path) -> None:
    with pytest.raises(ConfigError, match="more than the 16 processes"):
        estimator(cloud, script, distribution=model_parallel(8, partitions=32))
    job = estimator(cloud, script, distribution=model_parallel(8, partitions=2, ddp=True))
    job.distribution["mpi"]["processes_per_host"] = 9
    with pytest.raises(ConfigError, match="processes_per_host is 9"):
        job.fit("s3://bucket/data", wait=False)
    job = estimator(cloud, script, entry_point="trian.py")
    with pytest.raises(ConfigError, match=r"did you mean 'train\.py'"):
        job.fit(wait=False)
    assert not requests


def test_instance_groups(cloud: Any, requests: list[dict[str, Any]], script: Path) -> None:
    from sagemaker.instance_group import InstanceGroup

    group = InstanceGroup("gpu", "ml.p4d.24xlarge", 2)
    job = estimator(
        cloud,
        script,
        instance_type=None,
        instance_count=None,
        instance_groups=[group],
        distribution={**model_parallel(8, partitions=2, ddp=True), "instance_groups": [group]},
    )
    job.fit(wait=False)
    carried = {name: json.loads(value) for name, value in requests[0]["HyperParameters"].items()}
    assert carried["sagemaker_distribution_instance_groups"] == ["gpu"]
    assert carried["sagemaker_instance_type"] == "ml.p4d.24xlarge"


def test_an_image_keeps_docker(script: Path, cloud: Any) -> None:
    from sagemaker.local import LocalSession

    job = estimator(cloud, script, instance_type="local", sagemaker_session=LocalSession(cloud.boto_session))
    assert not isinstance(job.sagemaker_session, ProcessSession)
    assert job.training_image_uri() == IMAGE


def test_s3_input_and_output_of_a_process_job(cloud: Any, script: Path, tmp_path: Path) -> None:
    s3 = cloud.boto_session.client("s3")
    s3.put_object(Bucket="bucket", Key="data/part/a.txt", Body=b"a")
    session = ProcessSession(root=tmp_path, keep=True, launcher=FAKE_BOOTSTRAP, boto_session=cloud.boto_session)
    job = estimator(
        None, script, instance_type="local", image_uri=None, sagemaker_session=session, output_path="s3://bucket/models"
    )
    job.fit({"train": "s3://bucket/data"}, logs=False)
    name = job.latest_training_job.name
    assert job.model_data == f"s3://bucket/models/{name}/model.tar.gz"
    assert s3.head_object(Bucket="bucket", Key=f"models/{name}/model.tar.gz")["ContentLength"] > 100
    assert (tmp_path / name / "algo-1/opt/ml/input/data/train/part/a.txt").read_text() == "a"
