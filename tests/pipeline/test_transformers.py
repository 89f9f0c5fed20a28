"""Unmodified models of Transformers on the stages of a pipeline train as in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.models.pipeline_models import TRANSFORMERS
from support.training.closeness import close
from support.training.pipeline_training import alone, staged

SAMPLE = {
    "gpt2": (2, 4, "interleaved", True),
    "llama": (2, 2, "simple", False),
    "bert": (2, 4, "interleaved", False),
    "t5": (2, 2, "interleaved", True),
}
BATCH = 8


def _staged(*args):
    return staged(*args)


def check(ranks, name, stages, microbatches, schedule, manual, steps, replicas=1, **more):
    expected = alone(name, steps=steps, batch=BATCH, microbatches=microbatches, replicas=replicas)
    settings = {"partitions": stages, "microbatches": microbatches, "pipeline": schedule, **more}
    if manual:
        settings.update(auto_partition=False, default_partition=0)
    results = ranks(_staged, stages * replicas, name, steps, BATCH, manual, config=settings, timeout=300)
    losses = [sum(r["losses"][step] for r in results) / len(results) for step in range(steps)]
    assert losses == pytest.approx(expected["losses"], abs=1e-5)
    for step in range(0 if more.get("shard_optimizer_state") else steps):
        for name_, value in expected["gradients"][step].items():
            found = [r["gradients"][step][name_] for r in results if name_ in r["gradients"][step]]
            assert len(found) == replicas, name_
            for gradient in found:
                close(gradient, value, f"step {step}: {name_}")
    for result in results:
        assert result["replayed"] > 0
        assert result["values"] == 0
        if replicas == 1:
            torch.testing.assert_close(result["outputs"][0], expected["outputs"][0], atol=1e-4, rtol=1e-4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_losses_and_every_gradient_equal_one_process(ranks, name):
    check(ranks, name, *SAMPLE[name], steps=8)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "manual"),
    list(itertools.product((2, 4), (1, 2, 4, 8), ("interleaved", "simple"), (False, True))),
)
def test_the_whole_matrix(ranks, name, stages, microbatches, schedule, manual):
    check(ranks, name, stages, microbatches, schedule, manual, steps=20)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("sharded", [False, True])
def test_two_stages_of_two_replicas(ranks, name, sharded):
    check(ranks, name, 2, 2, "interleaved", False, 20, 2, ddp=True, shard_optimizer_state=sharded)
