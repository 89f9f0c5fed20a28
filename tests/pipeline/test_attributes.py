"""What forward passes leave on modules belongs to their microbatch, as in one process that runs them one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training.closeness import close
from support.training.reference import Alone, divided
from torch import nn

from smp_runtime.microbatch_state.attributes import Attributes

WIDTH, BATCH, STEPS, MICROBATCHES = 6, 8, 7, 4


class Chain(nn.Module):
    """Layers of two stages; what the module itself does is the cases'."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        raise NotImplementedError


class Mask(Chain):
    def forward(self, x):
        self.mask = (x > 0).to(x.dtype)
        h = torch.tanh(self.a(x)) * 2
        return self.c(self.b(h)) * self.mask


class Stack(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.skips: list[torch.Tensor] = []

    def forward(self, x):
        self.skips.append(self.b(x))
        h = torch.relu(self.a(x))
        self.skips.append(h * h)
        h = torch.relu(self.c(h)) + self.skips.pop()
        return self.a(h) + self.skips.pop()


class Log(Chain):
    """Numbers and a list that grow: all microbatches add to one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.count = 0

    def forward(self, x):
        h = torch.relu(self.a(x) * 2)
        self.seen.append(len(x))
        self.count += 1
        return self.c(torch.relu(self.b(h))) + self.count * 0


class Recurrent(Chain):
    """Each microbatch begins with the state that the one before it has left."""

    def forward(self, x):
        if getattr(self, "state", None) is None:
            self.state = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        h = torch.tanh(self.a(x) + self.state)
        self.state = h.detach()
        return self.c(self.b(h))


class Cell(nn.Module):
    """The same in a module that lies on one stage with all that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.state = None

    def forward(self, x):
        before = 0.0 if self.state is None else self.state
        self.state = torch.tanh(self.inner(x) + before).detach()
        return self.inner(x) + before


class WithCell(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.b = Cell()

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class WithDefaults(Recurrent):
    """What it hands on, and a number that counts, have defaults in the class."""

    state = None
    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class Toggled(Chain):
    """A layer is frozen for part of the forward pass, and dropout is off for another part."""

    def forward(self, x):
        self.c.requires_grad_(False)
        frozen = self.c(torch.tanh(self.a(x) * 2))
        h = frozen + torch.tanh(self.b(x))
        self.c.requires_grad_(True)
        return self.c(h) + self.a(torch.tanh(h))


class Twice(Chain):
    """Running statistics that each microbatch moves twice, with a call of another stage in between."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.c(torch.tanh(self.a(self.c(x)))) + self.b(x)


CASES: dict[str, tuple[type[Chain], bool]] = {
    "mask": (Mask, True),
    "stack": (Stack, True),
    "log": (Log, True),
    "recurrent": (Recurrent, False),
    "defaults": (WithDefaults, False),
    "cell": (WithCell, True),
    "toggled": (Toggled, True),
    "twice": (Twice, False),
}


def _built(name: str) -> Chain:
    torch.manual_seed(3)
    return CASES[name][0]().double()


def _batch(step: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _alone(name: str) -> tuple[list[float], nn.Module]:
    alone = Alone(_built(name), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for step in range(STEPS):
        alone.step(divided((_batch(step),), MICROBATCHES), lambda model, x: (model(x) - 1).square().mean())
    return alone.losses, alone.model


def _staged(name: str) -> dict[str, Any]:
    import smdistributed.modelparallel.torch as smp

    net = _built(name)
    for path, stage in (("a", 1), ("b", 1 if name == "cell" else 0), ("c", 0)):
        smp.set_partition(net.get_submodule(path), stage)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train(x):
        loss = (model(x) - 1).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(train(_batch(step)).reduce_mean()))
        optimizer.step()
    return {
        "losses": losses,
        "parameters": {key: value.detach() for key, value in model.local_named_parameters()},
        "mean": getattr(net.c, "running_mean", None),
        "replayed": model.pipeline.replayed,
        "seen": getattr(net, "seen", None),
        "count": getattr(net, "count", None),
        "state": getattr(net, "state", None),
    }


@pytest.mark.parametrize("pipeline", ["interleaved", pytest.param("simple", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(ranks, name, pipeline):
    config = {"partitions": 2, "microbatches": MICROBATCHES, "pipeline": pipeline}
    config |= {"auto_partition": False, "default_partition": 0}
    losses, model = _alone(name)
    results = ranks(_staged, 2, name, config=config)
    expected = dict(model.named_parameters())
    for result in results:
        close(torch.tensor(result["losses"]), torch.tensor(losses), "the losses", 1e-9)
        assert result["replayed"] == CASES[name][1]
        for key, value in result["parameters"].items():
            close(value, expected[key].detach(), key, 1e-9)
    assert results[0]["seen"] == getattr(model, "seen", None)
    assert results[0]["count"] == getattr(model, "count", None)
    if name == "twice":
        close(results[0]["mean"], model.c.running_mean, "the running mean", 1e-9)
    if name in ("recurrent", "defaults"):
        close(results[0]["state"], model.state, "the state after the last microbatch", 1e-9)


# -- by themselves ---------------------------------------------------------------------------------------------------


def _module(**attributes: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    vars(module).update(attributes)
    return module


def _taught(module: nn.Module, work: Any) -> Attributes:
    """What a first step finds out, whose microbatches 0 and 1 do ``work(module, number)``, with a wait after it."""
    attributes = Attributes([module])
    attributes.begin(looks=True, alone=True)
    for number in range(2):
        attributes.switch(number)
        work(module, number)
        attributes.segment_ended()
        attributes.release(number)
    attributes.end()
    attributes.begin(looks=False, alone=False)
    return attributes


def test_a_microbatch_finds_what_it_has_left():
    def work(module, number):
        module.mask = torch.full((), float(number))

    module = _module()
    attributes = _taught(module, work)
    for number in (0, 1, 0, 1):
        attributes.switch(number)
        if not hasattr(module, "mask") or float(module.mask) != number + 10:
            work(module, number + 10)
    attributes.switch(0)
    assert float(module.mask) == 10
    attributes.release(0)
    attributes.switch(1)
    assert float(module.mask) == 11
    attributes.end()
    assert not attributes.carries


def test_the_step_leaves_what_the_last_microbatch_left():
    def work(module, number):
        module.mask = torch.full((), float(number))

    module = _module()
    attributes = _taught(module, work)
    for number in (0, 1, 0):
        attributes.switch(number)
        work(module, number)
    attributes.end()
    assert float(module.mask) == 1


def test_a_stack_is_empty_for_every_new_microbatch():
    def work(module, number):
        module.stack.append(number)
        attributes.segment_ended()
        module.stack.pop()

    module = _module(stack=[])
    attributes = Attributes([module])
    attributes.begin(looks=True, alone=True)
    attributes.switch(0)
    work(module, 0)
    attributes.release(0)
    attributes.end()
    attributes.begin(looks=False, alone=False)
    stack = module.stack
    attributes.switch(0)
    stack.append("first")
    attributes.switch(1)
    assert stack == []
    stack.append("second")
    attributes.switch(0)
    assert module.stack is stack
    assert stack == ["first"]


def test_values_that_are_read_before_they_are_set_are_carried():
    def work(module, number):
        module.state = torch.ones(2) if module.state is None else module.state + 1

    attributes = _taught(_module(state=None), work)
    assert attributes.carried == ["state"]
    assert not attributes.crosses


def test_a_microbatch_that_begins_before_the_end_of_the_last_is_heard_of_finds_its_state():
    """Calls of a third stage can overtake the root's word; in the first step nothing else runs by then."""
    module = _module(state=None)
    attributes = Attributes([module])
    attributes.begin(looks=True, alone=True)
    for number in range(3):
        attributes.switch(number)
        module.state = torch.ones(2) if module.state is None else module.state + 1
        if number:
            attributes.release(number - 1)
        attributes.segment_ended()
    attributes.release(2)
    attributes.end()
    assert module.state.tolist() == [3.0, 3.0]
    assert attributes.carried == ["state"]


def test_values_that_are_set_after_a_wait_must_not_be_overtaken():
    def work(module, number):
        before = getattr(module, "state", 0)
        attributes.segment_ended()
        module.state = torch.ones(2) + before

    module = _module()
    attributes = Attributes([module])
    attributes.begin(looks=True, alone=True)
    for number in range(2):
        attributes.switch(number)
        work(module, number)
        attributes.segment_ended()
        attributes.release(number)
    attributes.end()
    assert attributes.carries
    assert attributes.crosses
    assert module.state.tolist() == [2.0, 2.0]


def test_modules_look_up_attributes_as_ever_after_the_step():
    original = nn.Module.__getattr__
    _taught(_module(), lambda module, number: None)
    assert nn.Module.__getattr__ is original
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = _module().nothing
