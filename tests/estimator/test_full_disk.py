"""A full disk under a job: it fails and says which disk, whatever it prints ends, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker.exceptions import UnexpectedStatusException
from support.platform.fake_jobs import FAKE_BOOTSTRAP, gone_within

from smp_config.machine.disk_space import full_disk, why_full
from smp_estimator import ProcessSession
from smp_estimator.local.files import artifacts
from smp_estimator.local.log import JobLog, LineSplitter
from smp_launch.errors import LaunchError
from smp_records.records import PROGRESS_PREFIX, ProgressRecord

Make = Callable[..., Any]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk takes more rights: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_log_that_cannot_be_written_goes_on_taking_lines(disk: Path) -> None:
    told: list[str] = []
    log = JobLog(disk / "job.log", failed=lambda: told.append("full"))
    log.write("first")
    filling = disk / "filling"
    with pytest.raises(OSError, match="No space left"):
        filling.write_bytes(bytes(1 << 20))
    for number in range(200):
        log.write(f"{number} " + "x" * 4000)
    log.write(PROGRESS_PREFIX + '{"step": 7}')
    assert told == ["full"], "told once"
    assert log.progress == ProgressRecord(step=7), "records need no disk"
    assert log.failure is not None
    kept = (disk / "job.log").read_bytes()
    assert kept.endswith(b"\n"), "no half line"
    assert f"{disk / 'job.log'} cannot be written: the disk is full (0 of 1,048,576 bytes are free" in log.failure
    assert (
        f"it holds {len(kept):,} bytes, and {200 + 1 - kept.count(b'%c' % 10)} lines after them are lost" in log.failure
    )
    assert log.tail(1)[0].startswith("199 "), "what the file lacks is remembered"
    filling.unlink()
    log.write("there is room again")
    log.close()
    log.close()
    assert (disk / "job.log").read_bytes() == kept, "a log with a hole in it would mislead"
    assert next(item for item in log.follow() if isinstance(item, str)) == "first"


def test_a_full_device_closes_without_an_error(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "job.log")
    log = JobLog(tmp_path / "job.log")
    log.write("one")
    log.close()
    assert "the disk is full" in (log.failure or "")


@pytest.mark.parametrize("play", ["flood", "flood and ignore"])
def test_a_job_whose_disk_is_full_fails_and_names_it(make: Make, disk: Path, play: str) -> None:
    mark = uuid.uuid4().hex
    session = ProcessSession(root=disk / "jobs", launcher=FAKE_BOOTSTRAP)
    estimator = make(play, sagemaker_session=session, environment={"TEST_MARK": mark})
    estimator.fit(wait=False)
    job = session.job(estimator.latest_training_job.name)
    if play == "flood and ignore":
        # The script writes on and ignores SIGTERM.
        while job.log.failure is None:
            assert not job.done.wait(0.05)
        assert not job.done.is_set(), "it gets the time that a stopped job has to save"
        job.kill()
        assert job.done.wait(20)
        assert job.status.value == "Failed", "there is no room for the archive either"
        assert "model.tar.gz cannot be written: the disk is full (0 of 1,048,576 bytes are free" in (
            job.failure_reason or ""
        )
    else:
        with pytest.raises(UnexpectedStatusException) as caught:
            estimator.latest_training_job.wait(logs=False)
        message = str(caught.value)
        assert f"the job's log {job.tree.log} cannot be written: the disk is full (" in message
        assert f"of 1,048,576 bytes are free on the disk of {job.tree.root})" in message
        assert "ProcessSession(root=…)" in message
        assert "flood line" in message, "its newest lines are told, as the file lacks them"
    gone_within(mark, 5)


def test_a_disk_without_room_for_the_code(make: Make, disk: Path, script: Path) -> None:
    (script / "large.bin").write_bytes(bytes(2 << 20))
    estimator = make(sagemaker_session=ProcessSession(root=disk / "jobs", launcher=FAKE_BOOTSTRAP))
    with pytest.raises(
        LaunchError, match=r"the disk is full \(.* of 1,048,576 bytes are free.*ProcessSession\(root=…\)"
    ):
        estimator.fit()
    assert list((disk / "jobs").iterdir()) == []


def test_a_root_that_cannot_be_made(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    session = ProcessSession(root=tmp_path / "file" / "jobs", launcher=FAKE_BOOTSTRAP)
    with pytest.raises(LaunchError, match=r"file/jobs cannot be made \(Not a directory\).*ProcessSession\(root=…\)"):
        make(sagemaker_session=session).fit()


def test_a_disk_without_room_for_the_model(make: Make, disk: Path) -> None:
    (disk / "filling").write_bytes(bytes(1 << 20))
    estimator = make(output_path=f"file://{disk}")
    with pytest.raises(UnexpectedStatusException) as caught:
        estimator.fit(logs=False)
    assert f"{disk / 'model.tar.gz'} cannot be written: the disk is full (0 of 1,048,576 bytes" in str(caught.value)
    assert sorted(path.name for path in disk.iterdir()) == ["filling"]
    job = estimator.sagemaker_session.job(estimator.latest_training_job.name)
    assert (job.tree.hosts[0].model_dir / "shared.txt").exists(), "the model is not lost"


def test_whatever_goes_wrong_with_a_line_the_job_ends_and_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("of a kind that nobody thought of")

    monkeypatch.setattr("smp_estimator.local.log.parse_progress", broken)
    estimator = make("flood")
    estimator.fit(wait=False)
    job = estimator.sagemaker_session.job(estimator.latest_training_job.name)
    assert job.done.wait(20)
    assert "cannot be written: ArithmeticError: of a kind that nobody thought of" in (job.failure_reason or "")


def test_an_error_while_finishing_still_ends_the_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("packing broke")

    monkeypatch.setattr("smp_estimator.local.job.deliver", broken)
    monkeypatch.setattr(JobLog, "close", broken)
    estimator = make()
    estimator.fit(wait=False)
    job = estimator.sagemaker_session.job(estimator.latest_training_job.name)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    assert job.done.wait(20)
    assert job.status.value == "Failed"
    assert "packing broke" in (job.failure_reason or "")
    assert str(job.tree.root) in (job.failure_reason or "")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"step": 1' + "0" * 5000 + "}", '{"step": 1e999}', '{"step": -1}', "\ud800", '{"step": NaN}'],
)
def test_what_only_looks_like_a_record_is_a_line(tmp_path: Path, text: str) -> None:
    log = JobLog(tmp_path / "job.log")
    log.write(PROGRESS_PREFIX + text)
    log.close()
    assert log.progress is None
    assert (tmp_path / "job.log").read_bytes().startswith(PROGRESS_PREFIX.encode())


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(40) for line in splitter.feed(b"x" * 65536)]
    assert [len(line) for line in lines] == [1 << 20] * 2
    assert sum(map(len, splitter.rest())) == 8 * 65536


def test_only_missing_room_is_a_full_disk(tmp_path: Path) -> None:
    assert why_full(OSError(errno.EACCES, "Permission denied")) is None
    assert why_full(ValueError("No space left on device")) is None
    assert why_full(OSError(errno.EDQUOT, "x")) == "the quota of the disk is used up"
    assert full_disk(OSError(errno.EIO, "x"), tmp_path) is None
    chained = RuntimeError("saving")
    chained.__cause__ = OSError(errno.ENOSPC, "x")
    assert why_full(chained) == "the disk is full"


def test_packing_names_the_archive_of_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "model").mkdir()
    with pytest.raises(OSError, match="model.tar.gz") as caught:
        artifacts.pack([tmp_path / "model"], "model.tar.gz", str(tmp_path / "out"))
    assert "model.tar.gz cannot be written: the disk is full" in str(
        full_disk(caught.value, Path(caught.value.filename))
    )
