"""Messages that are late change nothing: no hang, the same numbers."""

from __future__ import annotations

import pytest
import torch
from support.training.closeness import close
from support.training.pipeline_training import alone, staged


def _delayed(name, steps, batch):
    import random

    import torch

    import smp_runtime.pipeline.transport.transport as transport

    original = transport.PipelineTransport.__init__
    transport.PipelineTransport.__init__ = lambda self, *args, **kwargs: original(
        self, *args, **{**kwargs, "delay": lambda: random.uniform(0, 0.002)}
    )
    try:
        done = staged(name, steps, batch, False, torch.float64)
    finally:
        transport.PipelineTransport.__init__ = original
    return {**done, "gradients": done["gradients"][-1:]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "stages", "schedule", "steps"),
    [
        ("tied", 2, "interleaved", 60),
        pytest.param("tied", 4, "interleaved", 400, marks=pytest.mark.full),
        pytest.param("branching", 2, "interleaved", 400, marks=pytest.mark.full),
        pytest.param("tied", 2, "simple", 400, marks=pytest.mark.full),
    ],
)
def test_steps_under_random_delays(ranks, name, stages, schedule, steps):
    expected = alone(name, steps=steps, batch=4, microbatches=2, dtype=torch.float64)
    settings = {"partitions": stages, "microbatches": 2, "pipeline": schedule}
    for result in ranks(_delayed, stages, name, steps, 4, config=settings, timeout=500):
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-6)
        for path, gradient in result["gradients"][0].items():
            close(gradient, expected["gradients"][-1][path], path, 1e-6)
        assert result["values"] == 0
        assert result["replayed"] > 0 or name == "branching"
