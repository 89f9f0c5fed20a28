"""Predicted against measured bytes under data parallelism: the most that a rank holds at once, state and step together."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from test_measured import LiveBytes, Model
from torch.nn import functional as F

from smp_estimator.planning import ModelShape, plan

#: layers, hidden, heads, vocabulary, sequence, batch of a rank.
SHAPES = [(4, 128, 4, 512, 64, 8), (8, 64, 4, 1024, 64, 4), (2, 256, 8, 256, 128, 4)]


def _peak(sizes: tuple[int, ...], batch: int) -> int:
    """Bytes of storages alive at the worst moment, from the creation of the model to its third step."""
    import smdistributed.modelparallel.torch as smp

    with LiveBytes() as live:
        torch.manual_seed(0)
        model = smp.DistributedModel(Model(*sizes, False))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), foreach=False))

        @smp.step
        def step(ids: torch.Tensor) -> None:
            model.backward(F.cross_entropy(model(ids).view(-1, sizes[3]), ids.view(-1)))

        for _ in range(3):
            # Gradients that stay from step to step are what the plan counts; cleared to None, a step needs less.
            optimizer.zero_grad(set_to_none=False)
            step(torch.randint(sizes[3], (batch, sizes[4])))
            optimizer.step()
        return live.peak


@pytest.mark.parametrize("sizes", SHAPES)
def test_predicted_bytes_are_near_the_measured_ones(ranks, sizes) -> None:
    config = {"ddp": True}
    *shape, batch = sizes
    predicted = plan(
        ModelShape(*shape),
        "local",
        parameters=config,
        batch=batch,
        processes_per_host=2,
        dropout=False,
        activation_checkpointing=None,
    )
    for peak in ranks(_peak, 2, tuple(shape), batch, config=config):
        assert peak == pytest.approx(predicted.total_bytes, rel=0.1)
