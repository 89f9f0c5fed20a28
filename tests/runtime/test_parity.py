"""Training over ranks and microbatches is training in one process: the same losses, the same gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.models import TiedNet, loss_of, token_batch, train_alone

BATCH = 16


def _optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(steps, dtype, options):
    """One rank's part; runs inside a rank process."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())  # every rank draws other weights; the first data parallel rank's count
    model = smp.DistributedModel(TiedNet().to(dtype), **options)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    @smp.step
    def train_step(ids, targets):
        loss = loss_of(model(ids), targets)
        model.backward(loss)
        return loss

    losses, gradients = [], []
    share = BATCH // smp.dp_size()
    mine = slice(smp.dp_rank() * share, (smp.dp_rank() + 1) * share)
    for step in range(steps):
        ids, targets = token_batch(step, BATCH)
        optimizer.zero_grad()
        loss = train_step(ids[mine], targets[mine]).reduce_mean()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append(sum(smp.allgather(float(loss), smp.DP_GROUP)) / smp.dp_size())
    return {"losses": losses, "gradients": gradients}


def _reference(steps, dtype):
    torch.manual_seed(0)
    model = TiedNet().to(dtype)
    return train_alone(model, _optimizer(model.parameters()), steps, BATCH)


def _compare(result, expected, tolerance):
    assert result["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    for mine, theirs in zip(result["gradients"], expected["gradients"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(
                mine[name], theirs[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("world", "microbatches"), list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_losses_and_every_gradient_equal_one_process(ranks, world, microbatches):
    expected = _reference(20, torch.float32)
    # Buckets of about 200 elements, so that several travel, some of them while backward runs.
    options = {"bucket_cap_mb": 800 / 2**20}
    for result in ranks(_train, world, 20, torch.float32, options, config={"ddp": True, "microbatches": microbatches}):
        _compare(result, expected, 1e-5)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_two_hundred_steps_in_double_precision(ranks, overlap):
    expected = _reference(200, torch.float64)
    options = {"bucket_cap_mb": 800 / 2**20, "overlapping_allreduce": overlap}
    for result in ranks(_train, 4, 200, torch.float64, options, config={"ddp": True, "microbatches": 2}):
        _compare(result, expected, 1e-9)
