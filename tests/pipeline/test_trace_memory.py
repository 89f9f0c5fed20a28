"""A tracing step that does not fit into the memory of its device: the error, the memory, and what can be done next."""

from __future__ import annotations

import gc
import os

import pytest

CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}
MIB = 2**20
HIDDEN = 512


def _fails_then_fits(tracing):
    """Train with a batch that is too large for the tracing step, then with one that fits."""
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smp_runtime.errors import SMPUserError

    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(4)))
    model = smp.DistributedModel(net, trace_device=tracing)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    def update(batch):
        optimizer.zero_grad()
        loss = step(torch.ones(batch, HIDDEN, device="cuda")).reduce_mean().item()
        optimizer.step()
        return loss

    gc.collect()
    before, raised = torch.cuda.memory_allocated(), None
    try:
        update(2**14)  # 32 MiB, and 16 MiB for each module's result of a microbatch
    except SMPUserError as error:
        raised = str(error)
    gc.collect()
    left = torch.cuda.memory_allocated() - before
    return {"raised": raised, "left": left, "losses": [update(4) for _ in range(3)]}


@pytest.fixture
def train(ranks):
    def run(tracing):
        from support.ranks import emulated

        # Of each device: the model and some results fit.
        os.environ["SMP_EMULATE_CUDA_MEMORY"] = "80MiB"
        try:
            return emulated.on_devices(0, CONFIG, _fails_then_fits, tracing)
        finally:
            del os.environ["SMP_EMULATE_CUDA_MEMORY"]

    return lambda tracing: ranks(run, 2, tracing, init=False)


def test_every_rank_hears_what_to_change_and_the_job_goes_on_with_a_batch_that_fits(train):
    for result in train("gpu"):
        assert (
            "the tracing step ran out of memory on cuda:0 (CUDA out of memory. Tried to allocate 16.00 MiB."
            in result["raised"]
        )
        assert 'pass trace_device="cpu" to smp.DistributedModel, or set skip_tracing to true' in result["raised"]
        assert "\n" not in result["raised"]
        assert result["left"] < MIB
        assert result["losses"] == sorted(result["losses"], reverse=True)
