"""Offloaded activations at one stage: in the predicted order, in time, and with the same results."""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest
import torch
from support.training.activation_training import HIDDEN, Layer, Net, same, train

import smdistributed.modelparallel.torch as smp
from smp_runtime.activations.activations import Activations
from smp_runtime.activations.offloading import Offloader
from smp_runtime.errors import SMPUserError

LAYERS, BATCH, SEQ = 6, 4, 5


def _marked(model):
    smp.set_activation_checkpointing(model.layers)


def _train(prepare=_marked, **more):
    return train(functools.partial(Net, LAYERS), prepare, batch=BATCH, **more)


@pytest.fixture
def at(solo):
    """``at(microbatches, horizon)``: training with offloading in a session of its own."""

    def run(microbatches, horizon, **more):
        smp.shutdown()
        solo({"microbatches": microbatches, "offload_activations": True, "activation_loading_horizon": horizon})
        return _train(**more)

    return run


@pytest.mark.parametrize("microbatches", [1, 2])
def test_results_are_the_same_and_the_peak_is_the_horizon_and_one(solo, at, microbatches):
    solo({"microbatches": microbatches})
    plain = _train()
    unit = BATCH // microbatches * SEQ * HIDDEN * 4
    for horizon in (1, 2, 3, LAYERS, 2 * LAYERS):
        found = at(microbatches, horizon)
        same([found], [plain])
        for figures in found["figures"]:
            assert figures["peak"] == min(horizon + 1, LAYERS) * unit, (horizon, figures)
            assert figures["late"] == figures["resident"] == 0
        # Near the turn there are fewer tasks than the horizon between a forward pass and its backward pass.
        stay = min((horizon + 1) // 2, LAYERS)
        assert figures["left"] == figures["came"] == (LAYERS - stay) * unit * microbatches


def test_what_was_recorded_is_followed(at):
    assert at(2, 2)["followed"] == [False, True, True]


def test_a_horizon_that_forgets_to_load_is_noticed(at, monkeypatch):
    monkeypatch.setattr("smp_runtime.activations.load_order.Tape.coming", lambda *_: [])
    found = at(1, 2)
    assert found["figures"][0]["late"] == LAYERS


def test_the_memory_on_the_device_is_free_while_an_activation_is_away(at, monkeypatch):
    """Nothing else keeps what has left: the tensor is freed with its graph's other users."""
    from smp_runtime.activations import offloading

    gone = []
    leave = offloading._Movable.leave

    def left(movable):
        tensor = movable.tensor
        leave(movable)
        gone.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))

    monkeypatch.setattr(offloading._Movable, "leave", left)
    expired = []

    class Watching(Net):
        def forward(self, ids):
            hidden = self.layers(self.embedding(ids))
            expired.extend(ref.expired() for ref in gone)
            return self.head(hidden)

    smp.shutdown()
    smp.init({"offload_activations": True, "activation_loading_horizon": 1})
    train(functools.partial(Watching, LAYERS), _marked, steps=1)
    assert expired
    assert all(expired)


def test_an_input_of_several_regions_is_kept_once(solo):
    solo({"offload_activations": True, "activation_loading_horizon": 1})

    class Shared(Net):
        def __init__(self):
            super().__init__(4)
            for layer in self.layers:
                layer.__class__ = _WithMemory

        def forward(self, ids):
            memory = x = self.embedding(ids)
            for layer in self.layers:
                x = layer(x, memory)
            return self.head(x)

    class _WithMemory(Layer):
        def forward(self, x, memory):
            return super().forward(x + memory)

    found = train(Shared, _marked)
    offloader = Activations.here().offloader
    assert offloader.figures.resident == 0
    # Of each layer its input, and the memory, which is the first layer's input, once.
    unit = BATCH * SEQ * HIDDEN * 4
    assert found["figures"][-1]["left"] <= 4 * unit
    assert found["figures"][-1]["late"] == 0


def test_training_without_a_step_function(solo):
    def run():
        torch.manual_seed(0)
        model = smp.DistributedModel(Net(LAYERS))
        smp.set_activation_checkpointing(model.layers)
        gradients = []
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            model(torch.tensor([[1, 2, 3]])).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients

    solo({})
    plain = run()
    smp.shutdown()
    solo({"offload_activations": True, "activation_loading_horizon": 2})
    for got, expected in zip(run(), plain, strict=True):
        assert all(map(torch.equal, got, expected))
    figures = Activations.here().offloader.figures
    assert figures.late == figures.resident == 0
    assert figures.left > 0


def test_backward_twice_through_one_graph(solo):
    solo({"offload_activations": True, "activation_loading_horizon": 1})
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(3))
    smp.set_activation_checkpointing(model.layers)
    loss = model(torch.tensor([[1, 2, 3]])).square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_a_warning_where_nothing_is_checkpointed(at, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("smp"), "propagate", True)
    with caplog.at_level("WARNING", "smp"):
        at(1, 2, prepare=None)
        assert sum("no module is checkpointed" in message for message in caplog.messages) == 1
        caplog.clear()
        at(1, 2)
        assert not any("no module is checkpointed" in message for message in caplog.messages)


@pytest.mark.parametrize(("horizon", "count"), [(2 * LAYERS, 1), (2 * LAYERS - 2, 0), (1, 0)])
def test_one_warning_where_the_horizon_keeps_every_input(at, caplog, monkeypatch, horizon, count):
    monkeypatch.setattr(logging.getLogger("smp"), "propagate", True)
    with caplog.at_level("WARNING", "smp"):
        at(1, horizon, steps=5)
    messages = [message for message in caplog.messages if "offload_activations moves nothing" in message]
    assert len(messages) == count
    for message in messages:
        assert f"a step has {2 * LAYERS} forward and backward passes" in message
        assert f"activation_loading_horizon is {horizon}" in message


class _Copies:
    """A device whose copies run apart: nothing is complete before ``end`` says so."""

    def __init__(self, monkeypatch):
        self.done = False
        real = torch.empty_like
        monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: real(tensor))  # no pinned memory, no GPU
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        self.offloader = Offloader(1, torch.device("cpu"), lambda: (None, None, None))
        self.offloader.out_stream = self.offloader.in_stream = self.offloader._pool = self
        self.take = lambda tensor, _: (real(tensor), None)

    def query(self):
        return self.done

    def ignore(self, *_):
        pass

    wait_stream = wait_event = record = synchronize = ignore


@pytest.fixture
def copies(monkeypatch):
    return _Copies(monkeypatch)


def _computed():
    return torch.ones(3, requires_grad=True) * 2


def test_what_comes_back_before_it_was_seen_to_have_left_is_unchanged(copies):
    source = _computed()
    stored = copies.offloader.store(source)
    stored.leave()
    stored.load()
    copies.done = True
    copies.offloader._check_leaving()
    assert torch.equal(stored.take("region"), source)
    with torch.no_grad():
        source.add_(1)  # backward has it already
    copies.offloader.begin_step()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_change_in_place_while_it_leaves_is_seen(copies, comes_back):
    source = _computed()
    stored = copies.offloader.store(source)
    stored.leave()
    with torch.no_grad():
        source.add_(1)
    if comes_back:
        stored.load()
    goes_on = functools.partial(stored.take, "region") if comes_back else copies.offloader.begin_step
    with pytest.raises(SMPUserError, match="was changed in place 1 times"):
        goes_on()


def test_a_source_that_has_changed_since_its_copy_came_back_is_kept_anew():
    offloader = Offloader(1, torch.device("cpu"), lambda: (None, None, None))
    source = _computed()
    stored = offloader.store(source)
    stored.leave()
    stored.load()
    assert offloader.store(source) is stored
    for _ in range(2):
        with torch.no_grad():
            source.add_(1)
        assert torch.equal(offloader.store(source).take("region"), source)
