"""Microbatches whose forward or backward pass writes into weights and buffers that graphs hold equal those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from support.training.closeness import close
from torch import nn

WIDTH, STEPS, MICROBATCHES = 6, 4, 4
FORMS = ["clamped", "shrinks", "assigned", "data", "queue", "stepping"]


class Layer(nn.Linear):
    """Writes into its own tensors while it runs, as ``form`` says."""

    def __init__(self, form: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.form = form
        self.register_buffer("queue", torch.ones(WIDTH))
        self.teacher = nn.Parameter(self.weight.detach() + 1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.form == "clamped":
                self.weight.clamp_(min=0)
            elif self.form == "shrinks":
                self.weight.mul_(0.99)
            elif self.form == "assigned":
                self.teacher.data = 0.9 * self.teacher + 0.1 * self.weight
            elif self.form == "data":
                self.teacher.data.mul_(0.9).add_(self.weight, alpha=0.1)
            elif self.form == "queue":
                self.queue.mul_(0.5).add_(x.mean(0))
        return torch.tanh(super().forward(x) * self.queue + x @ self.teacher)


def _net(form):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(form) for _ in range(4))).double()


def _batches():
    for step in range(STEPS):
        yield torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def step_in_backward(named):
    """Each parameter is updated as soon as its gradient is there."""
    for parameter in [p for p in named if p.requires_grad]:
        own = torch.optim.SGD([parameter], lr=0.05)

        def update(parameter: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)


def _alone(form):
    net = _net(form)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    if form == "stepping":
        step_in_backward(net.parameters())
    for batch in _batches():
        optimizer.zero_grad()
        for piece in batch.chunk(MICROBATCHES):
            (net(piece).square().mean() / MICROBATCHES).backward()
        if form != "stepping":
            optimizer.step()
    return copy.deepcopy(net.state_dict())


def _staged(form):
    from support.training.rank_training import training_step

    import smdistributed.modelparallel.torch as smp

    net = _net(form)
    for number, layer in enumerate(net):
        smp.set_partition(layer, number % 2)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    step = training_step(model, lambda model, x: model(x).square().mean())
    hooked = False
    for batch in _batches():
        optimizer.zero_grad()
        if form == "stepping" and not hooked:
            step_in_backward(model.parameters())
            hooked = True
        step(batch)
        if form != "stepping":
            optimizer.step()
    return model.state_dict()


# What goes through ``.data`` is not counted as a change, and is not seen.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "data"])
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_equals_one_process(ranks, form, schedule):
    config = {"partitions": 2, "auto_partition": False, "default_partition": 0, "microbatches": MICROBATCHES}
    expected = _alone(form)
    for state in ranks(_staged, 2, form, config={**config, "pipeline": schedule, "ddp": True}):
        for name, value in expected.items():
            close(state[name], value)


def test_tracing_leaves_parameters_as_they_were():
    from smp_runtime.microbatch_state.snapshot import restore_afterwards

    for form in FORMS[:-1]:
        net = _net(form)
        before, storages = copy.deepcopy(net.state_dict()), [p.data_ptr() for p in net.parameters()]
        with restore_afterwards(net):
            net(next(_batches()))
        assert storages == [p.data_ptr() for p in net.parameters()]
        for name, value in net.state_dict().items():
            assert torch.equal(value, before[name]), (form, name)
