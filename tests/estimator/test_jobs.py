"""Whole jobs through ``fit()`` with the real bootstrap, mpirun and the training script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.platform.fake_jobs import gone_within, marked
from support.platform.jobs import model_parallel

pytestmark = [pytest.mark.job, pytest.mark.timeout(180)]

REPOSITORY = Path(__file__).resolve().parents[2]
Make = Callable[..., Any]

FAILING = """
import os, sys, time
rank = int(os.environ["SMP_RANK"])
for step in range(1, 1000):
    if rank == 1 and step == 3:
        raise ValueError("boom at step 3")
    time.sleep(0.1)
"""

ENDLESS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.environ["SMP_RANK"], "is busy", flush=True)
time.sleep(600)
"""


@pytest.fixture
def real(tmp_path: Path) -> Any:
    from smp_estimator import ProcessSession

    return ProcessSession(root=tmp_path / "jobs")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_failing_rank(make: Make, real: Any, script: Path, hosts: int, capsys: pytest.CaptureFixture[str]) -> None:
    from sagemaker.exceptions import UnexpectedStatusException

    (script / "train.py").write_text(FAILING)
    mark = uuid.uuid4().hex
    estimator = make(
        sagemaker_session=real,
        instance_count=hosts,
        distribution=model_parallel(2 // hosts, ddp=True),
        environment={"TEST_MARK": mark},
    )
    started = time.monotonic()
    with pytest.raises(UnexpectedStatusException, match=r"(?s)rank 1.*ValueError: boom at step 3"):
        estimator.fit()
    assert time.monotonic() - started < 60  # of a hundred seconds that the other rank would take
    assert not marked(mark)
    assert "smp-failure" not in capsys.readouterr().out


@contextmanager
def _notebook(script: Path, root: Path, mark: str) -> Iterator[Any]:
    """A python process in ``fit()`` of a job of two hosts, both of whose ranks are busy."""
    code = f"""
from smp_estimator import ProcessSession, SMPEstimator
SMPEstimator(entry_point="train.py", source_dir={str(script)!r}, instance_type="local", instance_count=2,
    sagemaker_session=ProcessSession(root={str(root / "jobs")!r}), environment={{"TEST_MARK": {mark!r}}},
    distribution={model_parallel(1, ddp=True)!r}).fit()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        busy = 0
        for line in process.stdout or ():
            busy += "is busy" in line
            if busy == 2:
                break
        assert busy == 2
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_ctrl_c(script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(ENDLESS)
    mark = uuid.uuid4().hex
    with _notebook(script, tmp_path, mark) as process:
        process.send_signal(signal.SIGINT)
        print(f"gone after {gone_within(mark, 5.0):.2f} s")
        assert "KeyboardInterrupt" in process.communicate(timeout=10)[0]


@pytest.mark.full
def test_killed_notebook(script: Path, tmp_path: Path) -> None:
    (script / "train.py").write_text(ENDLESS.replace("signal.SIG_IGN", "signal.SIG_DFL"))
    mark = uuid.uuid4().hex
    with _notebook(script, tmp_path, mark) as process:
        process.kill()
        gone_within(mark, 8.0)


@pytest.mark.full  # what `make quickstart` runs
def test_quickstart_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples/quickstart.py"), "--steps", "4", "--megabytes", "0.2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"quickstart: steps=(\d+) val_loss=(\d+\.\d+) model=(\S+)", last)
    assert found, last
    assert found[1] == "4"
    model = Path(found[3])
    assert model.parent == tmp_path / "quickstart-output"
    with tarfile.open(model) as archive:
        assert {"config.json", "metrics.json", "model.pt"} <= set(archive.getnames())


@pytest.mark.full  # `.ci/run` runs it
def test_quickstart_notebook(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(REPOSITORY / "examples/quickstart.ipynb", as_version=4)
    small = {"steps = 150": "steps = 4", "megabytes = 9": "megabytes = 0.2"}
    for cell in notebook.cells:
        for before, after in small.items():
            cell.source = cell.source.replace(before, after)
        cell.source = cell.source.replace("(Path.cwd(), ", f"(Path({str(REPOSITORY / 'examples')!r}), ")
    NotebookClient(
        notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"quickstart: steps=4 val_loss=\d", text)
    assert "smp-progress" not in json.dumps(outputs)
    displays = [output["data"] for output in outputs if output["output_type"] == "display_data"]
    assert any('value="4" max="4"' in data.get("text/html", "") for data in displays)
