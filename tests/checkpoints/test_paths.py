"""A path that is none of this machine's is refused, wherever a script gives one: nothing is written beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_config.errors import ConfigError
from smp_config.formats.values import why_no_path
from smp_config.parameters import ModelParallelParameters
from smp_runtime.errors import SMPUserError

ADDRESSES = [
    "s3://bucket/run",
    "S3://bucket/run",
    Path("s3://bucket/run"),
    "https://host/run",
    "hdfs:/run",
    "file:///run",
]
NO_PATHS = [*ADDRESSES, "", " ", None, 3, b"run", "a\0b"]
PATHS = ["run", "./s3", "/run/a", "a:b", "x/s3:/y", "C:/run", Path("run"), ".", "s3:bucket"]

CALLS = {
    "save_checkpoint": lambda path, **_: smp.save_checkpoint(path, tag="1"),
    "a full one": lambda path, **_: smp.save_checkpoint(path, tag="1", partial=False),
    "resume_from_checkpoint": lambda path, **_: smp.resume_from_checkpoint(path),
    "of a full one": lambda path, **_: smp.resume_from_checkpoint(path, tag="1", partial=False),
    "auto_resume": lambda path, model, optimizer: smp.auto_resume(model, optimizer, folder=path),
    "save": lambda path, **_: smp.save({}, path),
    "load": lambda path, **_: smp.load(path),
    "save whole": lambda path, **_: smp.save({}, path, partial=False),
}


@pytest.mark.parametrize("path", NO_PATHS)
def test_what_is_no_path_is_told(path):
    assert why_no_path(path)


@pytest.mark.parametrize("path", PATHS)
def test_paths_are_paths(path):
    assert why_no_path(path) is None


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", ["s3://bucket/run", ""])
def test_every_call_refuses_it(solo, tmp_path, monkeypatch, call, path):
    monkeypatch.chdir(tmp_path)
    solo({})
    model = smp.DistributedModel(nn.Linear(2, 2))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SMPUserError, match=path or "names nothing"):
        CALLS[call](path, model=model, optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["save_checkpoint", "a full one", "resume_from_checkpoint", "of a full one"])
@pytest.mark.parametrize("path", [None, 3, b"run"])
def test_checkpoints_refuse_what_is_no_text(solo, tmp_path, monkeypatch, call, path):
    monkeypatch.chdir(tmp_path)
    solo({})
    with pytest.raises(SMPUserError, match=type(path).__name__):
        CALLS[call](path)
    assert list(tmp_path.iterdir()) == []


def test_transformers_save_refuses_it(solo, tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    solo({})
    small = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    smp.set_tensor_parallelism(small)
    model = smp.DistributedModel(small)
    with pytest.raises(SMPUserError, match="s3://bucket/run"):
        model.save_pretrained("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_partition_file_refuses_it():
    with pytest.raises((ConfigError, ValueError), match="s3://bucket/partition"):
        ModelParallelParameters(partition_file="s3://bucket/partition")
