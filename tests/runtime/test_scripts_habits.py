"""What scripts do around the loop: load at odd moments, discard models, skip steps, unfreeze, go on after errors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


def _linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


@pytest.mark.parametrize("when", ["before the optimizer", "through the module", "through a submodule"])
@pytest.mark.parametrize("config", [{"bf16": True}, {"bf16": True, "shard_optimizer_state": True}])
def test_loaded_weights_are_what_training_goes_on_from(ranks, config, when):
    def run(when):
        import smdistributed.modelparallel.torch as smp

        module = _linear()
        state = {name: torch.full_like(value, 1.001) for name, value in module.state_dict().items()}
        model = smp.DistributedModel(module)
        if when == "before the optimizer":
            model.load_state_dict(state)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
        if when == "through the module":
            model.get_module().load_state_dict(state)
        elif when == "through a submodule":
            model.module[0].load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]})
        model.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        return model.module[0].weight.float().mean().item(), [
            p.float().mean().item() for _, p in model.virtual_named_parameters()
        ]

    for weight, masters in ranks(run, 2, when, config={"ddp": True, **config}):
        assert weight == pytest.approx(1.0, abs=1e-2)
        if when == "before the optimizer":  # a float32 state is not rounded on its way to the masters
            assert masters == [pytest.approx(1.001, abs=1e-4)] * len(masters)


def test_a_state_that_one_rank_loaded_reaches_the_others_by_the_next_step(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for value in (3.0, 4.0):
            if smp.rdp_rank() == 0:
                model.load_state_dict({name: torch.full_like(v, value) for name, v in model.state_dict().items()})
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert all(torch.all(p == value) for p in model.parameters())

    ranks(run, 2, config={"ddp": True})


@pytest.mark.parametrize("config", [{}, {"pipeline_parallel_degree": 2, "microbatches": 2}])
def test_a_state_that_one_rank_loaded_reaches_the_others_by_the_first_evaluation(ranks, config):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        model.eval()

        @smp.step
        def evaluate(x):
            return model(x).sum()

        if smp.rdp_rank() == 0:
            model.load_state_dict({name: torch.full_like(v, 1.0) for name, v in _linear().state_dict().items()})
        with torch.no_grad():
            found = [float(evaluate(torch.ones(2, 4)).reduce_sum())]
        if smp.rdp_rank() == 1:  # no replica waits for another one to evaluate, even where gradients are not turned off
            found.append(float(evaluate(torch.ones(2, 4)).reduce_sum().detach()))
        return found

    world = 4 if config else 2
    found = ranks(run, world, config={"ddp": True, **config}, timeout=60)
    assert sorted(found) == [[42.0]] * (world // 2) + [[42.0, 42.0]] * (world // 2)


def test_several_models_keep_their_order_and_discarded_ones_are_freed(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        models = [smp.DistributedModel(nn.Linear(1, 1)) for _ in range(6)]

        @smp.step
        def step(x):
            for index, model in enumerate(smp.state.models):
                model.backward((model(x) * (index + 1)).sum())

        for _ in range(3):
            for index in range(6):
                models[index].zero_grad()
            step(torch.ones(1, 1))
            assert [model.module.bias.grad.item() for model in models] == [1, 2, 3, 4, 5, 6]
        parameter = weakref.ref(models[0].module.weight)
        del models
        gc.collect()
        assert parameter() is None
        assert smp.state.models == []

    ranks(run, 2, config={"ddp": True})


def test_an_fp16_checkpoint_goes_on_in_bf16_with_gradients_of_the_right_size(ranks, tmp_path):
    def run(path, load):
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), static_loss_scale=256.0)
        if not load:
            smp.save_checkpoint(path, tag="1")
            return None
        smp.resume_from_checkpoint(path)
        before = [p.detach().clone() for _, p in model.virtual_named_parameters()]
        model.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        return max(
            (b - p).abs().max().item() for b, (_, p) in zip(before, model.virtual_named_parameters(), strict=True)
        )

    ranks(run, 2, str(tmp_path), False, config={"ddp": True, "fp16": True})
    for config in ({"bf16": True}, {"shard_optimizer_state": True}):
        moved = max(ranks(run, 2, str(tmp_path), True, config={"ddp": True, **config}))
        assert 5e-4 < moved < 5e-3  # with the scale it would be 256 times as much


def test_a_saved_half_precision_optimizer_brings_masters_and_scale_along(solo, tmp_path):
    solo({"fp16": True})
    model = smp.DistributedModel(_linear())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), dynamic_loss_scale=True, init_scale=2.0**15
    )
    model.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    smp.save(optimizer.local_state_dict(), str(tmp_path / "optimizer"))
    masters = [p.optimized.detach().clone() for p in optimizer._optimizer_shards]
    optimizer.loss_scaler.scale = 1.0
    for shard in optimizer._optimizer_shards:
        shard.optimized.data.zero_()
    optimizer.load_state_dict(smp.load(str(tmp_path / "optimizer")))
    assert optimizer.loss_scale == 2.0**15
    assert all(torch.equal(p.optimized, m) for p, m in zip(optimizer._optimizer_shards, masters, strict=True))
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert not optimizer.state


def test_a_rank_loads_its_own_shard_back(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        shard = optimizer.local_state_dict(gather_if_shard=False)
        optimizer.load_state_dict(shard)
        assert optimizer.optimizer.state_dict()["state"].keys() == shard["state"].keys()

    ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True})


@pytest.mark.parametrize("config", [{}, {"bf16": True}, {"shard_optimizer_state": True}])
def test_gradients_of_a_skipped_step_are_gone_after_zero_grad(ranks, config):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.backward(model(torch.full((1, 4), float("nan"))).sum())
        optimizer.clip_master_grads(1.0)
        model.zero_grad()  # the script saw the NaN and does not step
        model.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())

    ranks(run, 2, config={"ddp": True, **config})


def test_a_backward_that_raises_does_not_end_reduction_for_ever(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())

        def fail(_):
            raise KeyError("in backward")

        handle = model.module[0].bias.register_hook(fail)
        with pytest.raises(KeyError):
            model(torch.ones(1, 4)).sum().backward()
        handle.remove()
        for _ in range(2):
            model.zero_grad()
            (model(torch.ones(1, 4)).sum() * (smp.rank() + 1)).backward()
            assert model.module[1].bias.grad.item() == 1.5

    ranks(run, 2, config={"ddp": True})


@pytest.mark.parametrize("config", [{}, {"shard_optimizer_state": True}, {"bf16": True}])
def test_what_cannot_follow_is_refused(ranks, config):
    def run():
        import smdistributed.modelparallel.torch as smp

        module = _linear()
        module[0].bias.requires_grad_(False)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(SMPUserError, match="leave assign at False"):
            model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(SMPUserError, match="cast it before"):
            model.to(torch.float64)
        if model.optimizer_shards is not None:
            with pytest.raises(SMPUserError, match="use one optimizer"):
                smp.DistributedOptimizer(torch.optim.SGD(model.module[1].parameters(), lr=0.1))
        module[0].bias.requires_grad_(True)
        with pytest.raises(SMPUserError, match=r"0\.bias was frozen"):
            model(torch.ones(1, 4))
        assert optimizer is not None

    ranks(run, 2, config={"ddp": True, **config})


def test_an_optimizer_over_two_half_precision_models_is_refused(solo):
    solo({"bf16": True})
    models = [smp.DistributedModel(nn.Linear(1, 1)) for _ in range(2)]
    with pytest.raises(SMPUserError, match="two wrapped models"):
        smp.DistributedOptimizer(torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1))


def test_joining_in_bf16_keeps_replicas_equal_and_in_fp16_is_refused(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        if smp.state.cfg.fp16:
            with pytest.raises(SMPUserError, match="agree on overflows"), model.join():
                pass
            return None
        for _ in range(2):
            with model.join():
                for index in range(2 + smp.rank()):
                    optimizer.zero_grad()
                    model.backward(model(torch.full((1, 4), 0.1 * index + smp.rank())).square().sum())
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = ranks(run, 2, config={"ddp": True, "bf16": True}, timeout=30)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    ranks(run, 2, config={"ddp": True, "fp16": True})


def test_torchs_scaler_works_with_sharded_state(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_linear())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = smp.amp.GradScaler(init_scale=8.0)
        before = model.module[1].bias.item()
        for value, moved in ((1.0, 0.1), (float("inf"), 0.0)):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 4), value)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert before - model.module[1].bias.item() == pytest.approx(moved, abs=1e-6)
            before = model.module[1].bias.item()
        return scaler.get_scale()

    assert ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True}) == [4.0, 4.0]


def test_contexts_of_delayed_creation_follow_on_each_other(solo):
    solo({})
    torch.manual_seed(3)
    expected = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    after = torch.randn(2)
    torch.manual_seed(3)
    layers = []
    for _ in range(3):
        with smp.delay_param_initialization():
            layers.append(nn.Linear(3, 3))
    model = smp.DistributedModel(nn.ModuleList(layers))
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(torch.randn(2), after)


def test_buffers_of_every_type_are_copied_to_replicas(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        module = nn.Linear(1, 1)
        kinds = (torch.bool, torch.int16, torch.int64, torch.uint8, torch.complex64, torch.float16)
        for kind in kinds:
            module.register_buffer(str(kind).split(".")[1], torch.full((3,), smp.rank() + 1).to(kind))
        smp.DistributedModel(module)
        return [buffer.tolist() for buffer in module.buffers()]

    first, second = ranks(run, 2, config={"ddp": True})
    assert first == second


def test_inputs_of_the_script_stay_as_they_were(solo):
    import collections

    solo({"bf16": True})

    class Net(nn.Module):
        def forward(self, batch):
            return batch["x"] * 1

    given = collections.OrderedDict(x=torch.ones(2))
    smp.DistributedModel(Net())(given)
    assert given["x"].dtype is torch.float32
