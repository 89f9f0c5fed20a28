"""The state of a training in shared memory: complete or absent, loaded after a restart in place, and bit for bit what it was."""

from __future__ import annotations

import tempfile

import pytest
import torch
from support.checkpoint_training import TOPOLOGIES

#: Topologies and precisions.
NAMES = ["one", "dp2", "o2", "pp2", "tp2", "s2", "s4", "pp2-o2", "pp2-tp2", "tp2-o2", "tp2-s2", "pp2-s2", "pp4"]
HALF = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
#: The first window of a job has its gradients in other buckets than later ones, or adds up microbatches in another order: where sums have
#: more than two terms, their last bits may differ. What is loaded does not.
LAST_BITS = {"tp2-s2", "tp2-o2", "pp2-s2"}
SAMPLE = {("dp2", "bf16"), ("s2", "fp16"), ("pp2", "fp32")}
CELLS = [(name, half) for name in NAMES for half in HALF]


@pytest.fixture
def folder():
    """A job's folder in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield path


def told(folder, start=0):
    """What the launcher tells a rank."""
    return {
        "SMP_MEMORY_CHECKPOINT": "1",
        "SMP_MEMORY_CHECKPOINT_STEPS": "1",
        "SMP_MEMORY_FOLDER": str(folder),
        "SMP_RESTART_COUNT": str(start),
    }


def train_and_keep(first, last):
    """A job that keeps its state after each step, then goes on undisturbed; losses and the state at the end."""
    from support.checkpoint_training import Training, held

    run = Training()
    losses = []
    for step in range(first):
        losses += run.train(step, step + 1)
        content = {"step": step + 1, "scheduler": run.scheduler.state_dict()}
        assert run.smp.memory_checkpoint(run.model, run.optimizer, content)
    kept = held(run)
    return losses + run.train(first, last), kept, held(run), torch.rand(3)


def go_on(path, last, tag=None):
    """The job after a restart: what it found, losses and the state at the end."""
    from support.checkpoint_training import Training, held

    run = Training(seed=9)
    found = run.smp.newest_memory_checkpoint()
    step = run.resume(path, tag)
    loaded = held(run) if run.model.partitioned else None
    again = run.smp.newest_memory_checkpoint()
    losses = run.train(step, last)
    return (found, step, again), losses, loaded, held(run), torch.rand(3)


@pytest.mark.parametrize(
    ("name", "half"),
    [pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.full) for cell in CELLS],
)
def test_training_goes_on_bit_for_bit(ranks, folder, name, half):
    world, config = TOPOLOGIES[name]
    config = {**config, **HALF[half]}
    before = ranks(train_and_keep, world, 3, 5, config=config, env=told(folder))
    after = ranks(go_on, world, f"{folder}/no-files", 5, config=config, env=told(folder, 1))
    for (losses, kept, state, drawn), (said, rest, loaded, again, drawn_again) in zip(before, after, strict=True):
        assert said == (3, 3, None)
        assert rest == losses[3:]
        assert torch.equal(drawn, drawn_again)
        assert len(state) > 3
        if loaded is not None:  # a pipeline that is not partitioned yet loads in its first step
            assert all(torch.equal(a, b) for a, b in zip(kept, loaded, strict=True))
        near = {"rtol": 1e-5, "atol": 1e-7} if half == "fp32" else {"rtol": 1e-2, "atol": 1e-4}
        for mine, other in zip(state, again, strict=True):
            assert torch.allclose(mine, other, **near) if name in LAST_BITS else torch.equal(mine, other)
