"""Regions in one process: the same gradients, whatever the arguments, and clear errors."""

from __future__ import annotations

import copy
import io
import logging

import pytest
import torch
from support.models.models import loss_of, token_batch
from support.training.activation_training import HIDDEN, Layer, Net, same, train
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
from smp_runtime.errors import SMPUserError


def _marked(strategy="each", **more):
    return lambda model: smp.set_activation_checkpointing(model.layers, strategy=strategy, **more)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_3"])
def test_gradients_are_bitwise_those_without(solo, strategy, before):
    solo({"microbatches": 2})
    plain = train(Net)
    marked = train(Net, _marked(strategy), before=before)
    same([marked], [plain])
    assert marked["runs"] == 2 * plain["runs"]


def test_with_a_sequence_in_the_forward(solo):
    class Inside(Net):
        def forward(self, ids):
            x = checkpoint_sequential(self.layers[:3], self.embedding(ids), strategy="group_2")
            return self.head(checkpoint(self.layers[3], x))

    solo({"microbatches": 2})
    plain = train(Net)
    inside = train(Inside)
    same([inside], [plain])
    assert inside["runs"] == 2 * plain["runs"]


class Many(nn.Module):
    """Takes and gives structures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, pair, /, *more, table, flag=False, nothing=None):
        x, (y, ids) = pair
        x = self.dropout(self.linear(x)) + table["z"] * (2 if flag else 1) + more[0][ids]
        return {"x": x, "rest": (torch.sigmoid(y * x), ids)}


@pytest.mark.parametrize("how", ["function", "mark"])
def test_keyword_arguments_and_structures(how):
    def run(checkpointed):
        torch.manual_seed(0)
        module = Many()
        x, y, z = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
        table, ids = {"z": z}, torch.tensor([1, 0, 1])
        if checkpointed and how == "mark":
            smp.set_activation_checkpointing(module)
        call = (lambda *a, **k: checkpoint(module, *a, **k)) if checkpointed and how == "function" else module
        given = call((x, (y, ids)), torch.ones(2, 4), table=table, flag=True)
        (given["x"].sum() + given["rest"][0].square().sum()).backward()
        assert given["rest"][1] is ids or torch.equal(given["rest"][1], ids)
        return [x.grad, y.grad, z.grad, module.linear.weight.grad, torch.rand(2)]

    for got, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(got, expected)


def test_random_numbers_after_a_region_are_those_without(solo):
    solo({})
    drawn = []
    for prepare in (None, _marked()):
        train(Net, prepare, steps=1)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_without_random_state_dropout_differs():
    def run(preserve):
        torch.manual_seed(0)
        layer = Layer()
        smp.set_activation_checkpointing(layer, preserve_rng_state=preserve)
        x = torch.randn(64, HIDDEN, requires_grad=True)
        layer(x).sum().backward()
        return x.grad

    assert not torch.equal(run(True), run(False))


def test_the_outermost_region_counts(solo):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer()

        def forward(self, x):
            return self.inner(x).sin()

    torch.manual_seed(0)
    outer = Outer()
    smp.set_activation_checkpointing(outer)
    smp.set_activation_checkpointing(outer.inner)
    outer(torch.randn(2, HIDDEN)).sum().backward()
    assert outer.inner.runs == 2


def test_hooks_run_with_the_module():
    layer, seen = Layer(), []
    layer.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    smp.set_activation_checkpointing(layer)
    layer(torch.randn(2, HIDDEN)).sum().backward()
    assert seen == [True, True]


def test_evaluation_runs_once():
    layer = Layer()
    smp.set_activation_checkpointing(layer)
    with torch.no_grad():
        layer(torch.randn(2, HIDDEN))
    assert layer.runs == 1


@pytest.mark.parametrize("strategy", ["each", "group_2"])
def test_copies_and_files_keep_the_setting(strategy):
    net = nn.Sequential(Layer(), Layer(), Layer())
    smp.set_activation_checkpointing(net, strategy=strategy)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        other(torch.randn(2, HIDDEN)).sum().backward()
        assert [layer.runs for layer in other] == [2, 2, 2]
        assert other[0].widen.weight.grad is not None
    assert [layer.runs for layer in net] == [0, 0, 0]


def test_a_module_list_and_the_wrapped_model(solo):
    solo({})
    layers = nn.ModuleList([Layer(), Layer()])
    smp.set_activation_checkpointing(layers)
    layers[1](layers[0](torch.randn(2, HIDDEN))).sum().backward()
    assert [layer.runs for layer in layers] == [2, 2]
    model = smp.DistributedModel(Net(2))
    smp.set_activation_checkpointing(model)
    ids, targets = token_batch(0, 2)
    loss_of(model(ids), targets).backward()
    assert [layer.runs for layer in model.layers] == [2, 2]


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (Layer, {"strategy": "contiguous"}, r"strategy='contiguous' was given for a Layer"),
        (Layer, {"pack_args_as_tuple": True}, r"pack_args_as_tuple=True was given for a Layer"),
        (
            lambda: nn.ModuleList([Layer()]),
            {"strategy": "group_2"},
            r"for a ModuleList.*make the layers an nn.Sequential",
        ),
        (lambda: nn.Sequential(Layer()), {"strategy": "group_0"}, r"at least one child; use 'group_1'"),
        (lambda: nn.Sequential(Layer()), {"strategy": "some"}, r"strategy is 'some'.*use 'each'"),
        (lambda: "layers", {}, r"got 'layers', a str; pass a module"),
    ],
)
def test_wrong_arguments(make, more, message):
    with pytest.raises(SMPUserError, match=message):
        smp.set_activation_checkpointing(make(), **more)


def test_a_sequence_with_a_forward_of_its_own():
    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(SMPUserError, match="Own has a forward of its own.*use strategy 'each'"):
        smp.set_activation_checkpointing(Own(Layer()), strategy="group_2")
    with pytest.raises(SMPUserError, match="needs an nn.Sequential, but got a Layer"):
        checkpoint_sequential(Layer(), torch.ones(1))
    with pytest.raises(SMPUserError, match="checkpoint got 3, an int, to call"):
        checkpoint(3, torch.ones(1))


def test_an_argument_that_was_changed_in_place(solo):
    solo({})
    layer = Layer()
    smp.set_activation_checkpointing(layer)
    x = torch.randn(2, HIDDEN, requires_grad=True) * 2
    y = layer(x)
    x += 1
    with pytest.raises(SMPUserError, match=r"shape \[2, 8\].*changed in place 1 times.*change a copy"):
        y.sum().backward()


def test_tuples_go_from_child_to_child():
    class Pair(nn.Module):
        def forward(self, pair):
            x, mask = pair
            return x.sin() * mask, mask

    x = torch.randn(3, requires_grad=True)
    given, _ = checkpoint_sequential(nn.Sequential(Pair(), Pair()), (x, torch.ones(3)), pack_args_as_tuple=True)
    given.sum().backward()
    assert torch.allclose(x.grad, x.sin().cos().detach() * x.cos().detach())


def test_modules_that_replace_checkpointed_ones_are_checkpointed(caplog, monkeypatch):
    from smp_runtime.activations.marking import carry_over, find_marks, is_marked

    monkeypatch.setattr(logging.getLogger("smp"), "propagate", True)
    net = nn.ModuleDict({"first": Layer(), "second": nn.Sequential(Layer()), "third": nn.Sequential(Layer(), Layer())})
    smp.set_activation_checkpointing(net["first"])
    smp.set_activation_checkpointing(net["second"])
    smp.set_activation_checkpointing(net["third"], strategy="group_2")
    before = find_marks(net)
    net["first"], net["second"], net["third"] = Layer(), Layer(), nn.Sequential(Layer(), Layer())
    with caplog.at_level("WARNING", "smp"):
        carry_over(before, net)
    assert [is_marked(net[name]) for name in ("first", "second", "third")] == [True, False, True]
    assert "the checkpointing of 'second.0' is lost" in caplog.text
    net["third"](torch.randn(2, HIDDEN)).sum().backward()
    assert [layer.runs for layer in net["third"]] == [2, 2]
