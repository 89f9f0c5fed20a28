"""Strategies that are not the model parallel library's: the service gets what the SDK's own class would send."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import ROLE, Cloud, service
from support.platform.jobs import model_parallel

from smp_estimator import SMPEstimator, SMPHuggingFace

STRATEGIES: dict[str, Any] = {
    "torch_distributed": {"torch_distributed": {"enabled": True}},
    "pytorchddp": {"pytorchddp": {"enabled": True}},
    "pytorchddp with options": {"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose"}},
    "mpi": {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-verbose"}},
    "dataparallel": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "dataparallel with options": {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x A=1"}}},
    "none": None,
}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def request(cloud: Cloud, kind: Any, arguments: dict[str, Any], job_name: str) -> dict[str, Any]:
    """What the service gets; names of jobs and uploads, which differ, are made alike."""
    cloud.requests.clear()
    kind(**copy.copy(arguments)).fit({"train": "s3://bucket/data"}, wait=False, job_name=job_name)
    assert len(cloud.requests) == 1
    return _alike(cloud.requests[0], job_name)


def _alike(value: Any, job_name: str) -> Any:
    if isinstance(value, dict):
        return {key: _alike(inner, job_name) for key, inner in value.items()}
    if isinstance(value, list):
        return [_alike(inner, job_name) for inner in value]
    if isinstance(value, str):
        return re.sub(r"-\d{10,13}\b|-\d{4}(-\d\d){5}-\d{3}", "-TIME", value.replace(job_name, "JOB"))
    return value


def arguments(cloud: Cloud, script: Path, **given: Any) -> dict[str, Any]:
    return {
        "entry_point": "train.py",
        "source_dir": str(script),
        "role": ROLE,
        "instance_type": "ml.p3.16xlarge",
        "instance_count": 2,
        "sagemaker_session": cloud.session,
        "hyperparameters": {"steps": 10},
        "environment": {"A": "1"},
        **given,
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_pytorch(name: str, cloud: Cloud, script: Path) -> None:
    from sagemaker.pytorch import PyTorch

    given = arguments(cloud, script, framework_version="2.0.1", py_version="py310", distribution=STRATEGIES[name])
    ours, stock = (
        request(cloud, SMPEstimator, given, f"ours-{len(name)}"),
        request(cloud, PyTorch, given, f"stock-{len(name)}"),
    )
    assert ours.keys() == stock.keys()
    for key in stock:
        assert ours[key] == stock[key], key


@pytest.mark.parametrize("name", ["torch_distributed", "dataparallel", "mpi", "none"])
def test_huggingface(name: str, cloud: Cloud, script: Path) -> None:
    from sagemaker.huggingface import HuggingFace

    given = arguments(
        cloud,
        script,
        transformers_version="4.28.1",
        pytorch_version="2.0.0",
        py_version="py310",
        distribution=STRATEGIES[name],
    )
    ours, stock = (
        request(cloud, SMPHuggingFace, given, f"ho-{len(name)}"),
        request(cloud, HuggingFace, given, f"hs-{len(name)}"),
    )
    assert ours.keys() == stock.keys()
    for key in stock:
        assert ours[key] == stock[key], key


def test_model_parallelism_differs_only_where_it_should(cloud: Cloud, script: Path) -> None:
    """A configuration that both accept, with an image of one's own."""
    import json

    from sagemaker.pytorch import PyTorch

    given = arguments(
        cloud,
        script,
        instance_type="ml.p4d.24xlarge",
        image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/smp:1",
        distribution=model_parallel(8, pipeline_parallel_degree=2, partitions=2, ddp=True, microbatches=4),
    )
    ours, stock = request(cloud, SMPEstimator, given, "ours"), request(cloud, PyTorch, given, "stock")
    differing = {key for key in ours.keys() | stock.keys() if ours.get(key) != stock.get(key)}
    assert differing == {"HyperParameters", "AlgorithmSpecification", "DebugHookConfig"}
    assert "DebugHookConfig" not in ours
    mine, theirs = ({k: json.loads(v) for k, v in sent["HyperParameters"].items()} for sent in (ours, stock))
    assert mine.keys() == theirs.keys()
    # Beyond the user's own options, which are none here, ours have what the platform needs.
    assert [key for key in mine if mine[key] != theirs[key]] == ["sagemaker_mpi_custom_mpi_options"]
    assert theirs["sagemaker_mpi_custom_mpi_options"] == ""
    specification = {k: v for k, v in ours["AlgorithmSpecification"].items() if k != "MetricDefinitions"}
    assert specification == stock["AlgorithmSpecification"]
