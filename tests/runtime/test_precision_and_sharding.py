"""Half precision, sharded optimizer state, and both: training equals one process that does the same by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from support.models.models import TiedNet, loss_of, token_batch, token_batches
from support.training.rank_training import training_step, updates
from support.training.reference import tokens_alone
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError

BATCH = 8
STEPS = 10
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "lamb": lambda groups: smp.optimizers.FusedLAMB(groups, lr=1e-2),
    "novograd": lambda groups: smp.optimizers.FusedNovoGrad(groups, lr=1e-2, weight_decay=0.01),
    "adam": lambda groups: smp.optimizers.FusedAdam(groups, lr=1e-2, weight_decay=0.01),
    "lars": lambda groups: smp.optimizers.FusedLARS(groups, lr=1.0, weight_decay=0.01, trust_coefficient=0.02),
    "lans": lambda groups: smp.optimizers.FusedLANS(groups, lr=1e-2),
    "muon": lambda groups: smp.optimizers.Muon([{**g, "use_muon": at == 0} for at, g in enumerate(groups)], lr=1e-2),
}
WHOLE = list(itertools.product((1, 2, 4), DTYPES, (False, True), OPTIMIZERS))
#: Every optimizer with sharded state and float32, where its state is compared; of the other axes every pair of values.
SAMPLE = {
    (1, "fp16", False, "adamw"), (1, "bf16", True, "lamb"), (1, "fp32", True, "sgd"),
    (2, "fp32", True, "lamb"), (2, "fp32", False, "lars"), (2, "bf16", True, "adamw"), (2, "fp16", False, "adam"),
    (2, "fp32", True, "novograd"), (2, "fp32", True, "lans"), (2, "fp32", True, "adam"), (2, "fp32", True, "lars"),
    (4, "fp32", True, "adamw"), (4, "fp16", True, "lamb"), (4, "bf16", False, "novograd"),
    (2, "fp16", True, "muon"), (2, "bf16", True, "muon"), (1, "bf16", False, "muon"),
}  # fmt: skip


def _groups(parameters):
    """Two groups with different weight decay, as scripts have."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _train(make, steps):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    # Units of about 200 elements, so that parameters are cut at every place.
    model = smp.DistributedModel(TiedNet(), bucket_cap_mb=800 / 2**20)
    optimizer = smp.DistributedOptimizer(make(_groups(model.parameters())), static_loss_scale=256.0)

    losses = []
    for loss in updates(training_step(model), optimizer, token_batches(0, steps, BATCH)):
        assert not optimizer.overflow
        losses.append(loss)
    return {
        "losses": losses,
        "weights": {name: value.float() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "masters": optimizer.fp16_states().get("masters"),
    }


@pytest.mark.parametrize(
    ("world", "dtype", "sharded", "optimizer"),
    sampled(WHOLE, SAMPLE),
)
def test_training_equals_one_process(ranks, world, dtype, sharded, optimizer):
    config = {"ddp": True, "microbatches": 2, "shard_optimizer_state": sharded}
    if dtype != "fp32":
        config[dtype] = True
    expected = tokens_alone(TiedNet, lambda p: OPTIMIZERS[optimizer](_groups(p)), STEPS, BATCH, half=DTYPES[dtype])
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    for result in ranks(_train, world, OPTIMIZERS[optimizer], STEPS, config=config):
        assert result["losses"] == pytest.approx(expected.losses, rel=tolerance)
        if dtype == "fp32":
            for name, value in expected.weights.items():
                torch.testing.assert_close(result["weights"][name], value, atol=1e-5, rtol=1e-5)
        else:
            assert result["masters"].keys() == expected.weights.keys()
        states = expected.optimizer.state_dict()["state"]
        assert result["optimizer"]["state"].keys() == states.keys()
        for number, state in states.items():
            assert result["optimizer"]["state"][number].keys() == state.keys()
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and dtype == "fp32":
                    torch.testing.assert_close(result["optimizer"]["state"][number][key], value, atol=1e-5, rtol=1e-4)


def _state_bytes():
    """Bytes of parameters, gradients and optimizer state that a rank holds after a step."""
    import smdistributed.modelparallel.torch as smp
    from smp_runtime.tensors.parameter_attributes import get_gradient

    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), bucket_cap_mb=0.5)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 256)).sum().backward()
    gradients = [g for p in model.parameters() if (g := get_gradient(p)) is not None]  # p.grad would gather them
    if model.sharded_state is not None:
        gradients += [g for g in model.sharded_state._shard_gradients if g is not None]
    held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    optimizer.step()
    tensors = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values()), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({}, lambda n: 16),
        ({"shard_optimizer_state": True}, lambda n: 8 + 8 / n),
        ({"bf16": True}, lambda n: 16),
        ({"fp16": True, "shard_optimizer_state": True}, lambda n: 4 + 12 / n),
    ],
    ids=["fp32", "fp32-sharded", "bf16", "fp16-sharded"],
)
@pytest.mark.parametrize("world", [2, 4])
def test_state_bytes_are_within_two_percent_of_the_bound(ranks, world, config, bound):
    for held, elements in ranks(_state_bytes, world, config={"ddp": True, **config}):
        assert held <= 1.02 * bound(world) * elements


def test_shards_are_balanced_to_one_alignment_unit(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(TiedNet(), bucket_cap_mb=800 / 2**20)
        elements = sum(p.numel() for _, p in model.virtual_named_parameters())
        placed = [record.placement.shard for record in model.registry]
        assert sum(stop - start for start, stop in placed) == elements
        return elements, [(unit.shard_elements, unit.filled) for unit in model.sharded_state.units]

    results = ranks(run, 4, config={"ddp": True, "shard_optimizer_state": True})
    assert sum(elements for elements, _ in results) == sum(p.numel() for p in TiedNet().parameters())
    for _, units in results:
        assert len(units) > 1
        # What a rank holds of a unit is an equal share, rounded up to eight elements.
        assert all(0 <= held - filled / 4 < 8 for held, filled in units)


def test_an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Linear(4, 4))
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            static_loss_scale=None,
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 1024.0, "scale_window": 100},
        )

        @smp.step
        def step(x):
            loss = model(x).mean()
            model.backward(loss)
            return loss

        applied, scales = 0, []
        for index in range(20):
            before = model.module.weight.detach().clone()
            optimizer.zero_grad()
            step(torch.full((2, 4), float("inf") if smp.rank() == 1 and index in (3, 7) else 1.0))
            optimizer.step()
            changed = not torch.equal(before, model.module.weight)
            assert optimizer.overflow == optimizer.step_was_skipped == (index in (3, 7)) == (not changed)
            applied += changed
            scales.append(optimizer.loss_scale)
        assert torch.isfinite(model.module.weight).all()
        return applied, scales

    for sharded in (False, True):
        for applied, scales in ranks(run, 2, config={"ddp": True, "fp16": True, "shard_optimizer_state": sharded}):
            assert applied == 18
            assert scales == [1024.0] * 3 + [512.0] * 4 + [256.0] * 13


def test_an_overflow_in_one_ranks_shard_skips_the_step_of_the_other_too(ranks):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

        def forward(self, x, y):
            return (self.first * x).sum() + (self.second * y).sum()

    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Two())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=2.0)
        assert len(list(model.virtual_named_parameters())) == 1  # each rank owns one of the two
        model.backward(model(torch.ones(64), torch.full((64,), float("inf"))))
        optimizer.step()
        return optimizer.overflow, model.module.first.tolist(), model.module.second.tolist()

    for overflow, first, second in ranks(run, 2, config={"ddp": True, "fp16": True, "shard_optimizer_state": True}):
        assert overflow
        assert first == second == [1.0] * 64


@pytest.mark.both_transports
@pytest.mark.parametrize(
    "config", [{"shard_optimizer_state": True}, {"bf16": True}, {"fp16": True, "shard_optimizer_state": True}]
)
def test_clipping_sees_the_whole_gradient(ranks, config):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        model = smp.DistributedModel(TiedNet().train(), bucket_cap_mb=800 / 2**20)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=64.0)

        @smp.step
        def step(ids, targets):
            loss = 100 * loss_of(model(ids), targets)
            model.backward(loss)

        before = {name: v.detach().float().clone() for name, v in model.state_dict().items()}
        step(*token_batch(0, 4))
        norm = optimizer.clip_master_grads(1.0)
        optimizer.step()
        moved = {name: before[name] - v.float() for name, v in model.state_dict().items() if name != "head.weight"}
        return norm, float(torch.stack([m.square().sum() for m in moved.values()]).sum().sqrt())

    torch.manual_seed(0)
    model = TiedNet()
    (100 * loss_of(model(token_batch(0, 4)[0]), token_batch(0, 4)[1])).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for norm, moved in ranks(run, 2, config={"ddp": True, **config}):
        assert norm == pytest.approx(expected, rel=1e-5 if config == {"shard_optimizer_state": True} else 2e-2)
        assert moved == pytest.approx(1.0, rel=1e-4 if config == {"shard_optimizer_state": True} else 5e-2)


@pytest.mark.parametrize(
    ("saved_with", "saved_on", "loaded_with", "loaded_on"),
    [
        ({"shard_optimizer_state": True}, 4, {}, 1),
        ({}, 1, {"shard_optimizer_state": True}, 2),
        ({"bf16": True, "shard_optimizer_state": True}, 2, {"bf16": True}, 4),
        ({"fp16": True}, 2, {"fp16": True, "shard_optimizer_state": True}, 4),
    ],
)
def test_a_checkpoint_loads_with_another_number_of_ranks_and_other_sharding(
    ranks, tmp_path, saved_with, saved_on, loaded_with, loaded_on
):
    def run(path, first, last, load):
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0 if not load else 5)
        model = smp.DistributedModel(TiedNet(), bucket_cap_mb=800 / 2**20)
        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(_groups(model.parameters()), lr=1e-2), static_loss_scale=256.0
        )

        if load:
            smp.resume_from_checkpoint(path)
        losses = []
        for loss in updates(training_step(model), optimizer, token_batches(first, last, BATCH)):
            losses.append(loss)
            if len(losses) == 5 and not load:
                smp.save_checkpoint(path, tag="5")
        return losses

    expected = ranks(run, saved_on, str(tmp_path), 0, 10, False, config={"ddp": True, **saved_with})[0]
    resumed = ranks(run, loaded_on, str(tmp_path), 5, 10, True, config={"ddp": True, **loaded_with})[0]
    tolerance = 1e-5 if "bf16" not in saved_with and "fp16" not in saved_with else 2e-2
    assert resumed == pytest.approx(expected[5:], rel=tolerance)


def test_inputs_and_outputs_of_a_half_precision_model_are_float32(solo):
    solo({"bf16": True})
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2))
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))

        def forward(self, x, *, extra):
            seen.append((x.dtype, extra["ids"].dtype, self.layer.weight.dtype, self.scale.dtype, self.count.dtype))
            return {"y": self.layer(x) * self.scale, "ids": extra["ids"]}

    model = smp.DistributedModel(Net())
    out = model(torch.ones(1, 2), extra={"ids": torch.ones(1, dtype=torch.long)})
    assert seen == [(torch.bfloat16, torch.long, torch.bfloat16, torch.bfloat16, torch.long)]
    assert out["y"].dtype is torch.float32
    assert out["ids"].dtype is torch.long


def test_masters_start_from_the_weights_before_they_were_cast(solo):
    solo({"bf16": True})
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)
    assert not torch.equal(module.weight.float(), before)


def test_masters_keep_what_half_precision_would_lose(solo):
    solo({"bf16": True})
    model = smp.DistributedModel(nn.Linear(1, 1, bias=False))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with torch.no_grad():
        model.load_state_dict({"weight": torch.ones(1, 1)})
    for _ in range(64):
        optimizer.zero_grad()
        model.backward((model(torch.ones(1, 1)) * 1e-3).sum())
        optimizer.step()
    # 64 steps of 0.001: none of them alone moves a bfloat16 of size 1.
    assert model.module.weight.item() == pytest.approx(1 - 0.064, abs=5e-3)


@pytest.mark.parametrize("before_model", [True, False])
def test_the_optimizer_may_be_wrapped_first_and_have_state_already(solo, before_model):
    solo({"bf16": True})
    module = nn.Linear(2, 1)
    inner = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    inner.step()
    if before_model:
        optimizer = smp.DistributedOptimizer(inner)
        model = smp.DistributedModel(module)
    else:
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(inner)
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    updated = optimizer.param_groups[0]["params"][0]
    assert updated.dtype is torch.float32
    assert updated is not module.weight
    assert float(optimizer.state[updated]["step"]) == 2.0
    torch.testing.assert_close(module.weight.float(), updated.detach(), atol=1e-2, rtol=1e-2)


def test_the_scheduler_may_have_the_inner_optimizer(solo):
    solo({"fp16": True})
    model = smp.DistributedModel(nn.Linear(1, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1, gamma=0.5)
    model.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_optimizers_that_need_whole_tensors_are_refused(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(nn.Linear(4, 4))
        with pytest.raises(SMPUserError, match="Adafactor looks at whole tensors"):
            smp.DistributedOptimizer(torch.optim.Adafactor(model.parameters()))

    ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True})
