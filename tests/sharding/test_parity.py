"""Training with everything sharded is training in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from support.models.models import TiedNet
from support.training.reference import tokens_alone
from support.training.sharded_training import UNCLIPPED, adamw, settings, train

import smdistributed.modelparallel.torch as smp

STEPS, BATCH = 10, 24
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MATRIX = list(itertools.product((2, 4), (1, 3), (1, 3)))
#: Degree, microbatches, passes: both degrees, and accumulation by each of the two ways.
SAMPLE = {(2, 3, 1), (4, 1, 3)}


def _compare(result, expected, tolerance):
    assert result["losses"] == pytest.approx(expected.losses, abs=tolerance)
    for name, value in expected.weights.items():
        torch.testing.assert_close(result["weights"][name], value, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("degree", "microbatches", "passes"),
    sampled(MATRIX, SAMPLE),
)
def test_losses_and_weights_equal_one_process(ranks, degree, microbatches, passes):
    expected = tokens_alone(TiedNet, adamw, STEPS, BATCH * (3 if microbatches * passes == 9 else 1))
    config = settings(TiedNet(), degree, microbatches=microbatches)
    batch = BATCH * (3 if microbatches * passes == 9 else 1)
    for result in ranks(train, 4, TiedNet, adamw, STEPS, batch, passes, config=config):
        _compare(result, expected, 1e-5)
        for number, state in expected.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(result["optimizer"]["state"][number][key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("passes", [1, 3])
def test_eight_ranks(passes):
    from support.ranks.rank_pool import RankPool

    expected = tokens_alone(TiedNet, adamw, STEPS, BATCH)
    with RankPool(8) as pool:
        found = pool.run(train, 8, TiedNet, adamw, STEPS, BATCH, passes, config=settings(TiedNet(), 2), timeout=100.0)
    for result in found:
        _compare(result, expected, 1e-5)


@pytest.mark.both_transports
@pytest.mark.parametrize("steps", sampled([12, 60], {12}))
def test_many_steps_in_double_precision(ranks, steps):
    expected = tokens_alone(TiedNet, adamw, steps, BATCH, dtype=torch.float64)
    config = settings(TiedNet(), 2, microbatches=2)
    for result in ranks(train, 4, TiedNet, adamw, steps, BATCH, 1, torch.float64, config=config):
        _compare(result, expected, 1e-9)


@pytest.mark.parametrize(
    ("half", "degree", "world"),
    [
        ("bf16", 2, 4),
        ("fp16", 2, 2),
        pytest.param("bf16", 4, 4, marks=pytest.mark.full),
        pytest.param("fp16", 2, 4, marks=pytest.mark.full),
        pytest.param("fp16", 4, 4, marks=pytest.mark.full),
    ],
)
def test_half_precision_equals_one_process_in_the_same_precision(ranks, half, degree, world):
    expected = tokens_alone(TiedNet, adamw, STEPS, BATCH, half=HALVES[half])
    config = settings(TiedNet(), degree, microbatches=3, **{half: True})
    for result in ranks(train, world, TiedNet, adamw, STEPS, BATCH, config=config):
        assert result["losses"] == pytest.approx(expected.losses, rel=2e-2)
        for name, value in expected.weights.items():
            assert float((result["weights"][name].float() - value).norm() / value.norm()) < 2e-2, name


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("limit", "threshold"), sampled(itertools.product((0.1, UNCLIPPED), (0, 20)), {(0.1, 20), (UNCLIPPED, 0)})
)
def test_clipping_takes_the_norm_of_the_whole_gradient(ranks, limit, threshold):
    """With a threshold some parameters stay whole on every rank, and must be counted once."""
    expected = tokens_alone(TiedNet, adamw, 5, BATCH, limit=limit)
    config = settings(TiedNet(), 2, sdp_gradient_clipping=limit, sdp_param_persistence_threshold=threshold)
    for result in ranks(train, 4, TiedNet, adamw, 5, BATCH, 1, torch.float32, threshold == 0, config=config):
        _compare(result, expected, 1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: smp.optimizers.FusedLAMB(p, lr=1e-2),
        pytest.param(lambda p: smp.optimizers.FusedNovoGrad(p, lr=1e-2), marks=pytest.mark.full),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ],
    ids=["lamb", "novograd", "sgd"],
)
def test_optimizers_that_look_at_whole_tensors(ranks, optimizer):
    expected = tokens_alone(TiedNet, optimizer, 10, BATCH)
    config = settings(TiedNet(), 2, sdp_param_persistence_threshold=10)
    for result in ranks(train, 2, TiedNet, optimizer, 10, BATCH, 1, torch.float32, False, config=config):
        _compare(result, expected, 1e-5)
