"""Damage, missing files, other models: refused by name before anything is loaded, or answered by the one before."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
import torch
from support.training.checkpoint_training import TOPOLOGIES, Training
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint.files.manifest import whole_checkpoints
from smp_runtime.errors import CheckpointError, SMPUserError


@pytest.fixture
def two(solo, tmp_path):
    """A run with two checkpoints, 1 and 2; and everything that it has."""
    solo({})
    run = Training()
    run.train(0, 1)
    run.save(str(tmp_path), "1", 1)
    run.train(1, 2)
    run.save(str(tmp_path), "2", 2)
    run.train(2, 3)
    return run


def _refused(run, path, match, **options):
    """Resuming says why not, and has loaded nothing."""
    before = run.tensors()
    with pytest.raises(CheckpointError, match=match) as caught:
        run.resume(str(path), **options)
    assert all(torch.equal(a, b) for a, b in zip(before, run.tensors(), strict=True))
    return str(caught.value)


def _flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [_flip, _truncate, lambda file: file.unlink()], ids=["flip", "truncate", "remove"])
@pytest.mark.parametrize("file", ["model_0.pt", "optimizer_0.pt", "rng_0.pt", "user_content.pt", "manifest.json"])
def test_damage_is_refused_by_name_and_the_one_before_is_used(two, tmp_path, caplog, file, damage):
    damage(tmp_path / "2_partial" / file)
    if (tmp_path / "2_partial" / "manifest.json").exists() and file == "manifest.json":
        # Any change of the text is noticed when it is no JSON any more, or says other things than the files.
        (tmp_path / "2_partial" / file).write_text("{")
    said = _refused(two, tmp_path, file.replace(".", r"\."), tag="2")
    assert "tag='1_partial'" in said
    with caplog.at_level(logging.WARNING, logger="smp"):
        logging.getLogger("smp").propagate = True
        assert two.resume(str(tmp_path)) == 1
    assert file in caplog.text
    assert "1_partial instead" in caplog.text


def test_without_a_whole_one_nothing_is_loaded(two, tmp_path):
    for tag in ("1", "2"):
        _flip(tmp_path / f"{tag}_partial" / "model_0.pt")
    said = _refused(two, tmp_path, "no other whole checkpoint")
    assert said.count("model_0.pt has other content") == 2


def test_a_folder_that_is_synced_half_is_passed_over(two, tmp_path):
    """As S3 may leave it: ``newest`` and the manifest are there, a file is not; or the folder came without ``newest``."""
    (tmp_path / "2_partial" / "optimizer_0.pt").unlink()
    assert [found.name for found in whole_checkpoints(tmp_path)] == ["1_partial"]
    assert two.resume(str(tmp_path)) == 1
    (tmp_path / "newest").unlink()
    assert two.resume(str(tmp_path)) == 1


def test_times_of_files_do_not_matter(two, tmp_path):
    """Copied from elsewhere they have the times of the copy."""
    import os

    for found in tmp_path.glob("1_partial"):
        os.utime(found)
    (tmp_path / "newest").unlink()
    assert two.resume(str(tmp_path)) == 2


def test_missing_files_of_ranks(ranks, solo, tmp_path):
    world, config = TOPOLOGIES["s4"]

    def save(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 1)
        run.save(path, "1", 1)

    ranks(save, world, str(tmp_path), config=config)
    solo({})
    run = Training()
    (tmp_path / "1_partial" / "optimizer_2.pt").unlink()
    _refused(run, tmp_path, r"optimizer_2\.pt is missing")
    # A rank that needs none of it does not mind.
    (tmp_path / "1_partial" / "rng_3.pt").unlink()
    _refused(run, tmp_path, r"optimizer_2\.pt is missing")


def test_a_wrong_tag_names_the_others(two, tmp_path):
    _refused(two, tmp_path, "'three'.*1_partial, 2_partial", tag="three")
    shutil.rmtree(tmp_path / "2_partial")
    assert two.resume(str(tmp_path)) == 1
    _refused(two, tmp_path / "nowhere", "'newest' is missing")


class _Other(nn.Module):
    def __init__(self, hidden=4, extra=False):
        super().__init__()
        self.one = nn.Linear(4, hidden)
        self.two = nn.Linear(hidden, 4)
        if extra:
            self.more = nn.Linear(2, 2)

    def forward(self, x):
        return self.two(self.one(x))


def _job(config, path, saved, loaded, **options):
    """Save one model, resume with another; returns what the second one's weights are."""
    from smp_runtime.job import session

    session.init(config)
    try:
        model = smp.DistributedModel(saved)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        smp.save_checkpoint(str(path), tag="1", user_content="x")
        del model, optimizer
        model = smp.DistributedModel(loaded)
        optimizer = smp.DistributedOptimizer(options.pop("optimizer", torch.optim.AdamW)(model.parameters()))
        assert smp.resume_from_checkpoint(str(path), **options) == "x"
        return model, optimizer
    finally:
        session.shutdown()


def test_another_model_is_refused_with_names_and_shapes(tmp_path):
    with pytest.raises(CheckpointError, match=r"one.weight is \[5, 4\] here and \[4, 4\] there"):
        _job({}, tmp_path, _Other(), _Other(5))
    with pytest.raises(CheckpointError, match=r"lacks more.weight, more.bias"):
        _job({}, tmp_path, _Other(), _Other(extra=True))
    with pytest.raises(CheckpointError, match=r"it has more.weight, more.bias, which the model has not"):
        _job({}, tmp_path, _Other(extra=True), _Other())


def test_not_strict_loads_what_has_the_same_name(tmp_path):
    saved = _Other()
    loaded = _Other(extra=True)
    more = loaded.more.weight.detach().clone()
    model, optimizer = _job({}, tmp_path, saved, loaded, strict=False)
    assert torch.equal(model.module.one.weight, saved.one.weight)
    assert torch.equal(model.module.more.weight, more)
    assert len(optimizer.state) == 4
    _job({}, tmp_path, _Other(extra=True), _Other(), strict=False)
    with pytest.raises(CheckpointError, match="other shapes"):
        _job({}, tmp_path, _Other(), _Other(5), strict=False)


def test_another_grouping_of_the_optimizer_is_refused_or_left_out(tmp_path):
    def grouped(parameters):
        parameters = list(parameters)
        return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])

    with pytest.raises(CheckpointError, match=r"has 1 groups with \[4\] parameters, but the optimizer has \[1, 3\]"):
        _job({}, tmp_path, _Other(), _Other(), optimizer=grouped)
    saved = _Other()
    model, optimizer = _job({}, tmp_path, saved, _Other(), optimizer=grouped, load_optimizer=False)
    assert torch.equal(model.module.two.weight, saved.two.weight)
    assert not optimizer.state


def test_only_masters_and_the_loss_scale(ranks, tmp_path):
    def run(path):
        from support.training.checkpoint_training import Training

        first = Training()
        first.train(0, 2)
        first.optimizer.loss_scaler.scale = 64.0
        first.save(path, "1", 2)
        masters = {name: p.detach().clone() for name, p in first.model.virtual_named_parameters()}
        first.train(2, 4)
        first.optimizer.loss_scaler.scale = 8.0
        moments = [v["exp_avg"].clone() for v in first.optimizer.state.values()]
        first.resume(path, load_sharded_optimizer_state=False)
        for name, parameter in first.model.virtual_named_parameters():
            assert torch.equal(parameter, masters[name]), name
        assert first.optimizer.loss_scale == 64.0
        for now, before in zip(first.optimizer.state.values(), moments, strict=True):
            assert torch.equal(now["exp_avg"], before)

    world, config = TOPOLOGIES["s2"]
    ranks(run, world, str(tmp_path), config={**config, "fp16": True})


class _Anything:
    def __reduce__(self):
        return (print, ("code ran",))


def test_user_content_is_data_unless_it_is_trusted(two, tmp_path, capsys):
    content = {
        "numbers": [1, 2.5, 1j, None, True, {"set"}, (b"x",)],
        "arrays": [np.arange(3), np.float32(2.0), np.array(["a"]), np.random.default_rng(0).bytes(3)],
        "tensors": (torch.ones(2), torch.bfloat16),
        "generator": np.random.get_state(legacy=False),
    }
    smp.save_checkpoint(str(tmp_path), tag="3", user_content=content)
    loaded = smp.resume_from_checkpoint(str(tmp_path))
    assert loaded["numbers"] == content["numbers"]
    assert loaded["arrays"][0].tolist() == [0, 1, 2]
    assert loaded["generator"]["state"]["pos"] == content["generator"]["state"]["pos"]
    with pytest.raises(CheckpointError, match="trust_user_content=True"):
        smp.save_checkpoint(str(tmp_path), tag="4", user_content=[_Anything()])
    with pytest.raises(CheckpointError, match="trust_user_content=True"):
        smp.save_checkpoint(str(tmp_path), tag="4", user_content=np.array([_Anything()], dtype=object))
    smp.save_checkpoint(str(tmp_path), tag="4", user_content=[_Anything()], trust_user_content=True)
    capsys.readouterr()
    before = two.tensors()
    with pytest.raises(CheckpointError, match="may run code.*trust_user_content=True"):
        smp.resume_from_checkpoint(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, two.tensors(), strict=True))
    assert "code ran" not in capsys.readouterr().out
    smp.resume_from_checkpoint(str(tmp_path), trust_user_content=True)
    assert "code ran" in capsys.readouterr().out


def test_an_asynchronous_full_save_is_refused(two, tmp_path):
    with pytest.raises(SMPUserError, match="async_save is for partial"):
        smp.save_checkpoint(str(tmp_path), tag="f", partial=False, async_save=True)
