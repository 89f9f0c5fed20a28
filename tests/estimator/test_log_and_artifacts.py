"""The log file with its followers, and the archives."""

from __future__ import annotations

import os
import tarfile
import threading
from pathlib import Path

import pytest

from smp_estimator.local.files import artifacts
from smp_estimator.local.log import JobLog, LineSplitter
from smp_records.records import ProgressRecord, UsageRecord, format_progress, format_usage


def test_followers_get_every_line_and_the_newest_record(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "job.log")
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.extend(item for item in log.follow() if item is not None))
    reader.start()
    for step in range(200):
        log.write(f"line {step} äöü")
        log.write(format_progress(ProgressRecord(step=step)))
    used = UsageRecord(rank=3, memory_bytes=2**20, cpu_cores=0.5)
    log.write(format_usage(used), "algo-2")
    log.write("from a worker", "algo-2")
    log.close()
    reader.join(10)
    assert [item for item in seen if isinstance(item, str)] == [f"line {n} äöü" for n in range(200)] + [
        "[algo-2] from a worker"
    ]
    assert [item for item in seen if isinstance(item, ProgressRecord)][-1].step == 199
    assert [item for item in seen if isinstance(item, UsageRecord)] == [used]
    assert list(log.follow())[:1] == ["line 0 äöü"], "a late reader starts at the beginning"
    assert list(log.follow())[-1] == used
    assert log.tail(1) == ["[algo-2] from a worker"]


def test_not_waiting_ends_at_what_is_there(tmp_path: Path) -> None:
    log = JobLog(tmp_path / "job.log")
    log.write("one")
    assert [item for item in log.follow(wait=False) if item is not None] == ["one"]
    log.close()


def test_lines_in_any_pieces() -> None:
    splitter = LineSplitter()
    text = "first\nsecönd\r\nbar 10%\rbar 20%\rbar 30%\nlast".encode()
    lines = [line for at in range(0, len(text), 3) for line in splitter.feed(text[at : at + 3])]
    assert lines == ["first", "secönd", "bar 10%", "bar 30%"], "redrawn lines come once a second"
    assert list(splitter.rest()) == ["last"]


def test_pack_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "sub" / "w.bin").write_bytes(b"w" * 1000)
    (model / "empty").mkdir()
    os.symlink("sub/w.bin", model / "latest")
    os.symlink(tmp_path / "outside.txt", model / "outside")
    os.symlink("/no/such/file", model / "dangling")
    (tmp_path / "outside.txt").write_text("outside")
    artifacts.pack([model], "model.tar.gz", str(tmp_path / "out"))
    with tarfile.open(tmp_path / "out" / "model.tar.gz") as archive:
        members = {m.name: m for m in archive}
        assert set(members) == {"sub/w.bin", "empty", "latest", "outside"}
        assert members["latest"].issym()
        assert archive.extractfile("outside").read() == b"outside"  # type: ignore[union-attr]
        assert {(m.uid, m.uname) for m in members.values()} == {(0, "")}

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(artifacts, "_add", broken)
    with pytest.raises(OSError, match="disk full"):
        artifacts.pack([model], "model.tar.gz", str(tmp_path / "out2"))
    assert list((tmp_path / "out2").iterdir()) == []


def test_hosts_are_merged_and_the_leader_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = tmp_path / "algo-1", tmp_path / "algo-2"
    for folder, text in ((one, "leader"), (two, "worker")):
        folder.mkdir()
        (folder / "same").write_text("same")
        (folder / "differs").write_text(text)
        (folder / text).write_text("")
    merged = artifacts.merged_files([one, two])
    assert merged["differs"] == one / "differs"
    assert set(merged) == {"same", "differs", "leader", "worker"}
    assert caplog.text.count("two hosts wrote different") == 1
    third = tmp_path / "algo-3"
    third.mkdir()
    (third / "worker").write_text("other")
    caplog.clear()
    assert artifacts.merged_files([one, two, third])["worker"] == two / "worker"
    assert f"the one of {two} is kept" in caplog.text


@pytest.mark.parametrize(
    ("destination", "expected"),
    [
        ("file:///out", "file:///out/model.tar.gz"),
        ("s3://bucket/prefix/", "s3://bucket/prefix/job-1/model.tar.gz"),
        ("s3://bucket", "s3://bucket/job-1/model.tar.gz"),
    ],
)
def test_addresses(destination: str, expected: str) -> None:
    assert artifacts.artifact_address(destination, "model", "job-1", compressed=True) == expected
