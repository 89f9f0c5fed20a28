"""What models and optimizers have besides plain weights: buffers, extra state, ties, translated names, flat groups."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from support.training.checkpoint_training import TOPOLOGIES
from support.training.rank_training import training_step, updates
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_estimator.cli.main import main
from smp_runtime.errors import CheckpointError

GPT2 = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 33}


class Counting(nn.Linear):
    """A layer with a state of its own making."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def _normed(path, save):
    """Running statistics, their counters, and an extra state, after two steps or as they are resumed."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0 if save else 1)
    net = nn.Sequential(Counting(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    if save:
        for seed in range(2):
            step(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)))
            optimizer.step()
        smp.save_checkpoint(path, tag="1")
    else:
        smp.resume_from_checkpoint(path)
        if smp.pp_size() > 1:
            model.eval()
            with torch.no_grad():
                smp.step(lambda x: model(x))(torch.randn(8, 6))
    return dict(model.state_dict())


@pytest.mark.parametrize(("source", "target"), [("pp2", "one"), ("one", "pp2"), ("s2", "o2")])
def test_buffers_and_extra_state(ranks, tmp_path, source, target):
    saved = ranks(_normed, TOPOLOGIES[source][0], str(tmp_path), True, config=TOPOLOGIES[source][1])[0]
    for loaded in ranks(_normed, TOPOLOGIES[target][0], str(tmp_path), False, config=TOPOLOGIES[target][1]):
        assert loaded.keys() == saved.keys()
        assert loaded["0._extra_state"]["calls"] >= saved["0._extra_state"]["calls"] > 0
        for name, value in saved.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(loaded[name], value), name
    assert saved["1.num_batches_tracked"] > 0


def _loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def _language(path, tag, first, last, divided):
    """Train a small GPT-2, distributed or as it is, and save; or go on from a checkpoint."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.module_conversion.huggingface.gpt2 import NAMES

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**GPT2, **rates)
    torch.manual_seed(0 if first == 0 else 5)
    plain = GPT2LMHeadModel(config)
    with smp.tensor_parallelism(enabled=divided):
        model = smp.DistributedModel(GPT2LMHeadModel(config))
    model.load_state_dict(NAMES.to_ours(plain.state_dict()) if divided else plain.state_dict())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    if first:
        assert smp.resume_from_checkpoint(path, tag=tag) == first
    batches = (
        (torch.randint(0, 33, (8, 6), generator=torch.Generator().manual_seed(index)),) for index in range(first, last)
    )
    losses = list(updates(training_step(model, _loss), optimizer, batches))
    smp.save_checkpoint(path, tag=f"{smp.size()}-{last}", user_content=last)
    return losses


def test_a_distributed_hugging_face_model_resumes_as_the_original_and_back(ranks, tmp_path):
    """Names differ, weights are transposed and cut; weights and moments are translated."""
    expected = ranks(_language, 1, str(tmp_path / "alone"), None, 0, 9, False, config={})[0]
    split = {"ddp": True, "tensor_parallel_degree": 2}
    first = ranks(_language, 1, str(tmp_path), None, 0, 3, False, config={})[0]
    second = ranks(_language, 2, str(tmp_path), "1-3", 3, 6, True, config=split)[0]
    third = ranks(_language, 1, str(tmp_path), "2-6", 6, 9, False, config={})[0]
    assert first + second + third == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("how", ["saved", "saved in the background", "converted", "converted in float32"])
def test_flat_groups_are_what_tools_for_sharded_checkpoints_read(ranks, tmp_path, how):
    """Rank i's part of each parameter, one after the other, put together without the library."""

    def save(path, how):
        import os

        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 2)
        if how.startswith("saved"):
            os.environ["SMP_CHECKPOINT_LAYOUT"] = "flat_groups"
        try:
            run.save(path, "1", 2, async_save="background" in how)
        finally:
            os.environ.pop("SMP_CHECKPOINT_LAYOUT", None)
        state = run.optimizer.full_state_dict()
        masters = run.model.state_dict() if "float32" in how else state["fp16_states"]["masters"]
        names = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
        return {name: value.clone() for name, value in masters.items() if name in names}

    world, config = TOPOLOGIES["s4"]
    config = {**config, "bf16": "float32" not in how}
    expected = ranks(save, world, str(tmp_path), how, config=config)[0]
    folder = tmp_path / "1_partial"
    if "converted" in how:
        assert "fp32_flat_groups" not in torch.load(folder / "optimizer_0.pt", weights_only=True)
        outcome = CliRunner().invoke(
            main, ["checkpoint", "convert", str(folder), str(tmp_path / "out"), "--to", "flat_groups"]
        )
        assert outcome.exit_code == 0, outcome.output
        folder = tmp_path / "out"
        assert (folder / "user_content.pt").is_file()
    states = [torch.load(folder / f"optimizer_{i}.pt", weights_only=True) for i in range(4)]
    assert [state["partition_count"] for state in states] == [4] * 4
    shapes = {n: list(v.shape) for n, v in torch.load(folder / "model_0.pt", weights_only=True)["module"].items()}
    found = {}
    for number, names in enumerate(state := states[0]["param_shapes"]):
        offset = 0
        for name, shape in names.items():
            assert shapes[name] == shape
            elements = torch.Size(shape).numel()
            part = -(-elements // 4)
            parts = [state["fp32_flat_groups"][number][offset : offset + part] for state in states]
            found[name] = torch.cat(parts)[:elements].view(shape)
            offset += part
        assert all(offset == len(state["fp32_flat_groups"][number]) for state in states)
    assert len(state) == 2
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_flat_groups_are_refused_where_there_are_none_and_so_is_a_layout_that_does_not_exist(
    solo, tmp_path, monkeypatch
):
    solo({})
    model = smp.DistributedModel(nn.Linear(3, 3))
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    smp.save_checkpoint(str(tmp_path), tag="1")
    words = ["checkpoint", "convert", str(tmp_path), str(tmp_path / "out"), "--to", "flat_groups"]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code != 0
    assert "degrees sharded 1, tensor 1, pipeline 1" in " ".join(outcome.output.split())
    monkeypatch.setenv("SMP_CHECKPOINT_LAYOUT", "flat")
    with pytest.raises(CheckpointError, match="SMP_CHECKPOINT_LAYOUT is 'flat'.*set held, the default, or flat_groups"):
        smp.save_checkpoint(str(tmp_path), tag="2")


def test_a_full_checkpoint_with_the_optimizer_goes_from_and_to_any_topology(ranks, tmp_path):
    """And is what one process of plain PyTorch has."""

    def save(path):
        from support.training.checkpoint_training import Training

        run = Training()
        run.train(0, 3)
        run.save(path, "full.pt", 3, partial=False)
        return run.train(3, 6)

    def resumed(path):
        from support.training.checkpoint_training import Training

        run = Training(seed=9)
        assert run.resume(path, "full.pt", partial=False) == 3
        return run.train(3, 6)

    for source, targets in (("pp2-tp2", ["one", "pp2-s2"]), ("s2-dp2", ["pp2-tp2"])):
        path = str(tmp_path / source)
        expected = ranks(save, TOPOLOGIES[source][0], path, config=TOPOLOGIES[source][1])[0]
        for target in targets:
            for losses in ranks(resumed, TOPOLOGIES[target][0], path, config=TOPOLOGIES[target][1]):
                assert losses == pytest.approx(expected, abs=1e-5), (source, target)
        from support.training.checkpoint_training import Net, groups

        net = Net()
        net.load_state_dict(torch.load(f"{path}/full.pt", weights_only=True))
        plain = torch.optim.AdamW(groups(net))
        plain.load_state_dict(torch.load(f"{path}/full.pt_optimizer", weights_only=True))
        for parameter, values in plain.state.items():
            assert values["exp_avg"].shape == parameter.shape


def test_names_that_older_helper_scripts_read(solo):
    from support.training.checkpoint_training import Training

    import smdistributed.modelparallel.torch as smp

    solo({})
    run = Training()
    run.train(0, 1)
    names = smp.state.param_index_to_name_tp_group[0]
    indices = smp.state.param_name_to_index_tp_group[0]
    assert indices == {name: index for index, name in names.items()}
    by_id = run.optimizer._param_id_to_index()
    for name, parameter in run.model.named_parameters():
        assert (name in indices) == parameter.requires_grad
        if parameter.requires_grad:
            assert by_id[id(parameter)] == indices[name]
    state = run.optimizer.save_optimizer_backcompat(gather_if_shard=True)
    run.optimizer.load_optimizer_backcompat(state, False)


def _bare_gpt2(path, distributed, loads):
    import transformers as hf

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(3 if loads else 4)
    with smp.tensor_parallelism(distributed):
        module = hf.GPT2Model(hf.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=8, vocab_size=12))
    model = smp.DistributedModel(module.eval())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if loads:
        smp.resume_from_checkpoint(path)
    ids = torch.arange(12).view(2, 6) % 12
    loss = model(ids).last_hidden_state[..., :3].square().mean()
    model.backward(loss)
    optimizer.step()
    if not loads:
        smp.save_checkpoint(path, tag="1")
    with torch.no_grad():
        return model(ids).last_hidden_state, float(loss.detach())


@pytest.mark.parametrize("first", [True, False])
def test_a_distributed_model_without_a_head_and_its_original_load_each_other(ranks, tmp_path, first):
    config = {"tensor_parallel_degree": 2, "ddp": True}
    path = str(tmp_path / "checkpoints")
    setups = {True: (2, config), False: (1, {})}
    world, config = setups[first]
    states = ranks(_bare_gpt2, world, path, first, False, config=config, timeout=100)
    world, config = setups[not first]
    again = ranks(_bare_gpt2, world, path, not first, True, config=config, timeout=100)
    assert again[0][1] == pytest.approx(float(states[0][0][..., :3].square().mean()), rel=1e-4)
