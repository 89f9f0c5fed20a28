"""Full checkpoints are replaced as a whole: killed after any step, or on a full disk, the former one or the new one loads."""

from __future__ import annotations

import errno
import os
import time
from unittest import mock

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import full_transaction
from smp_runtime.errors import CheckpointError
from smp_runtime.job import session

#: What changes names on the disk, one after the other, while a checkpoint is saved.
_STEPS = ("rename", "replace", "unlink", "mkdir")


class _One:
    """A model and an optimizer whose state is one number."""

    def __init__(self) -> None:
        self.model = smp.DistributedModel(nn.Linear(3, 2))
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def fill(self, number: float) -> None:
        for parameter in self.model.module.parameters():
            parameter.fill_(number)
            self.optimizer.state[parameter]["momentum_buffer"].fill_(number)

    def numbers(self) -> set[float]:
        parameters = list(self.model.module.parameters())
        moments = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
        return {float(value) for tensor in (*parameters, *moments) for value in tensor.detach().reshape(-1)}

    def save(self, path, tag, number, **options) -> None:
        self.fill(number)
        smp.save_checkpoint(str(path), tag=tag, partial=False, user_content=number, **options)

    def resumed(self, path, tag) -> int:
        self.fill(0)
        content = smp.resume_from_checkpoint(str(path), tag=tag, partial=False)
        assert self.numbers() == {float(content)}
        return content


@pytest.fixture
def one(solo):
    solo({})
    return _One()


def _killed_at(step: int, save) -> bool:
    """Save in a child that dies before its ``step``-th change of a name; returns whether it came that far."""
    child = os.fork()
    if child == 0:
        count = 0

        def dying(original):
            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count > step:
                    os._exit(9)
                return original(*args, **kwargs)

            return call

        try:
            for name in _STEPS:
                setattr(os, name, dying(getattr(os, name)))
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("tag", ["w", "model.safetensors"])
def test_killed_before_any_change_of_a_name_one_of_the_two_loads(one, tmp_path, tag):
    pytest.importorskip("safetensors")
    one.save(tmp_path, tag, 1)
    found, step = [], 0
    while _killed_at(step, lambda: one.save(tmp_path, tag, 2)):
        found.append(one.resumed(tmp_path, tag))
        names = {p.name for p in tmp_path.iterdir() if not p.name.startswith(".")}
        assert {tag, f"{tag}_optimizer", f"user_content_{tag}"} <= names
        one.save(tmp_path, tag, 1)
        assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")], "nothing is left"
        step += 1
    assert set(found) == {1, 2}
    assert found == sorted(found), "once it is published, it is the new one"


def test_what_a_killed_job_has_published_is_moved_by_the_next_that_reads_or_converts(one, tmp_path):
    from smp_runtime.checkpoint.full.conversion import full_weights

    one.save(tmp_path, "w", 1)
    with mock.patch.object(full_transaction, "finish"):
        one.save(tmp_path, "w", 2)
    assert torch.load(tmp_path / "w")["weight"].eq(1).all()
    assert full_weights(tmp_path / "w", None).value("weight").eq(2).all()
    assert one.resumed(tmp_path, "w") == 2


def test_where_the_rest_cannot_be_moved_it_is_said(one, tmp_path):
    one.save(tmp_path, "w", 1)
    with mock.patch.object(full_transaction, "finish"):
        one.save(tmp_path, "w", 2)
    refuse = mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    with (
        mock.patch.object(os, "replace", refuse),
        pytest.raises(CheckpointError, match="Read-only file system.*make .* writable"),
    ):
        smp.resume_from_checkpoint(str(tmp_path), tag="w", partial=False)


@pytest.mark.parametrize("failing", ["write_bytes", "write_whole"])
def test_a_full_disk_between_the_files_leaves_the_former(one, tmp_path, failing):
    from smp_runtime.checkpoint import full_checkpoint

    one.save(tmp_path, "w", 1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with (
        mock.patch.object(full_checkpoint, failing, full),
        pytest.raises(CheckpointError, match="former files .* stay"),
    ):
        one.save(tmp_path, "w", 2)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert one.resumed(tmp_path, "w") == 1
    (tmp_path / "first").mkdir()
    with mock.patch.object(full_checkpoint, failing, full), pytest.raises(CheckpointError):
        one.save(tmp_path / "first", "w", 2)
    assert list((tmp_path / "first").iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_replaced(one, tmp_path):
    one.save(tmp_path, "w", 1)
    (tmp_path / "user_content_w").unlink()
    (tmp_path / "user_content_w").mkdir()
    with pytest.raises(CheckpointError, match="user_content_w is a folder"):
        one.save(tmp_path, "w", 2)
    (tmp_path / "user_content_w").rmdir()
    one.fill(0)
    assert smp.resume_from_checkpoint(str(tmp_path), tag="w", partial=False) is None
    assert one.numbers() == {1.0}


def test_shards_of_an_earlier_save_go_with_it(one, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    from smp_runtime.checkpoint.files import transformers_format

    original = transformers_format.write_transformers
    in_shards = lambda *args, **options: original(*args, largest_file=20, **options)  # noqa: E731
    with mock.patch("smp_runtime.checkpoint.full_checkpoint.write_transformers", in_shards):
        one.save(tmp_path, "model.safetensors", 1)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert one.resumed(tmp_path, "model.safetensors") == 1
    one.save(tmp_path, "model.safetensors", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checksums_model.safetensors.json", "model.safetensors", "model.safetensors_optimizer",
        "user_content_model.safetensors",
    ]  # fmt: skip
    assert one.resumed(tmp_path, "model.safetensors") == 2


def test_while_another_job_saves_the_same_tag_weights_optimizer_and_content_are_of_one_save(tmp_path):
    """Every look opens the files of one save, however they are replaced meanwhile."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            session.init({})
            one = _One()
            for number in range(1, 10_000):
                one.save(tmp_path, "w", number)
                if number == 1:
                    os.write(writing, b"x")
                time.sleep(0.02)  # less than a training step, but time to read something on a loaded machine
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        session.init({})
        try:
            one = _One()
            found, tries, deadline = set(), 0, time.monotonic() + 60
            while (tries < 40 or len(found) < 2) and time.monotonic() < deadline:
                tries += 1
                try:
                    found.add(one.resumed(tmp_path, "w"))
                except CheckpointError:
                    assert one.numbers() == {0.0}
            assert len(found) > 1
        finally:
            session.shutdown()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
