"""Full checkpoints: the parts of one save belong together, and arrive exactly, at whatever moment they are loaded."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from click.testing import CliRunner
from support.training.checkpoint_training import TOPOLOGIES, Training

import smdistributed.modelparallel.torch as smp
from smp_estimator.cli.main import main
from smp_runtime.checkpoint.files import checksums
from smp_runtime.errors import CheckpointError


@pytest.fixture
def run(solo):
    solo({})
    run = Training()
    run.train(0, 1)
    return run


def _refused(run, path, tag, match):
    before = run.tensors()
    with pytest.raises(CheckpointError, match=match):
        run.resume(str(path), tag, partial=False)
    assert all(torch.equal(a, b) for a, b in zip(before, run.tensors(), strict=True))


def test_float32_weights_and_loss_scale_arrive_in_a_pipeline_before_the_first_step(ranks, tmp_path):
    def save(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 3)
        run.optimizer.loss_scaler.scale = 64.0
        run.save(path, "full.pt", 3, partial=False)
        losses = run.train(3, 5)
        return losses, {name: p.detach().clone() for name, p in run.model.virtual_named_parameters()}

    def resumed(path):
        from support.training.checkpoint_training import Training

        run = Training(seed=9)
        assert run.resume(path, "full.pt", partial=False) == 3
        assert run.optimizer.loss_scale == 64.0
        rates = [group["lr"] for group in run.optimizer.param_groups]
        run.optimizer.param_groups[0]["weight_decay"] = 0.1
        losses = run.train(3, 5)
        assert rates == pytest.approx([3e-3 / 1.3, 2e-3 / 1.3])
        return losses, {name: p.detach().clone() for name, p in run.model.virtual_named_parameters()}

    world, config = TOPOLOGIES["pp2"]
    # The sum of two gradients is the same in either order, and that of the first steps depends on time.
    config = {**config, "fp16": True, "microbatches": 2}
    expected = ranks(save, world, str(tmp_path), config=config)
    for (losses, masters), (losses_here, masters_here) in zip(
        expected, ranks(resumed, world, str(tmp_path), config=config), strict=True
    ):
        assert losses == losses_here
        assert masters.keys() == masters_here.keys()
        for name, value in masters.items():
            assert torch.equal(value, masters_here[name]), name


def test_a_loss_scale_is_taken_before_the_model_is_partitioned(ranks):
    def loaded():
        from support.training.checkpoint_training import Training

        run = Training()
        saved = {**run.optimizer.loss_scaler.state_dict(), "scale": 32.0}
        run.optimizer.load_fp16_states({"masters": {}, "loss_scaler": saved})
        return run.optimizer.loss_scale

    world, config = TOPOLOGIES["pp2"]
    assert ranks(loaded, world, config={**config, "fp16": True}) == [32.0] * 2


def test_other_parameter_groups_are_refused_before_anything_is_loaded(run, tmp_path):
    run.save(str(tmp_path), "w", 1, partial=False)
    run.train(1, 2)
    run.optimizer.add_param_group({"params": [run.model.module.scale], "lr": 0.0})
    _refused(run, tmp_path, "w", r"has 2 groups with \[\d+, \d+\] parameters, but the optimizer has \[\d+, \d+, 1\]")
    torch.save({"no": "state"}, tmp_path / "w_optimizer")
    _refused(run, tmp_path, "w", "holds no state of an optimizer")
    run.smp.resume_from_checkpoint(str(tmp_path), tag="w", partial=False, load_optimizer=False)


def test_an_optimizer_file_that_one_rank_cannot_read_is_refused_on_all(ranks, tmp_path):
    def damaged(path):
        import shutil

        from support.training.checkpoint_training import Training

        run = Training()
        mine = f"{path}/{run.smp.rank()}"
        run.train(0, 1)
        run.save(path, "w", 1, partial=False)
        shutil.copytree(path, mine, ignore=shutil.ignore_patterns("0", "1"))
        if run.smp.rank() == 1:
            with open(f"{mine}/w_optimizer", "wb") as file:
                file.write(b"cut")
        before = [value.clone() for value in run.model.module.state_dict().values()]
        run.train(1, 2)
        after = [value.clone() for value in run.model.module.state_dict().values()]
        with pytest.raises(CheckpointError, match="w_optimizer cannot be read"):
            run.resume(mine, "w", partial=False)
        assert not all(map(torch.equal, before, after))
        assert all(map(torch.equal, run.model.module.state_dict().values(), after))

    ranks(damaged, 2, str(tmp_path), config={"ddp": True}, timeout=30)


@pytest.mark.parametrize("tag", ["w", "pytorch_model.bin", "model.safetensors"])
def test_files_of_two_saves_are_not_taken_for_one_checkpoint(run, tmp_path, tag):
    pytest.importorskip("safetensors")
    run.save(str(tmp_path / "a"), tag, 1, partial=False)
    run.train(1, 2)
    run.save(str(tmp_path / "b"), tag, 2, partial=False)
    for name in (tag, f"{tag}_optimizer", f"user_content_{tag}"):
        own = (tmp_path / "b" / name).read_bytes()
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
        _refused(run, tmp_path / "b", tag, "of another save than")
        (tmp_path / "b" / name).write_bytes(own)
    assert run.resume(str(tmp_path / "b"), tag, partial=False) == 2
    # Files from elsewhere have no id, and no checksum.
    (tmp_path / "b" / f"checksums_{tag}.json").unlink()
    torch.save(run.optimizer.state_dict(), tmp_path / "b" / f"{tag}_optimizer")
    assert run.resume(str(tmp_path / "b"), tag, partial=False) == 2


def _flip(file, place):
    content = bytearray(file.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("hashed", ["xxh3_128", "sha256"])
@pytest.mark.parametrize("tag", ["w", "model.safetensors"])
def test_a_flipped_bit_is_found_in_every_region_of_every_file(run, tmp_path, monkeypatch, tag, hashed):
    pytest.importorskip("safetensors")
    if hashed == "sha256":
        monkeypatch.setattr(checksums, "_xxhash", lambda: None)
    else:
        pytest.importorskip("xxhash")
    run.save(str(tmp_path), tag, 1, partial=False)
    manifest = json.loads((tmp_path / f"checksums_{tag}.json").read_text())
    assert all(record["checksum"].startswith(f"{hashed}:") for record in manifest["files"].values())
    verify = ["checkpoint", "verify", str(tmp_path)]
    assert CliRunner().invoke(main, verify).output.split() == ["whole", tag, "(full)"]
    assert run.resume(str(tmp_path), tag, partial=False) == 1
    for name in (tag, f"{tag}_optimizer", f"user_content_{tag}", f"checksums_{tag}.json"):
        own = (tmp_path / name).read_bytes()
        for place in (0.0, 0.1, 0.35, 0.6, 0.85, 1.0):
            _flip(tmp_path / name, place)
            found = CliRunner().invoke(main, verify)
            assert found.exit_code == 1, (name, place)
            assert name in found.output, (name, place)
            _refused(run, tmp_path, tag, None)
            if place == 0.6:  # convert reads the weights alone
                out = [
                    "--to",
                    "safetensors",
                    str(tmp_path / tag),
                    str(tmp_path.parent / f"{tmp_path.name}-{name}.safetensors"),
                ]
                done = CliRunner().invoke(main, ["checkpoint", "convert", *out])
                assert (done.exit_code != 0) == (name in (tag, f"checksums_{tag}.json")), (name, done.output)
            (tmp_path / name).write_bytes(own)
    run.resume(str(tmp_path), tag, partial=False)
    (tmp_path / f"user_content_{tag}").unlink()  # it may be left out
    assert "is missing" in CliRunner().invoke(main, verify).output


def test_checksums_of_older_newer_and_other_saves(run, tmp_path, caplog):
    run.save(str(tmp_path), "w", 1, partial=False)
    file = tmp_path / "checksums_w.json"
    own = file.read_text()
    data = {**json.loads(own), "format": 2, "library": "9.1"}
    file.write_text(json.dumps(data))
    _refused(run, tmp_path, "w", r"format 2, of version 9\.1")
    file.unlink()  # as older releases have saved it
    assert run.resume(str(tmp_path), "w", partial=False) == 1
    found = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path / "w")])
    assert (found.exit_code, "nothing was compared" in found.output) == (1, True)
    run.train(1, 2)
    run.save(str(tmp_path), "w", 2, partial=False)
    file.write_text(own)  # an older release has replaced all other files
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert run.resume(str(tmp_path), "w", partial=False) == 2
    assert "of another save than w" in caplog.text


def test_verify_looks_at_both_kinds(run, tmp_path):
    run.save(str(tmp_path), "w", 1, partial=False)
    run.save(str(tmp_path), "w", 1)
    found = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path)])
    assert (found.exit_code, "whole w (full)" in found.output, "whole w_partial" in found.output) == (0, True, True)
    _flip(tmp_path / "w_optimizer", 0.5)
    for tag in ([], ["--tag", "w"]):
        found = CliRunner().invoke(main, ["checkpoint", "verify", str(tmp_path), *tag])
        assert (found.exit_code, "broken w (full)" in found.output, "whole w_partial" in found.output) == (
            1,
            True,
            True,
        )


def test_a_resumed_state_does_not_lie_in_the_file(run, tmp_path):
    run.save(str(tmp_path), "w", 1, partial=False)
    run.resume(str(tmp_path), "w", partial=False)
    (tmp_path / "w_optimizer").write_bytes(b"")  # a mapped tensor would end the process
    run.train(1, 2)


def test_a_save_without_optimizer_leaves_none_of_an_earlier_one(run, tmp_path):
    run.save(str(tmp_path), "w", 1, partial=False)
    assert (tmp_path / "w_optimizer").exists()
    model = run.model
    del run.optimizer, run.scheduler
    import gc

    gc.collect()
    smp.save_checkpoint(str(tmp_path), tag="w", partial=False, model=model)
    assert not (tmp_path / "w_optimizer").exists()


@pytest.mark.parametrize(("topology", "precision"), [("s2", "bf16"), ("o2", "fp32"), ("pp2-tp2", "bf16")])
def test_only_the_rank_that_writes_holds_the_whole(ranks, tmp_path, topology, precision):
    def held(path):
        from support.training.checkpoint_training import Training

        import smdistributed.modelparallel.torch as smp

        run = Training()
        run.train(0, 1)
        gathered = []
        shards = run.model.sharded_state
        if shards is not None:
            gather = shards.gather_whole
            shards.gather_whole = lambda *a, **k: gathered.append(gather(*a, **k)) or gathered[-1]
        weights, state = run.model.state_to_save(), run.optimizer.full_state_dict(gather_to_rank0=True)
        everyone = run.model.state_dict(), run.optimizer.full_state_dict()
        if smp.rank() == 0:
            assert list(weights) == list(everyone[0])
            assert all(map(torch.equal, weights.values(), everyone[0].values()))
            assert state.keys() == everyone[1].keys()
            assert state["state"].keys() == everyone[1]["state"].keys()
            masters = [found["fp16_states"]["masters"] for found in (state, everyone[1]) if "fp16_states" in found]
            assert not masters or masters[0].keys() == masters[1].keys()
        else:
            assert (weights, state) == ({}, {})
        half = len(gathered) // 2
        return [len(found) for found in gathered[:half]], [len(found) for found in gathered[half:]]

    world, config = TOPOLOGIES[topology]
    first, *others = ranks(
        held, world, str(tmp_path), config=config if precision == "fp32" else {**config, precision: True}
    )
    assert all(first[0]) == all(first[1])
    for taking_part, whole in others:
        assert not any(taking_part)
        assert all(whole)
