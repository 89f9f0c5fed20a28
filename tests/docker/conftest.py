"""Stock SageMaker local mode against the real image, with dummy credentials and an S3 of its own.

``SMP_TEST_IMAGE`` names the image (``make test-docker`` sets it). Containers and networks of a job are removed by id.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.docker_client import (
    ACCESS_KEY,
    BUCKET,
    IMAGE_VARIABLE,
    NETWORK,
    REGION,
    SECRET_KEY,
    Containers,
    docker,
)
from support.platform.jobs import ENTRYPOINTS, TINY, model_parallel, some_text


@pytest.fixture(scope="module", autouse=True)  # no other folder is to read this configuration
def _no_telemetry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The SDK would report every fit() to its makers, which costs seconds where nobody answers."""
    config = tmp_path_factory.mktemp("sdk") / "config.yaml"
    config.write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(config))
        yield


@pytest.fixture(scope="session")
def image() -> str:
    """The image under test."""
    name = os.environ.get(IMAGE_VARIABLE)
    if not name:
        pytest.skip(f"{IMAGE_VARIABLE} is not set; make test-docker builds the image and runs these tests")
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode:
        pytest.fail(f"there is no image {name!r}, or no Docker daemon: run make image")
    return name


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with about half a megabyte of real text."""
    return some_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def gateway(image: str) -> str:
    """This machine's address, as containers see it."""
    config = json.loads(docker("network", "inspect", "bridge"))[0]["IPAM"]["Config"][0]
    return config.get("Gateway") or str(next(ipaddress.ip_network(config["Subnet"]).hosts()))


@pytest.fixture(scope="session")
def s3_endpoint(gateway: str) -> Iterator[str]:
    """An S3 that both this process and containers reach."""
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address=gateway, port=0)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://{gateway}:{port}"
    server.stop()


@pytest.fixture(scope="session", autouse=True)
def _no_network_left() -> Iterator[None]:
    before = _network_id()
    yield
    after = _network_id()
    if after and after != before and not json.loads(docker("network", "inspect", after))[0]["Containers"]:
        docker("network", "rm", after)


def _network_id() -> str:
    try:
        return docker("network", "ls", "--no-trunc", "-qf", f"name=^{NETWORK}$", check=False)
    except OSError:
        return ""


@pytest.fixture
def containers(tmp_path: Path, image: str) -> Iterator[Containers]:
    made = Containers(tmp_path)
    yield made
    made.collect()
    made.remove()


@pytest.fixture
def local_job(image: str, text: Path, tmp_path: Path, containers: Containers) -> Callable[..., Any]:
    """``local_job(hosts, …)``: a stock PyTorch estimator (or one of ``kind``) in local mode, not started yet."""
    import boto3
    from sagemaker.local import LocalSession
    from sagemaker.pytorch import PyTorch

    def make(
        hosts: int = 1,
        processes: int = 2,
        entry_point: str = "train_gpt.py",
        source_dir: str = str(ENTRYPOINTS),
        endpoint: str | None = None,
        kind: Any = PyTorch,
        parameters: dict[str, Any] | None = None,
        **hyperparameters: Any,
    ) -> Any:
        session = LocalSession(
            boto3.Session(ACCESS_KEY, SECRET_KEY, region_name=REGION), s3_endpoint_url=endpoint, default_bucket=BUCKET
        )
        session.config = {"local": {"local_code": endpoint is None, "container_root": str(tmp_path)}}
        output = f"s3://{BUCKET}/output" if endpoint else f"file://{tmp_path / 'out'}"
        return kind(
            entry_point=entry_point,
            source_dir=source_dir,
            role="arn:aws:iam::123456789012:role/dummy",
            image_uri=image,
            instance_type="local",
            instance_count=hosts,
            sagemaker_session=session,
            output_path=output,
            code_location=output if endpoint else None,
            hyperparameters={**TINY, **hyperparameters},
            environment={"AWS_EC2_METADATA_DISABLED": "true", "OMP_NUM_THREADS": "1"},
            distribution=model_parallel(processes, **{"ddp": True, "microbatches": 2, **(parameters or {})}),
            disable_profiler=True,
            debugger_hook_config=False,
        )

    return make


@pytest.fixture
def network(containers: Containers) -> str:
    """A network of its own, removed after the test's containers; gives its id."""
    identity = docker("network", "create", f"smp-test-{uuid.uuid4().hex[:12]}")
    containers.networks.append(identity)
    return identity
