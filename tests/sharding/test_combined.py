"""Sharded data parallelism together with pipeline and with tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from models import TiedNet, loss_of, token_batch
from sharded import adamw, check_sharded, reference, settings
from torch import nn

STEPS, BATCH = 20, 24


def _pipelined():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    model = smp.DistributedModel(TiedNet(4))
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))

    @smp.step
    def step(ids, targets):
        loss = loss_of(model(ids), targets)
        model.backward(loss)
        return loss

    share = BATCH // smp.dp_size()
    mine = slice(smp.dp_rank() * share, (smp.dp_rank() + 1) * share)
    losses = []
    for index in range(STEPS):
        ids, targets = token_batch(index, BATCH)
        optimizer.zero_grad()
        loss = float(step(ids[mine], targets[mine]).reduce_mean())
        optimizer.step()
        losses.append(sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size())
    check_sharded(model)
    return losses, model.state_dict()


def test_two_stages_of_two_shards_equal_one_process(ranks):
    expected = reference(lambda: TiedNet(4), adamw, STEPS, BATCH)
    config = settings(TiedNet(4), 2, pipeline_parallel_degree=2, microbatches=3)
    # A stage holds the calls of several microbatches open, and with them what they use.
    config["sdp_max_live_parameters"] = 475
    for losses, state in ranks(_pipelined, 4, config=config):
        assert losses == pytest.approx(expected["losses"], abs=1e-5)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def _tensor_parallel():
    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    with smp.tensor_parallelism():
        module = Three()
    smp.set_tensor_parallelism(module.c, False)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses, norms = [], []
    for index in range(10):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(index))[4 * smp.rdp_rank() :][:4]
        optimizer.zero_grad()
        loss = float(step(x).reduce_mean())
        optimizer.step()
        losses.append(sum(smp.allgather(loss, smp.RDP_GROUP)) / smp.rdp_size())
        norms.append(optimizer._global_grad_norm)
    if model.shards is not None:
        check_sharded(model)
    return losses, norms


def test_two_tensor_parallel_ranks_of_two_shards_equal_two_without_shards(ranks):
    tensor = {"ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}
    sharded = settings(Three(), 2, sdp_max_live_parameters=10**4, **tensor)
    expected = ranks(_tensor_parallel, 4, config=tensor)
    found = ranks(_tensor_parallel, 4, config=sharded)
    for (losses, _), (plain, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(plain, abs=1e-6)
    assert len({tuple(norms) for _, norms in found}) == 1  # every rank has the norm of the whole gradient
