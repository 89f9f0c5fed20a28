"""A container of a job without Docker: the SDK's own ``sm_train.sh`` runs, with another folder for ``/opt/ml``.

It begins as the first process of a namespace of its own, where that is allowed: that process gets the stop, and ignores
it unless it says otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import IMAGE
from support.platform.sdk3 import require_sdk_3
from support.platform.stock_images import ImagePython, make_wheels, offline

require_sdk_3()

from sagemaker.core.training.configs import Compute, SourceCode  # noqa: E402 - only where it is installed
from sagemaker.train.model_trainer import Mode  # noqa: E402
from sagemaker.train.model_trainer import ModelTrainer as StockModelTrainer  # noqa: E402

from smp_estimator.cloud import source  # noqa: E402
from smp_estimator.model_trainer import ModelParallel  # noqa: E402

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

RUNS = """
import json, os, sys
import smdistributed.modelparallel.torch as smp
smp.init()
told = {name: os.environ.get(name) for name in (
    "SM_FRAMEWORK_PARAMS", "SM_HP_MP_PARAMETERS", "SM_CHANNEL_TRAIN", "SM_MODEL_DIR", "SM_SOURCE_DIR", "SMP_HOST")}
told |= {"arguments": sys.argv[1:], "folder": os.getcwd(), "runtime": smp.__file__, "stages": smp.pp_size()}
with open(os.path.join(os.environ["SM_MODEL_DIR"], f"told-{smp.rank()}.json"), "w") as file:
    json.dump(told, file)
"""
FAILS = "import os\nif os.environ['SMP_RANK'] == '1': raise ValueError('on purpose')\nimport time; time.sleep(60)\n"
SAVES = """
import os, signal, sys, time
def save(*_):
    open(os.path.join(os.environ["SM_MODEL_DIR"], "saved-" + os.environ["SMP_RANK"]), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("rank", os.environ["SMP_RANK"], "is ready", flush=True)
while True:
    time.sleep(0.05)
"""


@dataclass
class Container:
    """What a container of the job sees, and the process that would be its first."""

    base: Path
    process: subprocess.Popen[str]
    lines: list[str]
    news: threading.Condition

    def wait_for(self, text: str, times: int = 1, patience: float = 60.0) -> None:
        with self.news:
            if not self.news.wait_for(lambda: sum(text in line for line in self.lines) >= times, patience):
                raise AssertionError(f"{text!r} did not come {times} times:\n" + "".join(self.lines))

    def end(self) -> int:
        """The exit code."""
        return self.process.wait(90)

    @property
    def failure(self) -> str:
        return (self.base / "output" / "failure").read_text()


def in_namespace() -> list[str]:
    """The words that make a command the first process of a namespace; none where that is not allowed."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode:
        return words
    return []


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """``container(script, ModelParallel(…))`` → a running container of one host."""
    started: list[subprocess.Popen[str]] = []

    def start(
        text: str,
        parallel: Any,
        *,
        change: Callable[[Path], None] = lambda _: None,
        python: Path = Path(sys.executable),
        **environment: str,
    ) -> Container:
        code = tmp_path / "source"
        code.mkdir()
        (code / "train.py").write_text(text)
        (tmp_path / "root").mkdir()
        stock = StockModelTrainer(
            training_mode=Mode.LOCAL_CONTAINER,
            training_image=IMAGE,
            local_container_root=str(tmp_path / "root"),
            source_code=SourceCode(source_dir=str(code), entry_script="train.py"),
            compute=Compute(instance_type="local_cpu", instance_count=1),
            distributed=parallel,
            hyperparameters={"steps": 3},
        )
        request = stock._create_training_job_args()
        base = tmp_path / "opt" / "ml"
        (base / "output" / "data").mkdir(parents=True)
        (base / "model").mkdir()
        config = base / "input" / "config"
        config.mkdir(parents=True)
        for row in request["input_data_config"]:
            shutil.copytree(
                row.data_source.file_system_data_source.directory_path, base / "input" / "data" / row.channel_name
            )
        (base / "input" / "data" / "train").mkdir()
        (config / "hyperparameters.json").write_text(json.dumps(request["hyper_parameters"]))
        (config / "inputdataconfig.json").write_text(json.dumps({n: {} for n in ("code", "sm_drivers", "train")}))
        resources = {
            "current_host": "algo-1",
            "hosts": ["algo-1"],
            "network_interface_name": "ethwe",
            "current_instance_type": "local_cpu",
        }
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        for path in (base / "input" / "data" / "sm_drivers").rglob("*"):
            if path.suffix in (".py", ".sh") and "/opt/ml" in path.read_text():
                path.write_text(path.read_text().replace("/opt/ml", str(base)))
        change(base / "input" / "data" / "sm_drivers" / "distributed_drivers")
        words = request["algorithm_specification"].container_entrypoint
        words += [word.replace("/opt/ml", str(base)) for word in request["algorithm_specification"].container_arguments]
        environ = {
            "PATH": f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "SAGEMAKER_BASE_DIR": str(base),
            "TRAINING_JOB_NAME": "job-1",
            "CURRENT_HOST": "algo-1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        process = subprocess.Popen(
            [*in_namespace(), *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        made = Container(base, process, [], threading.Condition())

        def read() -> None:
            for line in process.stdout or ():
                with made.news:
                    made.lines.append(line)
                    made.news.notify_all()

        threading.Thread(target=read, daemon=True).start()
        return made

    yield start
    for process in started:
        process.kill()
        process.wait()


def parallel(**given: Any) -> ModelParallel:
    return ModelParallel(
        **{"parameters": {"pipeline_parallel_degree": 2, "ddp": True}, "processes_per_host": 2, **given}
    )


def test_a_job_runs(container: Callable[..., Container]) -> None:
    job = container(RUNS, parallel())
    assert job.end() == 0, "".join(job.lines)
    told = [json.loads((job.base / "model" / f"told-{rank}.json").read_text()) for rank in range(2)]
    first = told[0]
    assert [one["stages"] for one in told] == [2, 2]
    assert first["arguments"] == ["--mp_parameters", "ddp=True,partitions=2,pipeline_parallel_degree=2", "--steps", "3"]
    assert json.loads(first["SM_HP_MP_PARAMETERS"]) == {"ddp": True, "partitions": 2, "pipeline_parallel_degree": 2}
    framework = json.loads(first["SM_FRAMEWORK_PARAMS"])
    assert framework["sagemaker_mpi_enabled"] is True
    assert framework["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert first["folder"] == first["SM_SOURCE_DIR"] == str(job.base / "input" / "data" / "code")
    assert first["SM_CHANNEL_TRAIN"] == str(job.base / "input" / "data" / "train")
    assert "smp-site-" in first["runtime"], "the one that travelled"
    assert not (job.base / "output" / "failure").exists()


def test_a_failing_rank_is_the_reason(container: Callable[..., Container]) -> None:
    job = container(FAILS, parallel())
    assert job.end() == 1
    assert job.failure.startswith("rank 1 (algo-1): ValueError: on purpose\n")
    assert "Traceback (most recent call last)" in job.failure


def test_a_stop_reaches_every_rank(container: Callable[..., Container]) -> None:
    job = container(SAVES, parallel())
    job.wait_for("is ready", times=2)
    # The first process of the namespace; where there is none, the shell itself.
    child = f"/proc/{job.process.pid}/task/{job.process.pid}/children"
    first = int(Path(child).read_text().split()[0]) if in_namespace() else job.process.pid
    os.kill(first, signal.SIGTERM)
    assert job.end() == 0, "".join(job.lines)
    assert sorted(path.name for path in (job.base / "model").iterdir()) == ["saved-0", "saved-1"]
    assert not (job.base / "output" / "failure").exists()


def test_degrees_that_do_not_fit_are_refused_before_a_rank_starts(container: Callable[..., Container]) -> None:
    """The SDK's own ModelTrainer cannot know; the driver does."""
    job = container(RUNS, parallel(parameters={"pipeline_parallel_degree": 3}))
    assert job.end() != 0
    assert job.failure.startswith("the job cannot start: ")
    assert "pipeline" in job.failure
    assert not any("is ready" in line for line in job.lines)


@pytest.mark.full
@pytest.mark.parametrize("mpi4py", [True, False])
def test_what_the_image_lacks_is_installed(
    container: Callable[..., Container], tmp_path: Path, *, mpi4py: bool
) -> None:
    """The two kinds of stock images: with mpi4py, which is left alone, and without, as PyTorch 2.11 to 2.13 for CUDA."""
    image = ImagePython(tmp_path / "image", mpi4py=mpi4py)
    names = [line.split(">=")[0] for line in source.travelling_requirements()]
    index = make_wheels(names, tmp_path / "index")
    assert not image.has("pydantic")
    job = container(RUNS, parallel(), python=image.program, **offline(index))
    assert job.end() == 0, "".join(job.lines)
    said = next(line for line in job.lines if line.startswith("[smp] installing what the image lacks"))
    assert (" mpi4py" in said) is not mpi4py
    assert (image.site / "mpi4py").is_symlink() is mpi4py
    told = [json.loads(path.read_text()) for path in sorted((job.base / "model").glob("told-*.json"))]
    assert [row["stages"] for row in told] == [2, 2]
    assert all("/smp-site-" in row["runtime"] for row in told)


def test_what_the_image_lacks_and_pip_cannot_get(container: Callable[..., Container]) -> None:
    def change(folder: Path) -> None:
        (folder / "smp_requirements.txt").write_text("no-such-package-of-this-project>=1\n")

    started = time.monotonic()
    job = container(RUNS, parallel(), change=change)
    assert job.end() != 0
    assert "the image lacks no-such-package-of-this-project>=1" in job.failure
    assert "ModelParallel(ship_runtime=False)" in job.failure
    assert "pip said:" in job.failure
    assert time.monotonic() - started < 90


def test_an_image_without_the_runtime(container: Callable[..., Container]) -> None:
    job = container(RUNS, parallel(ship_runtime=False), change=lambda folder: hide_the_runtime(folder))
    assert job.end() != 0
    assert "No module named 'smp_launch'" in job.failure
    assert "leave ship_runtime out" in job.failure


def hide_the_runtime(folder: Path) -> None:
    """As in an image that has none: this environment's own is no longer found."""
    driver = folder / "smp_driver.py"
    hidden = (
        "def main() -> None:\n"
        "    sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        "    sys.path[:] = [path for path in sys.path if 'editable' not in path.lower()]\n"
    )
    text = driver.read_text().replace("def main() -> None:\n", hidden, 1)
    driver.write_text(text)
