"""How jobs end that do not end well: failures, Ctrl-C, a killed notebook, stop()."""

from __future__ import annotations

import os
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
from sagemaker.exceptions import UnexpectedStatusException
from support.platform.fake_jobs import FAKE_BOOTSTRAP, gone_within, marked

Make = Callable[..., Any]

NOTEBOOK = """
import sys
from smp_estimator import ProcessSession, SMPEstimator
play, script, root, mark, wait, launcher = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5], sys.argv[6:]
estimator = SMPEstimator(
    entry_point="train.py", source_dir=script, instance_type="local", instance_count=2,
    sagemaker_session=ProcessSession(root=root, launcher=launcher, stop_grace_seconds=1.5),
    hyperparameters={"play": play, "stubborn": True, "steps": 4, "pause": 0.25}, environment={"TEST_MARK": mark},
)
try:
    estimator.fit(wait=wait == "wait")
except KeyboardInterrupt:
    print("status", estimator.latest_training_job.describe()["TrainingJobStatus"], flush=True)
    raise SystemExit(42)
print("fit returned", estimator.model_data, flush=True)
"""


@contextmanager
def notebook(play: str, script: Path, root: Path, *, wait: bool = True) -> Iterator[tuple[Any, str]]:
    """A python process that calls ``fit()``; yields it and the mark of its job's processes."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", NOTEBOOK, play, str(script), str(root), mark, "wait" if wait else "background"]
    process = subprocess.Popen([*command, *FAKE_BOOTSTRAP], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def read_until(process: Any, text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the notebook ended without {text!r}")


def test_a_failing_job_says_why(make: Make, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    estimator = make("fail", instance_count=2, environment={"TEST_MARK": mark})
    started = time.monotonic()
    with pytest.raises(UnexpectedStatusException) as caught:
        estimator.fit(logs=False)
    assert time.monotonic() - started < 30
    message = str(caught.value)
    assert f"Error for Training job {estimator.latest_training_job.name}: Failed. Reason: rank 1 (algo-1)" in message
    assert "ValueError: boom" in message
    assert message.rstrip().endswith(f"{estimator.latest_training_job.name}/job.log")
    assert caught.value.actual_status == "Failed"
    description = estimator.latest_training_job.describe()
    assert description["TrainingJobStatus"] == "Failed"
    assert description["FailureReason"].startswith("rank 1 (algo-1): ValueError: boom")
    assert not marked(mark)
    root = tmp_path / "jobs" / estimator.latest_training_job.name
    assert "hello from algo-1" in (root / "job.log").read_text()
    assert (root / "algo-1/opt/ml/output/failure").exists()
    assert not (root / "output").exists()


def test_a_failed_job_s_output_data_is_delivered(make: Make, tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'out'}"
    with pytest.raises(UnexpectedStatusException, match="ValueError: boom"):
        make("fail", instance_count=2, hyperparameters={"write_output": 1}, output_path=place).fit(logs=False)
    with tarfile.open(tmp_path / "out" / "output.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["curve-algo-1.csv", "curve-algo-2.csv"]
    assert not (tmp_path / "out" / "model.tar.gz").exists()


def test_what_cannot_be_delivered_does_not_hide_why_a_job_failed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "out"))

    monkeypatch.setattr("smp_estimator.local.job.deliver", refuse)
    with pytest.raises(UnexpectedStatusException, match="ValueError: boom"):
        make("fail", hyperparameters={"write_output": 1}, output_path=f"file://{tmp_path / 'out'}").fit(logs=False)
    assert "what it wrote to its output data is not delivered: [Errno 13] Permission denied" in caplog.text


def test_a_bootstrap_that_dies_silently(make: Make) -> None:
    with pytest.raises(
        UnexpectedStatusException, match=r"(?s)without a failure file: algo-1 with signal 9.*Segmentation"
    ):
        make("die").fit(logs=False)


def test_a_launcher_that_does_not_exist(make: Make, tmp_path: Path) -> None:
    from smp_estimator import ProcessSession

    estimator = make(sagemaker_session=ProcessSession(root=tmp_path / "none", launcher=["/no/such/program"]))
    with pytest.raises(FileNotFoundError):
        estimator.fit()
    assert list((tmp_path / "none").iterdir()) == []


def test_stop_lets_the_script_save(make: Make) -> None:
    estimator = make("obey")
    estimator.fit(wait=False)
    log = estimator.sagemaker_session.job(estimator.latest_training_job.name).log
    for item in log.follow():
        if item == "waiting":
            break
    estimator.latest_training_job.stop()
    estimator.latest_training_job.wait(logs=False)
    assert estimator.latest_training_job.describe()["TrainingJobStatus"] == "Stopped"
    with tarfile.open(estimator.model_data.removeprefix("file://")) as archive:
        assert archive.getnames() == ["saved.txt"]


def test_ctrl_c_leaves_nothing(script: Path, tmp_path: Path) -> None:
    with notebook("hang", script, tmp_path / "jobs") as (process, mark):
        read_until(process, "hanging")
        deadline = time.monotonic() + 10
        while len(marked(mark)) < 6:  # two hosts of a bootstrap, a rank and the rank's child
            assert time.monotonic() < deadline, marked(mark)
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        gone_within(mark, 5.0)
        rest = process.stdout.read()
        assert process.wait(10) == 42
        assert "status Stopped" in rest
        (log,) = (tmp_path / "jobs").glob("*/job.log")
        assert "Ctrl-C: stopping job" in rest
        assert "its ranks get SIGTERM and have 1.5 s to save and exit. Ctrl-C again kills them at once." in rest
        assert f"The job was stopped. Its log: {log};" in rest
    assert not list((tmp_path / "jobs").rglob("model.tar.gz")), "packing would delay the notebook"


@pytest.mark.full
def test_second_ctrl_c_kills_at_once(script: Path, tmp_path: Path) -> None:
    with notebook("hang", script, tmp_path / "jobs") as (process, mark):
        read_until(process, "hanging")
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert marked(mark), "the ranks ignore SIGTERM and still have their grace"
        process.send_signal(signal.SIGINT)
        assert gone_within(mark, 2.0) < 2.0
        assert "The job was killed. Its log: " in process.stdout.read()
        assert process.wait(10) == 42


def test_killed_notebook_ends_the_job(script: Path, tmp_path: Path) -> None:
    with notebook("obey", script, tmp_path / "jobs") as (process, mark):
        read_until(process, "waiting")
        process.kill()
        gone_within(mark, 5.0)
        saved = list((tmp_path / "jobs").rglob("saved.txt"))
        assert saved, "the end of the lifeline is a request to stop, not a kill"


@pytest.mark.full
def test_the_interpreter_waits_for_background_jobs(script: Path, tmp_path: Path) -> None:
    with notebook("train", script, tmp_path / "jobs", wait=False) as (process, _mark):
        output = process.stdout.read()
        assert process.wait(20) == 0
        assert "fit returned" in output
    assert list((tmp_path / "jobs").rglob("model.tar.gz"))


def test_orphans_in_other_sessions_are_found_by_their_mark() -> None:
    from smp_estimator.local.stop import TOKEN_VARIABLE, job_processes, kill_job

    token = uuid.uuid4().hex
    orphaned = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", orphaned], env={**os.environ, TOKEN_VARIABLE: token, "TEST_MARK": token}
    )
    parent.wait(10)
    assert job_processes(token, [parent.pid]) == set(marked(token))
    assert len(marked(token)) == 1
    assert kill_job(token, [parent.pid]) == set()
    assert not marked(token)
