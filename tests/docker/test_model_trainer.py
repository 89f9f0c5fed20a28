"""``ModelTrainer`` of SDK v3 in ``LOCAL_CONTAINER`` mode: real containers, and the same losses as without Docker."""

from __future__ import annotations

import json
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.platform.docker_client import docker, logs
from support.platform.jobs import ENTRYPOINTS, TINY
from support.platform.sdk3 import require_sdk_3

require_sdk_3()

from sagemaker.core.training.configs import Compute, InputData, SourceCode  # noqa: E402 - only where it is installed
from sagemaker.core.utils.exceptions import FailedStatusError  # noqa: E402
from sagemaker.train.model_trainer import Mode  # noqa: E402
from sagemaker.train.model_trainer import ModelTrainer as StockModelTrainer  # noqa: E402

from smp_estimator.model_trainer import ModelParallel, ModelTrainer  # noqa: E402

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK looks for a session, to ask whether it may report."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


def arguments(hosts: int, parameters: dict[str, Any], source: Path = ENTRYPOINTS, script: str = "train_gpt.py") -> Any:
    return {
        "source_code": SourceCode(source_dir=str(source), entry_script=script),
        "compute": Compute(instance_type="local_cpu", instance_count=hosts),
        "distributed": ModelParallel(parameters={"ddp": True, **parameters}, processes_per_host=2),
        "hyperparameters": dict(TINY),
        "environment": {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true"},
    }


@pytest.fixture
def local_job(image: str, tmp_path: Path, containers: Any) -> Make:
    """``local_job(hosts, kind, …)``: a trainer whose jobs run in containers, not started yet."""

    def make(hosts: int = 1, kind: Any = ModelTrainer, parameters: dict[str, Any] | None = None, **code: Any) -> Any:
        (tmp_path / "root").mkdir()
        return kind(
            training_mode=Mode.LOCAL_CONTAINER,
            training_image=image,
            local_container_root=str(tmp_path / "root"),
            **arguments(hosts, {"microbatches": 2, **(parameters or {})}, **code),
        )

    return make


def losses(archive: str) -> list[float]:
    with tarfile.open(archive.removeprefix("file://")) as found:
        return json.load(found.extractfile("losses.json"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def process_losses(text: Path) -> Callable[[int], list[float]]:
    """``process_losses(hosts)``: the same job as processes of this machine."""

    def run(hosts: int) -> list[float]:
        job = ModelTrainer(**arguments(hosts, {"microbatches": 2}))
        job.train({"train": str(text)}, logs=False)
        return losses(job.model_data)

    return run


@pytest.mark.parametrize(
    ("hosts", "kind", "parameters"),
    [
        (1, ModelTrainer, {}),
        (2, ModelTrainer, {"partitions": 2, "placement_strategy": "spread"}),
        (2, StockModelTrainer, {}),
    ],
    ids=["one host", "a pipeline across two hosts", "two hosts, the SDK's own class"],
)
def test_the_same_losses(
    local_job: Make,
    text: Path,
    tmp_path: Path,
    containers: Any,
    process_losses: Any,
    hosts: int,
    kind: Any,
    parameters: Any,
) -> None:
    job = local_job(hosts, kind, parameters)
    started = time.monotonic()
    job.train([InputData(channel_name="train", data_source=str(text))])
    print(f"{hosts} host(s): train() {time.monotonic() - started:.1f} s")
    archive = f"{tmp_path / 'root'}/compressed_artifacts/model.tar.gz"
    assert losses(archive) == pytest.approx(process_losses(hosts), abs=1e-5)
    if kind is ModelTrainer:
        assert job.model_data == f"file://{archive}"
    containers.collect()
    assert containers.exit_codes() == [0] * hosts


def test_an_image_with_the_runtime_needs_none_to_travel(
    local_job: Make, text: Path, tmp_path: Path, containers: Any, process_losses: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    job = local_job(1)
    job.distributed.ship_runtime = False
    job.train({"train": str(text)})
    assert losses(job.model_data) == pytest.approx(process_losses(1), abs=1e-5)
    assert "the job brought its own" not in capfd.readouterr().out


@pytest.mark.parametrize("kind", [ModelTrainer, StockModelTrainer], ids=["own", "stock"])
def test_docker_stop_leaves_what_the_ranks_save(local_job: Make, tmp_path: Path, containers: Any, kind: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    open(os.environ['SM_MODEL_DIR'] + '/saved-' + os.environ['SMP_RANK'], 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('is ready', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    job = local_job(2, kind, source=source, script="train.py")
    thread = threading.Thread(target=job.train)
    thread.start()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        containers.collect()
        if len(containers.ids) == 2 and logs(containers.ids[0]).count("is ready") == 4:
            break
        time.sleep(0.5)
    else:
        raise AssertionError("the ranks did not start")
    docker("stop", "--time", "60", *containers.ids)
    thread.join(60)
    assert containers.exit_codes() == [0, 0]
    saved = {path.name for path in (tmp_path / "root" / "artifacts" / "model").iterdir()}
    assert saved == {f"saved-{rank}" for rank in range(4)}


def test_the_message_of_a_failing_rank_reaches_train(local_job: Make, tmp_path: Path, containers: Any) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(
        "import os, time\n"
        "if os.environ['SMP_RANK'] == '3': raise RuntimeError('the rank that fails on purpose')\n"
        "time.sleep(60)\n"
    )
    job = local_job(2, source=source, script="train.py")
    with pytest.raises(FailedStatusError) as caught:
        job.train()
    message = str(caught.value)
    assert "Failed. Reason: rank 3 (algo-2): RuntimeError: the rank that fails on purpose\n" in message
    assert "\n  at train.py:2, in <module>: if os.environ['SMP_RANK'] == " in message
    assert isinstance(caught.value, RuntimeError), "which the SDK's local mode raises"
    containers.collect()
    assert set(containers.exit_codes()) == {1}
