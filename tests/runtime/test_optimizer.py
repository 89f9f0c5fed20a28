"""The optimizer wrapper: a real torch optimizer, to schedulers too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError
from smp_runtime.optim.loss_scaling import DynamicLossScaler


@pytest.fixture
def pair(solo):
    solo({})
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Linear(2, 1))
    return model, smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def _train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_it_is_an_optimizer_that_shares_everything_with_the_inner_one(pair):
    model, optimizer = pair
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    before = model.module.weight.detach().clone()
    _train(model, optimizer, 1)
    torch.testing.assert_close(model.module.weight, before - 0.5)
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["lr"] == 0.5
    assert not optimizer.overflow
    assert not optimizer.step_was_skipped
    optimizer.clip_master_grads(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=10, cycle_momentum=False),
    ],
)
def test_schedulers_change_the_learning_rate_that_is_used(pair, make):
    model, optimizer = pair
    reference = nn.Linear(2, 1)
    reference.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    mine, theirs = make(optimizer), make(plain)
    for _ in range(4):
        _train(model, optimizer, 1)
        mine.step()
        plain.zero_grad()
        reference(torch.ones(1, 2)).sum().backward()
        plain.step()
        theirs.step()
    assert mine.get_last_lr() == theirs.get_last_lr()
    torch.testing.assert_close(model.module.weight, reference.weight)


def test_state_round_trip(pair):
    model, optimizer = pair
    _train(model, optimizer)
    partial = optimizer.local_state_dict()
    assert partial["_smp_is_partial"] is True
    other = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    other.load_state_dict(partial)
    assert other.param_groups[0]["lr"] == 0.5
    momentum = other.state[model.module.weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, optimizer.state[model.module.weight]["momentum_buffer"])
    assert "_smp_is_partial" not in other.state_dict()


def test_closures_and_step_hooks_run(pair):
    model, optimizer = pair
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert called == ["post"]


def test_loss_scaling_arguments_are_checked(solo):
    solo({})
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = smp.DistributedOptimizer(
        inner, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 7}
    )
    assert optimizer.loss_scale_args["scale_window"] == 7
    assert optimizer.loss_scale_args["init_scale"] == 2**32
    assert smp.DistributedOptimizer(inner, min_scale=2).loss_scale_args["min_scale"] == 2
    with pytest.raises(SMPUserError, match=r"unknown loss scaling arguments \['scale_windw'\]"):
        smp.DistributedOptimizer(inner, scale_windw=3)
    with pytest.raises(SMPUserError, match="already wrapped"):
        smp.DistributedOptimizer(optimizer)
    with pytest.raises(SMPUserError, match="got a list"):
        smp.DistributedOptimizer([])


def test_the_documented_first_scale_costs_as_few_steps_as_possible():
    scaler = DynamicLossScaler(delayed_shift=2)
    scales = []
    for overflow in (True, True, True, True, False, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
        resumed = DynamicLossScaler(delayed_shift=2)
        resumed.load_state_dict(scaler.state_dict())
        scaler = resumed
    assert scales == [2.0**32, 2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**13]
    grown = DynamicLossScaler(init_scale=2.0**20)
    grown.update(False)
    grown.update(True)
    assert grown.scale == 2.0**19
    older = DynamicLossScaler()
    older.load_state_dict({"scale": 2.0**20, "overflows_left": 1, "good_steps": 3})
    older.update(True)
    assert older.scale == 2.0**19


def test_a_scaler_skips_the_step_on_every_rank_when_one_overflows(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        torch.manual_seed(0)
        module = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = smp.amp.GradScaler(init_scale=4.0)
        before = module.weight.detach().clone()
        loss = module(torch.ones(1, 2)).sum() * (float("inf") if smp.rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return torch.equal(module.weight, before), scaler.get_scale()

    assert ranks(run, 2, config={"ddp": True}) == [(True, 2.0)] * 2


def test_accelerate_takes_the_optimizer_as_prepared(solo):
    accelerate = pytest.importorskip("accelerate")
    solo({"fp16": True})
    model = smp.DistributedModel(nn.Linear(2, 1))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=8.0)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare_optimizer(optimizer)
    assert prepared is optimizer
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer)
    before = model.module.bias.item()
    model.backward(model(torch.ones(1, 2)).sum())
    wrapped.step()
    wrapped.zero_grad()
    assert model.module.bias.item() == pytest.approx(before - 0.5, abs=1e-2)
    assert not wrapped.step_was_skipped
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1))
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.05)]


def test_state_that_a_constructor_made_of_parameters_without_values_is_made_again(solo):
    solo({})
    with smp.delay_param_initialization():
        module = nn.Linear(4, 2)
    inner = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(inner)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(inner.state[module.bias]["sum"], torch.full((2,), 9.5))
