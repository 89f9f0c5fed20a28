"""Two jobs on one folder: the second is refused and told who the first is; a job that was killed keeps nobody out."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import folder_lock
from smp_runtime.checkpoint.files.manifest import checkpoints_in, verify
from smp_runtime.checkpoint.files.opened_files import CheckpointFiles, ReplacedError
from smp_runtime.checkpoint.folder_lock import LOCK, FolderLock, LockHolder
from smp_runtime.errors import CheckpointError
from smp_runtime.job import session

#: Has the lock of a folder until its input ends.
_HOLDER = """
import sys
from pathlib import Path
from smp_runtime.checkpoint import folder_lock
from smp_runtime.checkpoint.folder_lock import FolderLock, LOCK
folder_lock._PATIENCE_SECONDS = 0.1
lock = FolderLock(Path(sys.argv[1]) / LOCK)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""

#: Saves into a folder until it is refused, or killed.
_SAVER = """
import sys
import torch
import smdistributed.modelparallel.torch as smp
torch.set_num_threads(1)
smp.init({})
model = smp.DistributedModel(torch.nn.Linear(100, 100))
n = 0
while True:
    smp.save_checkpoint(sys.argv[1], tag="same", user_content=n)
    print(n, flush=True)
    n += 1
"""


def _started(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TRAINING_JOB_NAME": "the-first"},
    )  # fmt: skip


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of ``tmp_path``."""
    process = _started(_HOLDER, tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(folder_lock, "_PATIENCE_SECONDS", 0.1)


def test_a_job_that_is_about_to_end_is_waited_for(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(folder_lock, "_PATIENCE_SECONDS", 20.0)
    ending = threading.Timer(0.3, holder.stdin.close)
    ending.start()
    FolderLock(tmp_path / LOCK).release()
    assert holder.wait() == 0


def _saving():
    return smp.DistributedModel(nn.Linear(4, 4))


def test_the_second_job_is_refused_and_told_who_the_first_is(solo, tmp_path, holder):
    solo({})
    model = _saving()
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        smp.save_checkpoint(str(tmp_path), tag="a", model=model)
    said = str(caught.value)
    assert f"another job saves into {tmp_path} (process {holder.pid} on " in said
    assert "of job the-first, since 20" in said
    assert "give each job a folder of its own" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == before == [LOCK]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    smp.save_checkpoint(str(tmp_path), tag="a", model=model)  # whatever the file says


def test_the_lock_is_for_the_whole_job_and_gone_after_it(solo, tmp_path):
    solo({})
    model = _saving()
    smp.save_checkpoint(str(tmp_path), tag="a", model=model)
    second = subprocess.run([sys.executable, "-c", _HOLDER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert second.returncode != 0
    assert f"another job saves into {tmp_path} (process {os.getpid()} on " in second.stderr
    smp.save_checkpoint(str(tmp_path), tag="b", model=model)
    (tmp_path / LOCK).unlink()  # by somebody who cleans up
    smp.save_checkpoint(str(tmp_path), tag="c", model=model)
    assert (tmp_path / LOCK).exists()
    session.shutdown()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_partial", "b_partial", "c_partial", "newest"]


@pytest.mark.full
def test_of_two_jobs_that_save_the_same_tag_one_goes_on_and_every_look_finds_whole_checkpoints(tmp_path):
    first = _started(_SAVER, tmp_path)
    assert first.stdout.readline() == "0\n"
    second = _started(_SAVER, tmp_path)
    looks = 0
    while second.poll() is None:
        for found in checkpoints_in(tmp_path):
            if found.manifest is None:
                continue
            try:
                problems = verify(CheckpointFiles(found.folder, found.identity), found.manifest)
            except ReplacedError:
                continue
            # A former one may be removed while it is looked at, but never be another than was saved.
            assert all(problem.endswith("is missing") for problem in problems), problems
            looks += not problems
    _, said = second.communicate()
    assert "another job saves into" in said
    assert looks > 3
    assert first.poll() is None
    first.kill()
    first.communicate()
    session.init({})
    try:
        model = smp.DistributedModel(nn.Linear(100, 100))
        assert smp.resume_from_checkpoint(str(tmp_path)) >= 0
        assert model.partitioned
    finally:
        session.shutdown()


def test_workers_that_a_job_has_forked_do_not_keep_its_lock(tmp_path):
    held = FolderLock(tmp_path / LOCK)
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        held.release()  # does nothing here
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        with pytest.raises(CheckpointError, match="another job saves"):
            FolderLock(tmp_path / LOCK)
        os.close(held._descriptor)  # as if this process was killed: only the worker could have the lock now
        FolderLock(tmp_path / LOCK).release()
    finally:
        os.close(writing)
        os.waitpid(worker, 0)
        folder_lock._held.discard(held._descriptor)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_locks(monkeypatch):
    """A file system that has no locks, and seconds that pass faster."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(folder_lock, "_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(folder_lock, "_DEAD_SECONDS", 0.5)
    monkeypatch.setattr(folder_lock, "_RACE_SECONDS", 0.0)


def test_without_locks_a_job_of_another_machine_is_known_by_its_signs_of_life(no_locks, tmp_path):
    path = tmp_path / LOCK
    other = dataclasses.replace(LockHolder.of_this_process(), host="algo-2", machine="another", process=7)
    path.write_text(other.to_json())
    began = time.monotonic()
    FolderLock(path).release()  # nobody has changed it: that job has ended
    assert time.monotonic() - began >= 0.5
    over = threading.Event()

    def live():
        beats = 0
        with path.open("r+b", buffering=0) as file:
            while not over.wait(0.05):
                beats += 1
                os.pwrite(
                    file.fileno(), dataclasses.replace(other, beats=beats).to_json().encode(), 0
                )  # as a holder does

    path.write_text(other.to_json())
    living = threading.Thread(target=live)
    living.start()
    try:
        with pytest.raises(CheckpointError, match=r"process 7 on algo-2"):
            FolderLock(path)
    finally:
        over.set()
        living.join()


def test_without_locks_a_job_of_this_machine_is_known_by_its_process(no_locks, tmp_path, holder, monkeypatch):
    path = tmp_path / LOCK
    with pytest.raises(CheckpointError, match=f"process {holder.pid} on"):
        FolderLock(path)
    holder.kill()
    holder.wait()
    monkeypatch.setattr(folder_lock, "_DEAD_SECONDS", 60.0)
    began = time.monotonic()
    held = FolderLock(path)
    assert time.monotonic() - began < 30.0, "it is known to have ended"
    first = LockHolder.read(path)
    deadline = time.monotonic() + 10
    while LockHolder.read(path) == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert LockHolder.read(path).beats > 0
    held.release()
    assert not path.exists()


def test_a_number_that_another_process_has_by_now_is_not_taken_for_the_job(tmp_path):
    me = LockHolder.of_this_process()
    assert me.has_ended() is False
    assert dataclasses.replace(me, started=me.started - 1).has_ended() is True
    assert dataclasses.replace(me, machine="another").has_ended() is None
    for text in ("", "{", "[]", json.dumps({"host": 1}), me.to_json().replace(str(me.process), '"x"')):
        (tmp_path / "lock").write_text(text)
        assert LockHolder.read(tmp_path / "lock") is None


def test_what_another_job_writes_stays_and_what_dead_ones_left_goes(solo, tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = LockHolder.of_this_process()
    started = folder_lock._started(living.pid)
    owners = {
        "living": dataclasses.replace(me, process=living.pid, started=started),
        "dead": dataclasses.replace(me, process=living.pid, started=started - 1),
        "far": dataclasses.replace(me, machine="another"),
        "far-and-old": dataclasses.replace(me, machine="another"),
    }
    for name, owner in owners.items():
        folder = tmp_path / f".{name}_partial.0123456789abcdef.tmp"
        folder.mkdir()
        (folder / ".owner").write_text(owner.to_json())
        if name == "far-and-old":
            for path in (folder / ".owner", folder):
                os.utime(path, (time.time() - 7200,) * 2)
    (tmp_path / ".older_partial.tmp").mkdir()  # of a release that wrote no owner
    try:
        solo({})
        model = _saving()
        smp.save_checkpoint(str(tmp_path), tag="a", model=model)
    finally:
        living.communicate(b"\n")
    left = sorted(p.name.split("_")[0] for p in tmp_path.glob(".*.tmp"))
    assert left == [".far", ".living"]


def test_two_jobs_do_not_write_one_full_checkpoint(solo, tmp_path):
    solo({})
    model = _saving()
    held = FolderLock(tmp_path / ".w.saving")
    with pytest.raises(
        CheckpointError, match=r"another job saves into .*it holds \.w\.saving.*the former files of that tag stay"
    ):
        smp.save_checkpoint(str(tmp_path), tag="w", partial=False, model=model)
    smp.save_checkpoint(str(tmp_path), tag="other", partial=False, model=model)
    held.release()
    smp.save_checkpoint(str(tmp_path), tag="w", partial=False, model=model)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checksums_other.json", "checksums_w.json", "other", "user_content_other", "user_content_w", "w",
    ]  # fmt: skip
    assert torch.load(tmp_path / "w").keys() == {"weight", "bias"}
