"""Bytes sent per step against the theoretical minimum."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from counting import bytes_bound
from support.matrix import sampled
from torch import nn

STEPS = 3


def _sent(batches):
    from counting import CountingCollectives

    import smdistributed.modelparallel.torch as smp

    session = smp.init()
    collectives = CountingCollectives(session.ranks.collectives)
    session.ranks = replace(session.ranks, collectives=collectives)
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(24))), bucket_cap_mb=0.25)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()), static_loss_scale=2.0)

    @smp.step
    def step(x):
        model.backward(model(x).square().mean())

    def train():
        optimizer.zero_grad()
        step(torch.ones(4, 128))
        optimizer.step()

    train(), train()  # the second measures the order of gradients, once
    collectives.sent = 0.0
    for _ in range(batches):
        train()
    return collectives.sent / batches, sum(p.numel() for p in model.parameters())


#: Every pair of two values occurs.
SAMPLE = {
    (2, "fp32", False), (4, "fp32", True), (2, "bf16", True), (4, "bf16", False), (2, "fp16", False), (4, "fp16", True),
}  # fmt: skip


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("world", "precision", "sharded"),
    sampled(itertools.product((2, 4), ("fp32", "bf16", "fp16"), (False, True)), SAMPLE),
)
def test_bytes_sent_are_within_two_percent_of_the_bound(ranks, world, precision, sharded):
    config = {"ddp": True, "microbatches": 2, "shard_optimizer_state": sharded}
    config |= {} if precision == "fp32" else {precision: True}
    for sent, elements in ranks(_sent, world, STEPS, config=config):
        bound = bytes_bound(elements, world, precision, sharded=sharded)
        assert bound <= sent <= 1.02 * bound
