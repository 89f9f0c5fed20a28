"""Backward that runs parts of a block once more finds its parameters gathered, whoever checkpoints, compiled or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, STEPS = 8, 3
FORMS = ["children", "function", "given", "reentrant", "reading", "nested"]


class Block(nn.Module):
    """Two layers, of which ``form`` says how backward runs them again."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.up, self.down = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, self.down.bias)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.down, torch.tanh(self.up(x)), use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.form == "given":
            x = torch.tanh(checkpoint(F.linear, x, self.up.weight, self.up.bias, use_reentrant=False))
            return checkpoint(F.linear, x, self.down.weight, self.down.bias, use_reentrant=False)
        again = {"function": self.both, "reentrant": self.both, "reading": self.read, "nested": self.inner}.get(
            self.form
        )
        if again is None:
            return self.both(x)
        return checkpoint(again, x, use_reentrant=self.form == "reentrant")


def _net(form):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(form) for _ in range(3))).double()


def _batch(step):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64, requires_grad=True)


def _alone():
    net = _net("children")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(_batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _sharded(forms):
    from support.training.rank_training import training_step, updates

    import smdistributed.modelparallel.torch as smp

    found = {}
    for form in forms:
        net = _net(form)
        if form == "children":
            for block in net:
                smp.set_activation_checkpointing(block.down)
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        step = training_step(model, lambda model, x: model(x).square().mean())
        found[form] = list(updates(step, optimizer, ((_batch(number),) for number in range(STEPS))))
    return found


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_what_backward_runs_again_finds_its_parameters(ranks, compiles):
    config = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
    config |= {
        "sdp_gradient_clipping": 1e9,
        "compile": compiles,
        "compile_backend": "eager" if compiles else "inductor",
    }
    expected = _alone()
    for form in FORMS:
        for found in ranks(_sharded, 2, [form], config=config):
            assert found[form] == pytest.approx(expected, rel=1e-9), form
