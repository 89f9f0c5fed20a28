"""Seeing what modules are asked for: on the modules that are watched and the thread that is, and nowhere else."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from smp_runtime.microbatch_state.attribute_watch import AttributeWatch
from smp_runtime.microbatch_state.attributes import Attributes
from smp_runtime.microbatch_state.entries import Entries
from smp_runtime.pipeline.partition.tracing import trace

PATCHABLE = ("__call__", "__getattr__", "__getattribute__", "__setattr__", "__init__")


def of_pytorch():
    """What a process has of PyTorch that others patch."""
    return [getattr(nn.Module, name) for name in PATCHABLE] + [torch.autograd.backward, torch.Tensor.backward]


def in_another_thread(work):
    """What ``work()`` gives on a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


class Counting(type):
    """A metaclass that keeps a list of its classes."""

    made: list = []  # noqa: RUF012

    def __init__(cls, *args):
        super().__init__(*args)
        cls.made.append(cls)


class Layer(nn.Linear, metaclass=Counting):
    """Asks for its class in every way."""

    def __init_subclass__(cls):
        raise TypeError("has no subclasses")

    def forward(self, x):
        self.mask = x > 0
        if self.__class__ is not Layer or type(self).__name__ != "Layer":
            raise TypeError(type(self))
        return super(self.__class__, self).forward(x) * self.mask


class Slotted(nn.Linear):
    __slots__ = ("more",)


@pytest.fixture
def told():
    """A watch of this thread, and what it has told."""
    found: list = []
    me = threading.get_ident()
    watch = AttributeWatch(
        lambda module, name: found.append(("read", module, name)),
        lambda module, name: found.append(("set", module, name)),
        lambda: threading.get_ident() == me,
    )
    with watch:
        yield watch, found


def test_what_is_read_and_set_is_told_of_watched_modules_only(told):
    watch, found = told
    layer, other, before = Layer(4, 4), Layer(4, 4), of_pytorch()
    watch.begin([layer])
    assert of_pytorch() == before
    expected = nn.functional.linear(torch.ones(1, 4), layer.weight, layer.bias)
    found.clear()
    assert torch.equal(layer(torch.ones(1, 4)), expected)
    other(torch.ones(1, 4))
    assert ("set", layer, "mask") in found
    assert {("read", layer, name) for name in ("forward", "weight", "mask")} <= set(found)
    assert all(module is layer for _, module, _ in found)
    with pytest.raises(AttributeError, match="'Layer' object has no attribute 'nothing'"):
        _ = layer.nothing
    assert Counting.made == [Layer]


def test_another_thread_is_not_told_of(told):
    watch, found = told
    layer = Layer(4, 4)
    watch.begin([layer])
    found.clear()
    assert in_another_thread(lambda: layer(torch.ones(1, 4)).shape) == (1, 4)
    assert found == []


def test_modules_get_their_classes_back(told):
    watch, _ = told
    modules = [Layer(2, 2), Slotted(2, 2), nn.LSTM(2, 2), torch.jit.script(nn.Linear(2, 2))]
    kinds = [type(module) for module in modules]
    watch.begin(modules)
    watch.begin(modules)
    assert [module.__class__ for module in modules] == kinds
    assert not set(map(type, modules)) & set(kinds)
    watch.end()
    assert [type(module) for module in modules] == kinds


def test_copies_are_not_watched(told):
    watch, _ = told
    layer = Layer(2, 2)
    watch.begin([layer])
    for made in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made) is Layer
        assert torch.equal(made.weight, layer.weight)


# -- in the tracing step ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Layer(4, 4), nn.Linear(4, 4)

    def forward(self, module):
        return self.two(self.one(module))


def test_tracing_patches_nothing_and_other_threads_notice_nothing():
    model, spare, before = Net(), nn.Linear(4, 4), of_pytorch()
    kinds = {type(module) for module in model.modules()}

    def elsewhere():
        spare(torch.ones(1, 4)).sum().backward()
        torch.autograd.backward(spare(torch.ones(1, 4)).sum())
        return model.one(torch.ones(1, 4)).shape, model.two.weight.shape, spare.bias.grad.tolist()

    def step():
        assert of_pytorch() == before
        assert in_another_thread(elsewhere) == ((1, 4), (4, 4), [2.0] * 4)
        return model(module=torch.ones(2, 4)).sum()

    nodes = trace(model, step, device="cpu").nodes()
    assert [nodes[path].calls for path in ("", "one", "two")] == [1, 1, 1]
    assert {type(module) for module in model.modules()} == kinds
    assert of_pytorch() == before


@pytest.mark.parametrize("times", [False, True])
def test_tracing_leaves_the_model_alone_when_the_step_raises(times):
    model, before = Net(), of_pytorch()
    kinds, held = [type(module) for module in model.modules()], [set(vars(module)) for module in model.modules()]
    runs = []

    def step():
        runs.append(model(torch.ones(2, 4)))
        if len(runs) > times:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(model, step, device="cpu", times=times)
    assert of_pytorch() == before
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == held


def test_backward_adds_to_no_gradient_while_the_model_is_traced():
    model = Net()
    kept = model.two.bias.grad = torch.full((4,), 7.0)

    def step():
        model(torch.ones(2, 4)).sum().backward()
        torch.autograd.backward(model(torch.ones(2, 4)).sum())
        model.zero_grad(set_to_none=False)

    trace(model, step, device="cpu")
    assert model.two.bias.grad is kept
    assert kept.tolist() == [7.0] * 4
    assert model.two.weight.grad is None


def test_modules_that_are_compiled_are_seen_and_stay_so():
    model = Net()
    model.two.compile(backend="eager")
    compiled = model.two._compiled_call_impl
    assert trace(model, lambda: model(torch.ones(2, 4)), device="cpu").nodes()["two"].calls == 1
    assert model.two._compiled_call_impl is compiled


# -- in the first step of a kind -------------------------------------------------------------------------------------


def first_step(module, work):
    """A first step of two microbatches that do ``work()``."""
    me = threading.get_ident()
    attributes = Attributes([module], lambda: threading.get_ident() == me)
    attributes.begin(looks=True, alone=True)
    try:
        for number in range(2):
            attributes.switch(number)
            work()
            attributes.segment_ended()
            attributes.release(number)
    finally:
        attributes.end()
    return attributes


def test_what_another_thread_reads_is_not_handed_on():
    module = Net()

    def work():
        in_another_thread(lambda: getattr(module, "state", None))
        module.state = torch.ones(2)

    before = of_pytorch()
    assert first_step(module, work).carried == []
    assert type(module) is Net
    assert of_pytorch() == before


def test_what_a_class_has_a_default_for_is_handed_on_only_if_it_is_read():
    class WithDefault(nn.Module):
        state = None

    module = WithDefault()
    assert first_step(module, lambda: setattr(module, "state", torch.ones(2))).carried == []
    module = WithDefault()
    assert first_step(module, lambda: setattr(module, "state", (module.state, 1))).carried == ["state"]


def test_a_first_step_that_raises_leaves_the_modules_alone():
    module = Net()
    microbatches = []

    def work():
        module.state = torch.ones(2)
        microbatches.append(type(module))
        if len(microbatches) == 2:
            raise KeyError

    with pytest.raises(KeyError):
        first_step(module, work)
    assert microbatches[0] is Net
    assert microbatches[1] is not Net
    assert type(module) is Net


# -- what they keep --------------------------------------------------------------------------------------------------


def test_entries_are_put_back_in_their_order():
    module = nn.BatchNorm1d(2)
    module.log, weight = [1], module.weight
    keys, names = list(vars(module)), list(module.state_dict())
    entries = Entries([module], buffers=True, apart=frozenset({"_parameters", "_buffers", "_modules"}))
    mean = module.running_mean
    del module.running_mean, module.eps
    module.running_mean, module.eps, module.new = torch.ones(2), 2.0, 3
    module.weight = nn.Parameter(torch.zeros(2))
    module.bias.requires_grad_(False)
    module.log.append(2)
    module.eval()
    changed = {slot.key for slot, before in entries.slots() if not slot.take().is_same(before)}
    assert changed == {"running_mean", "eps", "new", "weight", "requires_grad", "log", "training"}
    entries.put_back()
    assert all(slot.take().is_same(before) for slot, before in entries.slots())
    assert (module.running_mean, module.weight, module.log) == (mean, weight, [1])
    assert sorted(vars(module)) == sorted(keys)
    assert list(module.state_dict()) == names
