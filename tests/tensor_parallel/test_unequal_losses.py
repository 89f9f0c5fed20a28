"""Losses that take other results of split modules on each tensor parallel rank, each of which has a batch of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WIDTH, LAYERS, STEPS, WORLD = 8, 3, 3, 2
#: By step, microbatch and rank, which layers' second results a loss takes, as bits, and from which layer it exits.
CHOICES = [(5, 2), (0, 2), (4, 0), (4, 1), (5, 2), (0, 0), (1, 2), (7, 1), (2, 2), (2, 2), (3, 0), (0, 2)]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.a(x)), torch.tanh(self.b(x))


class Exits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(LAYERS))
        self.exits = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH)  # by the loss of any rank

    def forward(self, x: torch.Tensor, y: torch.Tensor, how: torch.Tensor) -> torch.Tensor:
        taken, last = CHOICES[int(how[0])]
        results, extra = [], 0
        for number, layer in enumerate(self.layers):
            x, other = layer(x)
            self.unused(x)
            if taken >> number & 1:
                extra = extra + other
            results.append(self.exits[number](x + extra))
        return cross_entropy(results[last], y)


def _batch(step, rank):
    """The batch of a rank, ``[2 microbatches, …]``."""
    source = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(2, WIDTH, generator=source, dtype=torch.float64), torch.randint(0, 4, (2,), generator=source)
    return x, y, torch.tensor([(4 * step + 2 * rank + number) % len(CHOICES) for number in range(2)])


def _net():
    torch.manual_seed(0)
    return Exits().double()


def _sgd(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def test_what_one_rank_leaves_out_counts_as_zero(ranks):
    def run():
        import smdistributed.modelparallel.torch as smp

        net = _net()
        smp.set_tensor_parallelism(net)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(_sgd(model.parameters()))

        @smp.step
        def step(x, y, how):
            model.backward(model(x, y, how))

        for index in range(STEPS):
            optimizer.zero_grad()
            step(*_batch(index, smp.rank()))
            optimizer.step()
        return model.state_dict()

    net = _net()
    optimizer = _sgd(net.parameters())
    for index in range(STEPS):
        optimizer.zero_grad()
        for rank in range(WORLD):
            for x, y, how in zip(*_batch(index, rank), strict=True):
                (net(x[None], y[None], how[None]) / (2 * WORLD)).backward()
        optimizer.step()
    config = {"ddp": True, "tensor_parallel_degree": 2, "microbatches": 2}
    for found in ranks(run, WORLD, config=config):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(found[name], value, msg=name)
