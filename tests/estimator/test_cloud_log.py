"""Watching a job in the cloud: its states, the log of every host, and the progress."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.platform.cloud import Cloud, boto_session, service, set_status
from support.platform.jobs import model_parallel

from smp_estimator import SMPEstimator
from smp_estimator.cloud.log import CloudLog
from smp_records.records import ProgressRecord, UsageRecord, format_progress, format_usage

JOB = "watched"


@pytest.fixture(scope="module")
def in_process() -> Iterator[Cloud]:
    with service() as boto:
        yield Cloud(boto)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_estimator.cloud.log.POLL_SECONDS", 0.02)


@pytest.fixture(params=["in process", "server"])
def cloud(request: pytest.FixtureRequest, in_process: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    if request.param == "in process":
        yield in_process
        return
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    boto = boto_session()
    boto.client("s3").create_bucket(Bucket="bucket")
    try:
        yield Cloud(boto)
    finally:
        server.stop()


def play(cloud: Cloud, *acts: Callable[[], None]) -> None:
    """At each question for the job's state the next thing happens; the last one holds."""
    left = list(acts)

    def act(**_: Any) -> None:
        if left:
            left.pop(0)()

    events = cloud.session.sagemaker_client.meta.events
    events.register("provide-client-params.sagemaker.DescribeTrainingJob", act, unique_id="play")


@pytest.fixture(autouse=True)
def _played_out(in_process: Cloud) -> Iterator[None]:
    yield
    events = in_process.session.sagemaker_client.meta.events
    events.unregister("provide-client-params.sagemaker.DescribeTrainingJob", unique_id="play")


def record(step: int) -> str:
    return "[1,mpirank:0,algo-1]<stdout>:" + format_progress(
        ProgressRecord(step=step, total_steps=4, loss=4.0 / step, samples_per_second=100.0)
    )


def job_of(cloud: Cloud, script: Path, number: int = 2) -> Any:
    return cloud.estimator(script, distribution=model_parallel(8, ddp=True), instance_count=number)


def test_to_completed(cloud: Cloud, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"done-{id(cloud)}"

    def training() -> None:
        set_status(_backends(), name, "InProgress", "Training")
        cloud.write(f"{name}/algo-2-1700000000", "second host is up")
        cloud.write(f"{name}/algo-1-1700000000", "first host is up", record(1))

    def more() -> None:
        cloud.write(f"{name}/algo-1-1700000000", record(4), "saving")

    def end() -> None:
        set_status(_backends(), name, "Completed")
        used = [format_usage(UsageRecord(rank=rank, memory_bytes=(rank + 1) * 2**30)) for rank in (1, 0)]
        cloud.write(f"{name}/algo-10-1700000001", "late host", "late line", *used)

    play(cloud, lambda: set_status(_backends(), name, "InProgress", "Starting"), training, more, end)
    job = job_of(cloud, script)
    job.fit({"train": "s3://bucket/data"}, job_name=name)
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("[algo")]
    assert shown == [
        "[algo-1] first host is up",
        "[algo-2] second host is up",
        "[algo-1] saving",
        "[algo-10] late host",
        "[algo-10] late line",
    ]
    states = [line.rpartition(" - ")[2] for line in lines if " - " in line]
    assert [state for state in states if state in ("Training", "Completed")] == ["Training", "Completed"]
    progress = [line for line in lines if line.startswith("step ")]
    assert progress[0].startswith("step 1/4 | loss 4.0000 | samples/s 100.0")
    assert progress[-1].startswith("step 4/4 | loss 1.0000")
    assert "smp-progress" not in "\n".join(lines)
    assert "smp-usage" not in "\n".join(lines)
    assert "peak memory by rank: 1.00, 2.00 GiB (most: rank 1)" in lines

    job.logs()
    again = capsys.readouterr().out
    assert "[algo-1] first host is up" in again
    attached = SMPEstimator.attach(name, sagemaker_session=cloud.session)
    attached.logs()
    assert "[algo-10] late line" in capsys.readouterr().out


def test_to_failed(cloud: Cloud, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sagemaker.exceptions import UnexpectedStatusException

    name = f"failed-{id(cloud)}"

    def end() -> None:
        cloud.write(f"{name}/algo-1-1700000000", "ValueError: boom")
        set_status(_backends(), name, "Failed", reason="rank 3 (algo-1): ValueError: boom")

    play(cloud, lambda: set_status(_backends(), name, "InProgress", "Training"), end)
    with pytest.raises(UnexpectedStatusException, match=r"rank 3 \(algo-1\): ValueError: boom"):
        job_of(cloud, script).fit(job_name=name)
    assert "[algo-1] ValueError: boom" in capsys.readouterr().out


def test_a_terminal_gets_the_bar(in_process: Cloud, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from smp_estimator import progress

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=30, color_system=None)
    monkeypatch.setattr(progress, "open_view", lambda: progress.LiveView(console))
    play(in_process, lambda: in_process.write("bar/algo-1-17", "hello", record(3)))
    job_of(in_process, script).fit(job_name="bar")
    assert "[algo-1] hello" in out.getvalue()
    assert "step 3/4" in out.getvalue()
    assert "━" in out.getvalue()


def test_without_logs_nothing_is_read(
    in_process: Cloud, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CloudLog, "new_lines", lambda self: pytest.fail("read"))
    for number, logs in enumerate((False, "None", ["Rules"], [])):
        job_of(in_process, script).fit(job_name=f"quiet-{number}", logs=logs)
    job = job_of(in_process, script)
    job.fit(job_name="quiet-later", wait=False)
    assert "[algo" not in capsys.readouterr().out
    assert job.jobs == [job.latest_training_job]


def test_ctrl_c_leaves_the_job(in_process: Cloud, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    play(in_process, lambda: set_status(_backends(), "interrupted", "InProgress", "Training"), interrupt)
    with pytest.raises(KeyboardInterrupt):
        job_of(in_process, script).fit(job_name="interrupted")
    assert "The job goes on" in capsys.readouterr().out


def test_streams_of_restarts_and_many_pages(in_process: Cloud) -> None:
    for host in range(1, 61):
        in_process.write(f"many/algo-{host}-1700000000", f"host {host}")
    in_process.write("many/algo-1-1700000500", "host 1 again", "x" * 10)
    in_process.write("many-others/algo-1-1700000000", "not ours")
    log = CloudLog(in_process.session, "many")
    lines = list(log.new_lines())
    assert lines[:3] == ["[algo-1] host 1", "[algo-1] host 1 again", "[algo-1] " + "x" * 10]
    assert lines[3:] == [f"[algo-{host}] host {host}" for host in range(2, 61)]
    assert list(log.new_lines()) == []
    in_process.write("many/algo-7-1700000000", "more", " ")
    assert list(log.new_lines()) == ["[algo-7] more", "[algo-7]  "]


def test_a_job_that_wrote_nothing(in_process: Cloud, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_of(in_process, script).fit(job_name="silent")
    assert "[algo" not in capsys.readouterr().out


def _backends() -> Any:
    from moto.sagemaker.models import sagemaker_backends

    return sagemaker_backends
