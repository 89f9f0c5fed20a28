"""Parameters that a script adds, replaces or removes after wrapping are refused by name; what trains the same stays allowed."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import smdistributed.modelparallel.torch as smp
from smp_runtime.errors import SMPUserError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.other, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.other(self.body(x))).square().mean()


def _set_on_wrapper(model):
    model.extra = nn.Linear(4, 4)


def _tie(model):
    model.module.other.weight = model.module.body.weight


def _delete(model):
    del model.module.other.bias


def _drop(model):
    model.module.other = nn.Identity()


def _parametrize(model):
    nn.utils.parametrizations.weight_norm(model.module.other)


CHANGES = {
    "replaced module": (lambda m: setattr(m.module, "head", nn.Linear(4, 2)), r"head.weight, head.bias were replaced"),
    "new module": (lambda m: m.module.add_module("extra", nn.Linear(4, 4)), r"extra.weight, extra.bias were added"),
    "set on the wrapper": (_set_on_wrapper, r"extra.weight, extra.bias were added"),
    "register_parameter": (
        lambda m: m.module.other.register_parameter("scale", nn.Parameter(torch.ones(1))),
        r"other.scale was added",
    ),
    "setattr": (lambda m: setattr(m.module.body, "bias", nn.Parameter(torch.ones(4))), r"body.bias was replaced"),
    "tied": (_tie, r"other.weight was removed"),
    "deleted": (_delete, r"other.bias was removed"),
    "written past the methods": (lambda m: m.module.other._parameters.pop("bias"), r"other.bias was removed"),
    "module removed": (_drop, r"other.weight, other.bias were removed"),
    "weight norm": (_parametrize, r"original0, other.\S*original1 were added; other.weight was removed"),
}


@pytest.mark.parametrize("when", ["step", "update"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_is_refused_by_name(solo, name, when):
    solo({"bf16": True})
    change, said = CHANGES[name]
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.backward(model(torch.ones(2, 4)))
    change(model)
    following = optimizer.step if when == "update" else functools.partial(model, torch.ones(2, 4))
    with pytest.raises(SMPUserError, match=said):
        following()


def _changed_later():
    import smdistributed.modelparallel.torch as smp

    net = Net()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.body)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(x):
        model.backward(model(x))

    step(torch.ones(2, 4))
    optimizer.step()
    model.module.head.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(SMPUserError, match="head.scale was added"):
        step(torch.ones(2, 4))
    with pytest.raises(SMPUserError, match="head.scale was added"):
        optimizer.step()
    model.eval()
    if smp.pp_size() == 1:
        model(torch.ones(2, 4))  # evaluation needs no gradients
    return True


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
        {"tensor_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "microbatches": 2},
    ],
)
def test_every_strategy_refuses_a_parameter_that_came_later(ranks, config):
    assert all(ranks(_changed_later, 2, config={"ddp": True, **config}))


def test_what_leaves_the_trained_parameters_as_they_are_is_allowed(solo):
    solo({"bf16": True})
    net = Net()
    nn.utils.parametrizations.weight_norm(net.other)  # before wrapping
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.module.register_buffer("count", torch.zeros(1))
    model.module.activation = nn.Tanh()
    model.module.alias = model.module.body
    teacher = copy.deepcopy(model.module.head).requires_grad_(False)
    model.module.teacher = teacher
    prune.l1_unstructured(model.module.body, "weight", 0.5)  # the same parameter, under another name
    model.backward(model(torch.ones(2, 4)))
    optimizer.step()
    del model.module.alias
    model.backward(model(torch.ones(2, 4)))
    optimizer.step()
    teacher.requires_grad_(True)
    with pytest.raises(SMPUserError, match=r"teacher.weight was added"):
        model(torch.ones(2, 4))


def test_one_process_in_full_precision_trains_what_comes_later(solo):
    solo({})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    head = model.module.head = nn.Linear(4, 2)
    before = head.weight.detach().clone()
    optimizer.add_param_group({"params": list(head.parameters())})
    model.backward(model(torch.ones(2, 4)))
    optimizer.step()
    assert not torch.equal(head.weight, before)
