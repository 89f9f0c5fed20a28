"""Estimators of the public notebooks of version 2: the service gets their jobs, in stock images of PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker.inputs import FileSystemInput
from support.platform.cloud import Cloud, service
from support.training.version2_notebooks import NOTEBOOKS, NotebookJob

from smp_config import ConfigError
from smp_estimator import SMPHuggingFace
from smp_estimator.cloud.image_choice import stock_version_for_original
from smp_estimator.sdk.functions import config_for_framework

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def arguments(notebook: NotebookJob, script: Path) -> dict[str, Any]:
    given: dict[str, Any] = {
        "image_uri": None,
        "source_dir": f"{script.parent}/{script.name}/../{script.name}",  # beside the notebook's folder
        "distribution": distribution(notebook.parameters),
        "instance_type": notebook.gpus,
        "instance_count": notebook.hosts,
        "framework_version": notebook.framework_version,
        "py_version": "py311",
        "volume_size": 400,
        "max_run": 86400,
        "debugger_hook_config": False,
        "hyperparameters": notebook.hyperparameters,
    }
    if notebook.on_file_system:
        where = {"checkpoint_local_path": "/opt/ml/input/data/train/checkpointdir", "subnets": ["subnet-1"]}
        return {**given, **where, "security_group_ids": ["sg-1"]}
    return {**given, "checkpoint_s3_uri": "s3://bucket/checkpoints"}


def distribution(parameters: dict[str, Any]) -> dict[str, Any]:
    model = {"enabled": True, "parameters": parameters}
    return {"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": model}}


def channels(notebook: NotebookJob) -> dict[str, Any]:
    if not notebook.on_file_system:
        return {"train": "s3://bucket/train", "test": "s3://bucket/test"}
    lustre = FileSystemInput("fs-0123456789abcdef0", "FSxLustre", "/base", file_system_access_mode="rw")
    return {"train": lustre, "test": lustre}


@each_notebook
def test_the_service_accepts_the_job(
    notebook: NotebookJob, cloud: Cloud, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = cloud.estimator(script, **arguments(notebook, script))
    job.fit(channels(notebook), wait=False)
    sent, carried = cloud.requests[-1], cloud.carried()
    assert sent["AlgorithmSpecification"]["TrainingImage"].endswith("/pytorch-training:2.4.0-gpu-py311")
    assert f"framework_version is {notebook.framework_version}, whose image has the original" in caplog.text
    resources = sent["ResourceConfig"]
    assert (resources["InstanceType"], resources["InstanceCount"]) == (notebook.gpus, notebook.hosts)
    assert carried["mp_parameters"] == notebook.parameters
    assert carried["sagemaker_torch_distributed_enabled"] is True
    assert {name: carried[name] for name in notebook.hyperparameters} == notebook.hyperparameters
    assert [row["ChannelName"] for row in sent["InputDataConfig"]] == ["train", "test"]
    assert job.distribution == distribution(notebook.parameters), "the SDK's look for an image leaves it as it is"


@pytest.mark.parametrize("version", [None, "2.4.0", "2.5.1", "2.14"])
def test_no_version_chooses_the_original_s_image(cloud: Cloud, script: Path, version: str | None) -> None:
    given = arguments(NOTEBOOKS[1], script) | {"framework_version": version, "py_version": None}
    cloud.estimator(script, **given).fit(wait=False)
    image = cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"].rpartition("/")[2]
    assert image.startswith(("pytorch-training:", "pytorch:"))
    assert version is None or f":{version}-" in image


def test_the_hugging_face_estimator_has_its_own_image(cloud: Cloud, script: Path) -> None:
    given = arguments(NOTEBOOKS[1], script)
    for name in ("image_uri", "framework_version", "py_version"):
        del given[name]
    given["source_dir"] = str(script)
    from support.platform.cloud import ROLE

    SMPHuggingFace(entry_point="train.py", role=ROLE, sagemaker_session=cloud.session, **given).fit(wait=False)
    image = cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"]
    assert "/huggingface-pytorch-training:" in image, image


def test_versions_of_the_original_have_a_stock_image_nearby() -> None:
    of_original = config_for_framework("pytorch-smp")["training"]["version_aliases"]
    found = {version: stock_version_for_original(version) for version in of_original}
    assert {version for version, stock in found.items() if stock is None} == {"2.5.1"}, "a stock image has it too"
    assert {stock for stock in found.values() if stock} == {"2.4.0"}
    assert stock_version_for_original("1.13.1") is None
    assert stock_version_for_original(None) is None


def test_version_1_still_refuses_them(cloud: Cloud, script: Path) -> None:
    given = arguments(NOTEBOOKS[1], script)
    given["distribution"] = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"ddp": True}}},
        "mpi": {"enabled": True, "processes_per_host": 8},
    }
    with pytest.raises(ConfigError, match=r"framework_version is 2\.4\.1, and no training image"):
        cloud.estimator(script, **given)


def test_a_source_dir_with_dots_holds_its_script(cloud: Cloud, script: Path) -> None:
    given = arguments(NOTEBOOKS[1], script)
    cloud.estimator(script, **given).fit(wait=False)
    with pytest.raises(ConfigError, match="outside source_dir"):
        cloud.estimator(script, **given, entry_point="../other.py").fit(wait=False)
    assert json.loads(cloud.requests[-1]["HyperParameters"]["sagemaker_program"]) == "_smp_entry.py"
