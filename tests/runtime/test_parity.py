"""Training over ranks and microbatches is training in one process: the same losses, the same gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from support.models.models import TiedNet, token_batches
from support.training.rank_training import training_step, updates
from support.training.reference import tokens_alone

BATCH = 16


def _optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _train(steps, dtype, options):
    """One rank's part; runs inside a rank process."""
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(smp.rank())  # every rank draws other weights; the first data parallel rank's count
    model = smp.DistributedModel(TiedNet().to(dtype), **options)
    optimizer = smp.DistributedOptimizer(_optimizer(model.parameters()))

    losses, gradients = [], []
    for loss in updates(training_step(model), optimizer, token_batches(0, steps, BATCH)):
        losses.append(loss)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return {"losses": losses, "gradients": gradients}


def _compare(result, expected, tolerance):
    assert result["losses"] == pytest.approx(expected.losses, abs=tolerance)
    for mine, theirs in zip(result["gradients"], expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(
                mine[name], theirs[name], atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("world", "microbatches"),
    sampled(itertools.product((1, 2, 4), (1, 2, 4)), {(1, 2), (2, 1), (2, 4), (4, 1), (4, 2)}),
)
def test_losses_and_every_gradient_equal_one_process(ranks, world, microbatches):
    expected = tokens_alone(TiedNet, _optimizer, 20, BATCH)
    # Buckets of about 200 elements, so that several travel, some of them while backward runs.
    options = {"bucket_cap_mb": 800 / 2**20}
    for result in ranks(_train, world, 20, torch.float32, options, config={"ddp": True, "microbatches": microbatches}):
        _compare(result, expected, 1e-5)


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("world", "overlap", "steps"),
    sampled([(2, True, 40), *itertools.product((2, 4), (True, False), (200,))], {(2, True, 40)}),
)
def test_many_steps_in_double_precision(ranks, world, overlap, steps):
    expected = tokens_alone(TiedNet, _optimizer, steps, BATCH, torch.float64)
    options = {"bucket_cap_mb": 800 / 2**20, "overlapping_allreduce": overlap}
    for result in ranks(_train, world, steps, torch.float64, options, config={"ddp": True, "microbatches": 2}):
        _compare(result, expected, 1e-9)
