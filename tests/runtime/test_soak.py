"""Thousands of steps: memory, descriptors, threads and objects stay where they were after the first hundreds."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONFIGURATIONS = {
    "pp 2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "dp 2": {"microbatches": 2},
    "sharded 2": {"microbatches": 2, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
}


def _held():
    import gc

    gc.collect()
    workers = sum(thread.name == "smp-pipeline-worker" for thread in threading.enumerate())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")) - workers,
        "workers": workers,
        "objects": len(gc.get_objects()),
    }


def _trained(steps):
    """What a rank holds after the first quarter of the steps, and at the end."""
    import torch

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    before = None
    for number in range(steps):
        optimizer.zero_grad()
        step(torch.randn(8, 64))
        optimizer.step()
        smp.allgather(number, smp.WORLD)  # messages of the control plane leave nothing either
        if number == steps // 4:
            before = _held()
    return before, _held()


@pytest.mark.parametrize(
    ("configuration", "steps"),
    [("pp 2", 60)]
    + [pytest.param(each, 600, marks=[pytest.mark.full, pytest.mark.timeout(600)]) for each in CONFIGURATIONS],
)
def test_a_long_training_holds_no_more_than_a_short_one(ranks, configuration, steps):
    config = {"ddp": True, **CONFIGURATIONS[configuration]}
    for before, after in ranks(_trained, 2, steps, config=config, timeout=500.0):
        print(configuration, before, after)
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]
        # One for each task under way at once, of which a step has more or fewer: forward and backward of each microbatch.
        assert after["workers"] <= 2 * 2
        assert after["objects"] <= before["objects"] + 100 + 50 * (
            after["workers"] - before["workers"]
        )  # not one for each step
        if steps >= 600:
            assert after["bytes"] <= 1.02 * before["bytes"]
