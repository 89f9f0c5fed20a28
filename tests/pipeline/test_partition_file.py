"""A partition goes from job to job: a relative partition_file lies where a job keeps files beyond its end."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.assignment import Assignment

DECISION = Assignment(2, {"": 1, "0": 0})
OTHER = Assignment(2, {"": 0, "0": 1})


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folders of a job, whose script runs in its code."""
    for name in ("code", "checkpoints", "data"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "code")
    monkeypatch.setenv("SMP_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("SM_OUTPUT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path


def test_a_relative_path_goes_to_the_checkpoints_and_to_the_output(job):
    assert DECISION.save("parts/p.json") == [
        job / "checkpoints" / "parts" / "p.json",
        job / "data" / "parts" / "p.json",
    ]
    assert os.listdir(job / "code") == []
    assert Assignment.load("parts/p.json") == DECISION
    (job / "checkpoints" / "parts" / "p.json").unlink()
    assert Assignment.load("parts/p.json") == DECISION


def test_without_checkpoints_there_is_the_output(job):
    (job / "checkpoints").rmdir()
    assert DECISION.save("p.json") == [job / "data" / "p.json"]


def test_a_file_that_comes_with_the_code_is_found(job):
    (job / "data").rmdir()
    DECISION.save(job / "code" / "p.json")
    assert Assignment.load("p.json") == DECISION
    OTHER.save(job / "checkpoints" / "p.json")
    assert Assignment.load("p.json") == OTHER, "what the last job wrote goes first"


def test_an_absolute_path_is_meant_as_it_is(job):
    assert DECISION.save(job / "there.json") == [job / "there.json"]
    assert Assignment.load(str(job / "there.json")) == DECISION


def test_outside_of_a_job_it_is_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SMP_CHECKPOINT_DIR", "SM_OUTPUT_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    DECISION.save("p.json")
    assert os.listdir(tmp_path) == ["p.json"]


def test_what_is_missing_or_cannot_be_written_is_told_with_the_folders(job):
    with pytest.raises(
        SMPUserError, match=r"'p\.json' cannot be read .*looked for in .*checkpoints, .*data, "
    ) as caught:
        Assignment.load("p.json")
    assert "a checkpoint_s3_uri that both jobs have" in str(caught.value)
    (job / "file").touch()
    with pytest.raises(SMPUserError, match=r"partition_file cannot be written to .*file/p\.json"):
        DECISION.save(job / "file" / "p.json")


def _stages():
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    smp.step(lambda x: model(x).sum())(torch.ones(2, 4))
    return [model.assignment.stage_of(path) for path in ("", "0", "1")]


def test_a_second_job_with_the_same_checkpoints_takes_the_first_one_s_partition(ranks, tmp_path):
    environ = {"SMP_CHECKPOINT_DIR": str(tmp_path / "checkpoints"), "SM_OUTPUT_DATA_DIR": str(tmp_path / "first")}
    (tmp_path / "checkpoints").mkdir()
    settings = {"partitions": 2, "partition_file": "p.json"}
    first = ranks(_stages, 2, config={**settings, "auto_partition": False, "default_partition": 0}, env=environ)
    assert first == [[0, 0, 0]] * 2
    environ["SM_OUTPUT_DATA_DIR"] = str(tmp_path / "second")
    assert ranks(_stages, 2, config={**settings, "load_partition": True}, env=environ) == first
