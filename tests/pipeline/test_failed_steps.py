"""A step that an error ended is no evaluation: the timeline says that it failed."""

from __future__ import annotations

import torch
from support.training.pipeline_training import summing_step
from torch import nn


def _steps():
    """A good step, one that fails in a module of another stage, a good one, and an evaluation."""
    import smdistributed.modelparallel.torch as smp

    class Fails(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 3:
                raise KeyError("no such token")
            return super().forward(x)

    net = nn.Sequential(Fails(4, 4), nn.Linear(4, 1))
    smp.set_partition(net[0], 0)
    model = smp.DistributedModel(net)
    train = summing_step(model)
    for batch in (4, 6, 4):
        try:
            train(torch.ones(batch, 4))
        except Exception as error:
            assert batch == 6, error
    with torch.no_grad():
        smp.step(lambda x: model(x).sum())(torch.ones(4, 4))


def test_a_failed_step_is_called_so(ranks, tmp_path):
    from smp_estimator.timeline import read_timeline

    settings = {"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1}
    ranks(_steps, 2, config=settings, env={"SMP_TIMELINE": "4", "SM_OUTPUT_DATA_DIR": str(tmp_path)}, timeout=60)
    found = read_timeline(str(tmp_path))
    assert [step.kind for step in found.steps] == ["training", "failed", "training", "evaluation"]
    assert [step.trains for step in found.steps] == [True, False, True, False]
    assert found.steps[1].title == "step 2 (failed)"
    # Of the two that train the faster one.
    assert found.step() is min((found.steps[0], found.steps[2]), key=lambda step: round(step.makespan, 9))
