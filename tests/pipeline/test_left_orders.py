"""Steps that take another course than the planned one, in pipelines that must run their work in one order."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.matrix import sampled
from torch import nn

TP = {"tensor_parallel_degree": 2, "prescaled_batch": True}
SDP = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9}
WIDTH, STEPS = 8, 8


class Block(nn.Module):
    """Normalizes, and adds what a small network makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, of which some are skipped while ``skipped`` says so, or while the batch is positive."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(6))
        self.head, self.branches = nn.Linear(WIDTH, 4), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = self.branches and float(x.sum()) > 0
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            if not (skips and number in (1, 4)):
                x = layer(x)
        return self.head(x)


def batch_of(step: int, course: str) -> torch.Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).abs()
    if course == "branch" and step in (4, 6):
        return x
    if course == "some" and step in (4, 6):
        return -x * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).repeat_interleave(4)[:, None]
    return -x


def freeze(model: nn.Module, step: int, course: str) -> None:
    layers = (model.module if hasattr(model, "module") else model).layers
    if course == "freeze" and step in (4, 6):
        for p in layers[1].parameters():
            p.requires_grad_(step == 6)


def alone(course: str):
    torch.manual_seed(0)
    net = Net(course in ("branch", "some")).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        freeze(net, step, course)
        x = batch_of(step, course)
        pieces = x.chunk(4)
        loss = sum(net(piece).square().mean() / 4 for piece in pieces)
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {k: v.clone() for k, v in net.state_dict().items()}


def _train(course, kind):
    from support.training.pipeline_training import replayed

    import smdistributed.modelparallel.torch as smp

    torch.manual_seed(0)
    net = Net(course in ("branch", "some")).double()
    if kind == "tp":
        smp.set_tensor_parallelism(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses, followed = [], []
    for number in range(STEPS):
        freeze(model, number, course)
        x = batch_of(number, course)
        rank, size = (smp.rdp_rank(), smp.rdp_size()) if kind == "tp" else (smp.dp_rank(), smp.dp_size())
        loss = float(step(x.chunk(size)[rank]).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(smp.allgather(loss, smp.WORLD)) / smp.size())
        followed.append(replayed(model))
    return losses, model.state_dict(), followed


CASES = itertools.product(("freeze", "branch", "some"), ("tp", "sdp"), ("interleaved", "simple", "zero_bubble"))
SAMPLE = [("freeze", "tp", "interleaved"), ("branch", "sdp", "simple"), ("some", "tp", "zero_bubble")]


@pytest.mark.parametrize(("course", "kind", "schedule"), sampled(CASES, SAMPLE))
def test_a_step_of_another_course_equals_one_process(ranks, course, kind, schedule):
    config = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": schedule}
    config |= TP if kind == "tp" else {**SDP, "microbatches": 2}
    losses, state = alone(course)
    for found, weights, followed in ranks(_train, 4, course, kind, config=config):
        assert not all(followed[2:])
        assert found == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
