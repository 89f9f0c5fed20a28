"""Resuming while another job saves the same tag: what is loaded is of one save."""

from __future__ import annotations

import os
import shutil
import time
from unittest import mock

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import find_checkpoint, save_and_resume
from smp_runtime.errors import CheckpointError
from smp_runtime.job import session


class _One:
    """A model whose whole state is one number."""

    def __init__(self) -> None:
        self.model = smp.DistributedModel(nn.Linear(3, 2))

    @torch.no_grad()
    def fill(self, number: float) -> None:
        for parameter in self.model.module.parameters():
            parameter.fill_(number)

    def numbers(self) -> set[float]:
        return {
            float(value) for parameter in self.model.module.parameters() for value in parameter.detach().reshape(-1)
        }

    def resumed(self, path, tag=None) -> int:
        self.fill(0)
        content = smp.resume_from_checkpoint(str(path), tag=tag)
        assert self.numbers() == {float(content)}
        return content


@pytest.fixture
def one(solo, tmp_path):
    """A model, and two checkpoints of one tag, in two folders."""
    solo({})
    one = _One()
    for number in (1, 2):
        one.fill(number)
        smp.save_checkpoint(str(tmp_path / str(number)), tag="a", user_content=number)
    return one


def _replace(tmp_path) -> None:
    """As the other job does: the former goes away, and the new one has its name."""
    if (tmp_path / "2" / "a_partial").exists():
        (tmp_path / "1" / "a_partial").rename(tmp_path / "1" / ".a_partial.old")
        (tmp_path / "2" / "a_partial").rename(tmp_path / "1" / "a_partial")
        shutil.rmtree(tmp_path / "1" / ".a_partial.old")


@pytest.mark.parametrize("tag", [None, "a"])
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (find_checkpoint, "find_uncovered", False),
        (find_checkpoint, "missing_files", False),
        (find_checkpoint, "verify", False),
        (find_checkpoint, "verify", True),
        (save_and_resume, "read_user_content", False),
        (save_and_resume, "read_user_content", True),
    ],
)
def test_replaced_at_any_moment_it_is_one_of_the_two(one, tmp_path, owner, name, after, tag):
    original = getattr(owner, name)

    def replacing(*args, **options):
        if not after:
            _replace(tmp_path)
        found = original(*args, **options)
        if after:
            _replace(tmp_path)
        return found

    with mock.patch.object(owner, name, replacing):
        try:
            assert one.resumed(tmp_path / "1", tag) in (1, 2)
        except CheckpointError as error:  # the files were removed before they were opened
            assert one.numbers() == {0.0}
            assert "cannot be read" in str(error)
    assert one.resumed(tmp_path / "1", tag) == 2


def test_a_checkpoint_that_is_replaced_while_it_is_looked_at_is_looked_for_again(one, tmp_path):
    original = find_checkpoint.missing_files
    with mock.patch.object(
        find_checkpoint, "missing_files", lambda *a, **o: (_replace(tmp_path), original(*a, **o))[1]
    ):
        assert one.resumed(tmp_path / "1", "a") == 2


def test_a_job_that_saves_all_the_time_is_never_mixed_with_itself(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            session.init({})
            other = _One()
            for number in range(1, 10_000):
                other.fill(number)
                smp.save_checkpoint(str(tmp_path), tag="a", user_content=number)
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
            one, found, tries, deadline = _One(), set(), 0, time.monotonic() + 60
            while (tries < 40 or len(found) < 2) and time.monotonic() < deadline:
                tries += 1
                try:
                    found.add(one.resumed(tmp_path))
                except CheckpointError:
                    assert one.numbers() == {0.0}
            assert len(found) > 1
        finally:
            session.shutdown()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reading)
