"""Backward passes in steps: on other threads, of several models, of some ranks only, and gradients that are only asked for."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def _gradients_of_steps(how, options, make, own):
    """Gradients after each of three steps of four microbatches; ``how`` runs a function, as autograd would its hooks."""
    import smdistributed.modelparallel.torch as smp

    module = make()
    model = smp.DistributedModel(module, **options)

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        how(functools.partial(model.backward, loss) if own else loss.backward)

    generator = torch.Generator().manual_seed(smp.rank())
    found = []
    for _ in range(3):
        model.zero_grad()
        for _ in range(options.get("backward_passes_per_step", 1)):
            step(torch.randn(8, 4, generator=generator))
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def _on_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_hooks_of_backward_may_run_on_another_thread(ranks, own, passes):
    options = {"backward_passes_per_step": passes}
    config = {"ddp": True, "microbatches": 4}
    here = ranks(_gradients_of_steps, 2, lambda call: call(), options, _net, own, config=config)
    there = ranks(_gradients_of_steps, 2, _on_a_thread, options, _net, own, config=config)
    torch.testing.assert_close(there, here)
    torch.testing.assert_close(there[0], there[1])


def test_each_models_loss_is_scaled_for_its_own_optimizer(solo):
    solo({"fp16": True})
    models = [smp.DistributedModel(_net()) for _ in range(2)]
    _optimizers = [
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=scale)
        for model, scale in zip(models, (128.0, 1024.0), strict=True)
    ]
    for model, scale in zip(models, (128.0, 1024.0), strict=True):
        model.backward(model(torch.ones(2, 4)).mean())
        assert float(model.module[2].bias.grad) == scale


@pytest.mark.parametrize("through", ["the first", "the second", "the loss"])
def test_a_loss_of_two_models_is_averaged_once_in_both(solo, through):
    solo({"microbatches": 2})
    first, second = smp.DistributedModel(_net()), smp.DistributedModel(nn.Linear(1, 1))

    @smp.step
    def step(x):
        loss = second(first(x)).sum()
        {"the first": first.backward, "the second": second.backward, "the loss": torch.Tensor.backward}[through](loss)

    step(torch.ones(2, 4))
    assert float(second.module.bias.grad) == 1.0
    torch.testing.assert_close(first.module[2].bias.grad, second.module.weight[0])


@pytest.mark.parametrize("config", [{"microbatches": 4}, {"fp16": True, "microbatches": 2}])
def test_gradients_that_are_only_asked_for_are_not_scaled(solo, config):
    solo(config)
    model = smp.DistributedModel(nn.Linear(2, 1))
    _optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    asked = []

    @smp.step
    def step(x):
        loss = model(x).mean()
        asked.append(torch.autograd.grad(loss, [model.module.bias], retain_graph=True)[0])
        loss.backward()

    step(torch.ones(4, 2))
    assert [float(gradient) for gradient in asked] == [1.0] * config["microbatches"]
    assert float(model.module.bias.grad) == (8.0 if "fp16" in config else 1.0)


def test_scaling_follows_a_model_that_is_cast(solo):
    solo({"microbatches": 2})
    model = smp.DistributedModel(nn.Linear(2, 1)).to(torch.float64)

    @smp.step
    def step(x):
        model(x).mean().backward()

    step(torch.ones(4, 2, dtype=torch.float64))
    assert float(model.module.bias.grad) == 1.0


def _with_a_pause(config_of_model, pauses):
    """Gradients on rank 1 after every step; it runs no backward pass in the steps ``pauses``."""
    import smdistributed.modelparallel.torch as smp

    model = smp.DistributedModel(_net(), bucket_cap_mb=1e-4, **config_of_model)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    passes = config_of_model.get("backward_passes_per_step", 1)

    @smp.step
    def step(x, trains):
        loss = model(x).sum()
        if trains:
            model.backward(loss)

    found = []
    for index in range(5 * passes):
        if index % passes == 0:
            optimizer.zero_grad()
        rank = smp.rank()
        step(torch.full((4, 4), float(rank + index)), (index, rank) not in pauses)
        if index % passes == passes - 1:
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.step()
    return found


@pytest.mark.parametrize(
    ("pauses", "passes"),
    [
        ([(0, 1)], 1),
        ([(1, 0), (3, 1)], 1),
        ([(2, 0), (2, 1)], 1),
        ([(0, 1)], 2),
        ([(1, 0), (2, 1), (3, 1)], 2),
    ],
)
def test_a_rank_that_runs_no_backward_answers_the_others(ranks, pauses, passes):
    options = {"backward_passes_per_step": passes}
    both = ranks(_with_a_pause, 2, options, pauses, config={"ddp": True})
    torch.testing.assert_close(both[0], both[1])
    for number, gradients in enumerate(both[0]):
        steps = range(number * passes, (number + 1) * passes)
        trained = [(i, rank) for i in steps for rank in range(2) if (i, rank) not in pauses]
        if not trained:
            assert gradients == [None] * 4
            continue
        module, loss = _net(), 0.0
        for index, rank in trained:
            loss = loss + module(torch.full((4, 4), float(rank + index))).sum() / 2
        loss.backward()
        torch.testing.assert_close(gradients, [p.grad for p in module.parameters()])


def test_with_sharded_state_too(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(_net())
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @smp.step
        def step(x, trains):
            loss = model(x).sum()
            if trains:
                model.backward(loss)

        for index in range(3):
            optimizer.zero_grad()
            step(torch.ones(4, 4), not (index == 1 and smp.rank() == 1))
            optimizer.step()
        return model.state_dict()

    first, second = ranks(run, 2, config={"ddp": True, "shard_optimizer_state": True})
    torch.testing.assert_close(first, second)


def test_with_sharded_parameters_the_rank_is_named_within_seconds(ranks):
    from support.ranks.rank_pool import RankFailed

    with pytest.raises(
        RankFailed, match="rank 1 ran no backward pass in this step, but the data parallel ranks \\[0\\] did"
    ):
        ranks(_with_a_pause, 2, {}, [(1, 1)], config={"ddp": True, **SHARDED}, timeout=20)
