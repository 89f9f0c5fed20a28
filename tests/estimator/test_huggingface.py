"""``SMPHuggingFace``: the same behaviour on the SDK's Hugging Face estimator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, service
from support.platform.jobs import model_parallel

from smp_config import ConfigError
from smp_estimator import SMPHuggingFace


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


def estimator(cloud: Cloud, script: Path, **given: Any) -> SMPHuggingFace:
    given.setdefault("distribution", model_parallel(8, partitions=2, ddp=True))
    return SMPHuggingFace(**cloud.arguments(script, **{"image_uri": None, **given}))


def test_stock_image_request_and_attach(cloud: Cloud, script: Path) -> None:
    job = estimator(cloud, script, hyperparameters={"epochs": 1})
    job.fit(wait=False)
    image = cloud.requests[-1]["AlgorithmSpecification"]["TrainingImage"]
    assert "/huggingface-pytorch-training:2." in image
    assert "-transformers4." in image
    carried = cloud.carried()
    assert carried["mp_parameters"]["partitions"] == 2
    assert carried["sagemaker_program"] == "_smp_entry.py"
    assert carried["sagemaker_mpi_custom_mpi_options"].endswith("FI_EFA_USE_DEVICE_RDMA=1")
    attached = SMPHuggingFace.attach(job.latest_training_job.name, sagemaker_session=cloud.session)
    assert isinstance(attached, SMPHuggingFace)
    assert (
        attached.distribution["smdistributed"]
        == {
            "modelparallel": {
                "enabled": True,
                "parameters": {"partitions": 2, "pipeline_parallel_degree": 2, "ddp": True},
            }
        }
        or attached.distribution["smdistributed"]["modelparallel"]["parameters"]["partitions"] == 2
    )
    assert attached._hyperparameters == {"epochs": 1}
    assert attached.pytorch_version == job.pytorch_version
    assert attached.framework_version == job.framework_version


def test_image_of_one_s_own(cloud: Cloud, script: Path) -> None:
    job = estimator(cloud, script, image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/hf:1", py_version="py310")
    job.fit(wait=False)
    assert cloud.carried()["sagemaker_program"] == "train.py"
    assert job.create_model().image_uri.endswith("/hf:1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distribution": model_parallel(9, ddp=True)}, r"processes_per_host is 9"),
        ({"transformers_version": "4.28.1", "pytorch_version": "2.0.0", "py_version": "py310"}, r"needs PyTorch 2\.4"),
        (
            {"tensorflow_version": "2.6.3", "transformers_version": "4.17.0", "py_version": "py38"},
            r"trains PyTorch models",
        ),
        ({"distribution": model_parallel(8, ddpp=True)}, r"unknown parameter 'ddpp'"),
    ],
)
def test_wrong(cloud: Cloud, script: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(cloud, script, **given)


def test_process_mode(script: Path, session: Any) -> None:
    job = SMPHuggingFace(
        entry_point="train.py",
        source_dir=str(script),
        instance_type="local",
        sagemaker_session=session,
        hyperparameters={"play": "train", "steps": 1},
        distribution=model_parallel(2, ddp=True),
    )
    job.fit(logs=False)
    assert job.model_data.endswith("model.tar.gz")
    attached = SMPHuggingFace.attach(job.latest_training_job.name)
    assert attached.distribution["mpi"]["processes_per_host"] == 2
    assert attached._hyperparameters == {"play": "train", "steps": 1}
