"""Checkpoints: whole or absent, resumed to the same numbers."""

from __future__ import annotations

import argparse
import math
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.models import VOCABULARY, TiedNet, token_batch
from support.training.rank_training import training_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.checkpoint import object_files as objects
from smp_runtime.checkpoint.folder_lock import LOCK
from smp_runtime.errors import CheckpointError, SMPUserError


def _setup(dropout=0.0):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(TiedNet(), nn.Dropout(dropout)).double())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(100 + smp.rank())

    step = training_step(model)

    def train(first, last):
        losses = []
        for index in range(first, last):
            ids, targets = token_batch(index, 4)
            half = slice(smp.dp_rank() * 2, smp.dp_rank() * 2 + 2) if smp.dp_size() == 2 else slice(None)
            optimizer.zero_grad()
            losses.append(float(step(ids[half], targets[half]).reduce_mean()))
            optimizer.step()
        return losses

    return model, optimizer, train


def test_a_resumed_run_continues_as_if_never_stopped(ranks, tmp_path):
    """Weights, optimizer and every rank's random numbers (dropout is on) are the same as without the stop."""

    def uninterrupted():
        _, _, train = _setup(dropout=0.2)
        return train(0, 8)

    def stopped(path):
        import smdistributed.modelparallel.torch as smp

        _, _, train = _setup(dropout=0.2)
        losses = train(0, 5)
        smp.save_checkpoint(path, tag="five", user_content={"step": 5, "nested": [1, {"x": torch.ones(2)}]})
        return losses

    def resumed(path):
        import smdistributed.modelparallel.torch as smp

        _, _, train = _setup(dropout=0.2)
        torch.manual_seed(77)
        content = smp.resume_from_checkpoint(path)
        return train(content["step"], 8)

    expected = ranks(uninterrupted, 2, config={"ddp": True})
    before = ranks(stopped, 2, str(tmp_path), config={"ddp": True})
    after = ranks(resumed, 2, str(tmp_path), config={"ddp": True})
    assert [b + a for b, a in zip(before, after, strict=True)] == expected
    assert (tmp_path / "newest").read_text() == "five_partial"
    assert {p.name for p in (tmp_path / "five_partial").iterdir()} == {
        "manifest.json",
        "model_0.pt",
        "optimizer_0.pt",
        "rng_0.pt",
        "rng_1.pt",
        "user_content.pt",
    }


def test_a_checkpoint_of_two_ranks_resumes_on_one(ranks, solo, tmp_path):
    def save(path):
        import smdistributed.modelparallel.torch as smp

        _, _, train = _setup()
        train(0, 3)
        smp.save_checkpoint(path, tag="3")
        return train(3, 6)

    halves = ranks(save, 2, str(tmp_path), config={"ddp": True})
    expected = [sum(pair) / 2 for pair in zip(*halves, strict=True)]
    solo({})
    _, _, train = _setup()
    smp.resume_from_checkpoint(str(tmp_path), tag="3")
    assert train(3, 6) == pytest.approx(expected, abs=1e-9)


@pytest.fixture
def trained(solo):
    solo({})
    model, optimizer, train = _setup()
    train(0, 1)
    return model, optimizer, train


def test_a_full_checkpoint_is_plain_weights(trained, tmp_path):
    model, _, _ = trained
    smp.save_checkpoint(str(tmp_path), tag="weights.pt", partial=False, user_content={"a": 1})
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(state) == list(model.state_dict())
    plain = nn.Sequential(TiedNet(), nn.Dropout()).double()
    plain.load_state_dict(state)
    with torch.no_grad():
        model.module[0].norm.bias.zero_()
    assert smp.resume_from_checkpoint(str(tmp_path), tag="weights.pt", partial=False) == {"a": 1}
    torch.testing.assert_close(model.module[0].norm.bias, plain[0].norm.bias)


def test_a_plain_file_of_another_library_loads_through_a_translation(trained, tmp_path):
    model, _, _ = trained
    state = {f"hf.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    content = smp.resume_from_checkpoint(
        str(tmp_path),
        tag="pytorch_model.bin",
        partial=False,
        load_optimizer=False,
        translate_function=lambda s: {name.removeprefix("hf."): value for name, value in s.items()},
    )
    assert content is None
    assert not model.module[0].norm.weight.any()


def test_only_the_wanted_number_is_kept_and_the_newest_named(trained, tmp_path):
    for tag in ("1", "2", "3", "2"):
        smp.save_checkpoint(str(tmp_path), tag=tag, num_kept_partial_checkpoints=2)
    smp.wait_for_checkpoint()
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, "2_partial", "3_partial", "newest"]
    assert (tmp_path / "newest").read_text() == "2_partial"


def test_a_tag_or_a_folder_name_resumes_and_a_wrong_one_names_the_others(trained, tmp_path):
    smp.save_checkpoint(str(tmp_path), tag="one", user_content=1)
    smp.save_checkpoint(str(tmp_path), tag="two", user_content=2)
    assert smp.resume_from_checkpoint(str(tmp_path)) == 2
    assert smp.resume_from_checkpoint(str(tmp_path), tag="one") == 1
    assert smp.resume_from_checkpoint(str(tmp_path), tag="one_partial") == 1
    with pytest.raises(CheckpointError, match="one_partial, two_partial"):
        smp.resume_from_checkpoint(str(tmp_path), tag="three")
    with pytest.raises(CheckpointError, match="'newest' is missing"):
        smp.resume_from_checkpoint(str(tmp_path / "nowhere"))


def test_an_empty_user_content_is_tolerated_where_nothing_is_lost(trained, tmp_path):
    smp.save_checkpoint(str(tmp_path), tag="one")
    (tmp_path / "one_partial" / "user_content.pt").write_bytes(b"")
    assert smp.resume_from_checkpoint(str(tmp_path)) is None
    smp.save_checkpoint(str(tmp_path), tag="two", user_content={"a": 1})
    (tmp_path / "two_partial" / "user_content.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"user_content.pt has 0 bytes, but [\d,]+ were saved.*tag='one_partial'"):
        smp.resume_from_checkpoint(str(tmp_path), tag="two")


def test_content_that_could_run_code_is_refused_when_saved_and_the_former_stays(trained, tmp_path):
    smp.save_checkpoint(str(tmp_path), tag="good", user_content="fine")
    with pytest.raises(CheckpointError, match=r"rank 0: SMPUserError: user_content .*\(of time.localtime\).*__dict__"):
        smp.save_checkpoint(str(tmp_path), tag="bad", user_content={"time": time.localtime})
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK, "good_partial", "newest"]
    assert smp.resume_from_checkpoint(str(tmp_path)) == "fine"


def test_a_rank_that_cannot_write_fails_the_save_on_all(ranks, tmp_path):
    def run(path):
        import smdistributed.modelparallel.torch as smp
        from smp_runtime.checkpoint import save_partial as saving

        model, _, _ = _setup()
        smp.save_checkpoint(path, tag="good", model=model)
        original = saving.write_recorded

        def full_disk(content, file):
            if smp.rank() == 1:
                raise OSError(28, "No space left on device")
            return original(content, file)

        saving.write_recorded = full_disk
        try:
            with pytest.raises(CheckpointError, match="rank 1: OSError.*No space left"):
                smp.save_checkpoint(path, tag="bad")
        finally:
            saving.write_recorded = original

    ranks(run, 2, str(tmp_path), config={"ddp": True})
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != LOCK) == ["good_partial", "newest"]


def test_hosts_with_folders_of_their_own_each_keep_them_in_order(ranks, tmp_path):
    def run(path):

        import smdistributed.modelparallel.torch as smp

        os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) + 1}"
        smp.init({"ddp": True})
        model, _, _ = _setup()
        mine = f"{path}/{os.environ['SMP_HOST']}"
        smp.save_checkpoint(mine, tag="a")
        smp.save_checkpoint(mine, tag="b", num_kept_partial_checkpoints=1, user_content={"tag": "b"})
        with torch.no_grad():
            model.module[0].norm.bias.fill_(5.0)
        assert smp.resume_from_checkpoint(mine) == {"tag": "b"}
        assert not model.module[0].norm.bias.eq(5.0).any()
        smp.wait_for_checkpoint()

    ranks(run, 2, str(tmp_path), init=False)
    for host, rng in (("algo-1", "rng_0.pt"), ("algo-2", "rng_1.pt")):
        assert sorted(p.name for p in (tmp_path / host).iterdir() if p.name != LOCK) == ["b_partial", "newest"]
        assert (tmp_path / host / "b_partial" / rng).exists()
        assert (tmp_path / host / "b_partial" / "model_0.pt").exists()


def test_hosts_that_disagree_about_the_newest_resume_the_same(ranks, tmp_path):
    def run(path):
        import shutil

        import smdistributed.modelparallel.torch as smp

        os.environ["SMP_HOST"] = f"algo-{int(os.environ['RANK']) + 1}"
        smp.init({"ddp": True})
        model, _, _ = _setup()
        mine = f"{path}/{os.environ['SMP_HOST']}"
        for tag in ("1", "2"):
            smp.save_checkpoint(mine, tag=tag, user_content=tag)
        if smp.rank() == 1:  # killed between the two hosts' renames
            with open(f"{mine}/newest", "w") as file:
                file.write("1_partial")
            shutil.rmtree(f"{mine}/2_partial")
        smp.barrier()
        return smp.resume_from_checkpoint(mine), model is not None

    assert ranks(run, 2, str(tmp_path), init=False) == [("1", True)] * 2


@pytest.mark.parametrize("partial", [True, False])
def test_whatever_fails_on_one_rank_is_told_to_all(ranks, tmp_path, partial):
    def run(path, partial):
        import smdistributed.modelparallel.torch as smp

        model, _, _ = _setup()
        with pytest.raises(CheckpointError, match="rank 0: .*(pickle|lambda)"):
            smp.save_checkpoint(path, tag="t", partial=partial, user_content={"f": lambda: 0})
        assert model.partitioned

    ranks(run, 2, str(tmp_path), partial, config={"ddp": True}, timeout=20)


def test_save_and_load_of_one_object(trained, tmp_path):
    name = str(tmp_path / "object.pt")
    smp.save({"x": torch.ones(2)}, name)
    smp.save({"x": torch.zeros(2)}, name, partial=False)
    smp.save({"x": torch.zeros(2)}, name, v3=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["object.pt", "object.pt_0", "object.pt_0_0_0"]
    assert smp.load(name)["x"].tolist() == [1, 1]
    assert smp.load(name, partial=False)["x"].tolist() == [0, 0]
    with pytest.raises(SMPUserError, match="as a string"):
        smp.save({}, tmp_path / "object.pt")
    with pytest.raises(CheckpointError, match=r"holds \['object.pt'"):
        smp.load(str(tmp_path / "other.pt"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("pickle_module", [None, pickle])
def test_what_was_on_another_rank_s_gpu_comes_to_this_one_s_device(trained, tmp_path, monkeypatch, pickle_module):
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
        smp.save(torch.arange(3), str(tmp_path / "of_gpu_3.pt"))
    found = smp.load(str(tmp_path / "of_gpu_3.pt"), pickle_module=pickle_module)
    assert found.tolist() == [0, 1, 2]
    assert found.device.type == "cpu"
    # The device of this rank could be any: here one whose tensors a test can have.
    locate, storage = objects.map_to_own_device(torch.device("meta")), torch.ones(2).untyped_storage()
    assert locate(storage, "cuda:3").device.type == locate(storage, "cuda").device.type == "meta"
    assert locate(storage, "cpu") is None


class Own:
    """An object of a script's own class."""

    def __init__(self):
        self.lr = 1


def _what_scripts_keep():
    import transformers

    return {
        "cli_args": argparse.Namespace(lr=1, out=Path("/opt/ml/model")),
        "model_config": transformers.GPT2Config(n_layer=3, torch_dtype="float16"),
        "generation": transformers.GenerationConfig(max_length=7),
        "num_params": 5,
    }


def test_what_public_scripts_keep_is_saved_and_read_safely(trained, tmp_path):
    import transformers

    content = _what_scripts_keep()
    smp.save_checkpoint(str(tmp_path), tag="1", user_content=content)
    found = smp.resume_from_checkpoint(str(tmp_path), tag="1")
    assert found["cli_args"] == content["cli_args"]
    assert type(found["model_config"]) is transformers.GPT2Config
    for name in ("model_config", "generation"):
        assert found[name].to_dict() == content[name].to_dict()
    before = torch.serialization.get_safe_globals()
    assert transformers.GPT2Config not in before

    class Disguised(transformers.GPT2Config):
        """Not one of Transformers', whatever it says."""

    Disguised.__module__, Disguised.__qualname__ = "transformers.models.gpt2.configuration_gpt2", "os"
    with pytest.raises(CheckpointError, match="cannot be saved"):
        smp.save_checkpoint(str(tmp_path), tag="2", user_content={"config": Disguised()})
    with pytest.raises(CheckpointError, match=r"could not be loaded back safely \(of .*Own\)"):
        smp.save_checkpoint(str(tmp_path), tag="3", user_content={"own": Own()})


def test_one_object_may_hold_arrays_and_others_are_named(trained, tmp_path):
    name = str(tmp_path / "object.pt")
    smp.save({"loss": np.float64(0.5), "mask": np.arange(3), "when": np.datetime64("2020-01-01")}, name)
    loaded = smp.load(name)
    assert loaded["loss"] == 0.5 and loaded["mask"].tolist() == [0, 1, 2]  # noqa: PT018
    for options in ({}, {"pickle_protocol": 4}):
        smp.save({"args": Own()}, name, **options)
        with pytest.raises(CheckpointError, match=r"object that may run code .*; if you trust.*pickle_module=pickle"):
            smp.load(name)
        assert smp.load(name, pickle_module=pickle)["args"].lr == 1
    whole = (tmp_path / "object.pt_0").read_bytes()
    for damaged in (whole[:-30], b"something else"):
        (tmp_path / "object.pt_0").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read .* it was cut, damaged"):
            smp.load(name)


@pytest.mark.parametrize("tag", ["", "a/b", ".hidden"])
def test_tags_that_cannot_be_file_names(trained, tmp_path, tag):
    with pytest.raises(SMPUserError, match="file name"):
        smp.save_checkpoint(str(tmp_path), tag=tag)


def test_a_full_model_that_is_asked_for_by_itself_has_no_optimizer_beside_it(trained, tmp_path):
    model, optimizer, _ = trained
    smp.save_checkpoint(str(tmp_path), tag="a.pt", partial=False, model=model)
    assert not (tmp_path / "a.pt_optimizer").exists()
    smp.save_checkpoint(str(tmp_path), tag="b.pt", partial=False)
    smp.save_checkpoint(str(tmp_path), tag="c.pt", partial=False, model=model, optimizer=optimizer)
    assert (tmp_path / "b.pt_optimizer").read_bytes()
    assert (tmp_path / "c.pt_optimizer").read_bytes()


def _load_behind_a_resume(path):
    """Weights of zeros, loaded after a resume that waits for the first step; runs on every stage."""
    import smdistributed.modelparallel.torch as smp

    _, _, train = _setup()
    train(0, 1)
    smp.save_checkpoint(path, tag="one", partial=False)
    smp.shutdown()
    smp.init(STAGES)
    model, _, train = _setup()
    smp.resume_from_checkpoint(path, tag="one", partial=False)
    with pytest.raises(SMPUserError, match="between a checkpoint's load and the first step"):
        model.state_dict()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.module.state_dict().items()})
    return train(1, 2)[0]


STAGES = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}


def test_a_state_that_is_loaded_behind_a_resume_counts(ranks, tmp_path):
    for loss in ranks(_load_behind_a_resume, 2, str(tmp_path), config=STAGES):
        assert loss == pytest.approx(math.log(VOCABULARY), abs=1e-9)  # all logits are zero
