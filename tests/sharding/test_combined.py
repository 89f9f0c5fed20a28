"""Sharded data parallelism together with pipeline and with tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from support.models.models import TiedNet, token_batches
from support.training.rank_training import training_step, updates
from support.training.reference import tokens_alone, train_alone
from support.training.sharded_training import adamw, check_sharded, settings
from torch import nn

STEPS, BATCH = 20, 24


def _pipelined(delayed):
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    with smp.delay_param_initialization(enabled=delayed):
        module = TiedNet(4)
    assert all(p.is_meta for p in module.parameters()) == delayed
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))

    losses = list(updates(training_step(model), optimizer, token_batches(0, STEPS, BATCH)))
    check_sharded(model)
    return losses, model.state_dict()


@pytest.mark.both_transports
@pytest.mark.parametrize("delayed", [pytest.param(False, marks=pytest.mark.full), True])
def test_two_stages_of_two_shards_equal_one_process(ranks, delayed):
    expected = tokens_alone(lambda: TiedNet(4), adamw, STEPS, BATCH)
    config = settings(TiedNet(4), 2, pipeline_parallel_degree=2, microbatches=3)
    # A stage holds the calls of several microbatches open, and with them what they use.
    config["sdp_max_live_parameters"] = 475
    for losses, state in ranks(_pipelined, 4, delayed, config=config):
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        for name, value in expected.weights.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def _batches(steps):
    return ((torch.randn(8, 8, generator=torch.Generator().manual_seed(step)),) for step in range(steps))


def _loss(model, x):
    return model(x).square().mean()


def _tensor_parallel():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())  # every rank draws other weights, of which each tensor parallel rank keeps its slice
    with smp.tensor_parallelism():
        module = Three()
    smp.set_tensor_parallelism(module.c, False)
    model = smp.DistributedModel(module)
    start = model.state_dict()
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))

    losses, norms = [], []
    for loss in updates(training_step(model, _loss), optimizer, _batches(10)):
        losses.append(loss)
        norms.append(optimizer._global_grad_norm)
    check_sharded(model)
    return start, losses, norms, model.state_dict()


@pytest.mark.both_transports
def test_two_tensor_parallel_ranks_of_two_shards_equal_one_process(ranks):
    config = settings(Three(), 2, sdp_max_live_parameters=10**4, tensor_parallel_degree=2, prescaled_batch=True)
    results = ranks(_tensor_parallel, 4, config=config)
    model = Three()
    model.load_state_dict(results[0][0])
    alone = train_alone(model, adamw, _batches(10), _loss)
    for start, losses, norms, state in results:
        assert all(torch.equal(value, results[0][0][name]) for name, value in start.items())
        assert losses == pytest.approx(alone.losses, abs=1e-5)
        assert norms == pytest.approx(alone.norms, rel=1e-4)  # on every rank that of the whole gradient
        for name, value in alone.weights.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        model = smp.DistributedModel(Three())
        optimizer = smp.DistributedOptimizer(adamw(model.parameters()), static_loss_scale=None, dynamic_loss_scale=True,
                                             dynamic_loss_args={"init_scale": 64.0, "scale_window": 100})  # fmt: skip

        @smp.step
        def step(x):
            loss = model(x).float().square().mean()
            model.backward(loss)
            return loss

        found = []
        for index in range(5):
            before = model.state_dict()
            optimizer.zero_grad()
            step(torch.full((2, 8), float("inf") if smp.rank() == 1 and index == 2 else 1.0))
            optimizer.step()
            changed = any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
            found.append((optimizer.overflow, changed, optimizer.loss_scale))
        return found, all(torch.isfinite(value).all() for value in model.state_dict().values())

    for found, finite in ranks(run, 4, config=settings(Three(), 2, fp16=True)):
        assert found == [(False, True, 64.0)] * 2 + [(True, False, 32.0)] + [(False, True, 32.0)] * 2
        assert finite
