"""A model as the script has given it: built anew without its weights, and none of these is kept alive by it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from smp_runtime.microbatch_state.blueprint import Blueprint, ParameterShape


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("mean", torch.ones(4))
        self.dropout = nn.Dropout(0.1)


def _zeros(shape: ParameterShape) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape.shape, dtype=shape.dtype), shape.requires_grad)


def test_what_was_computed_from_parameters_is_not_kept():
    module = Net()
    module.kept = module.inner.weight * 2
    module.several = [module.inner.weight * 3]
    weight = weakref.ref(module.inner.weight)
    blueprint = Blueprint(module)
    del module.kept
    module.several.clear()
    module.inner.weight = module.tied.weight = nn.Parameter(torch.zeros(4, 4))
    gc.collect()
    assert weight() is None
    assert not hasattr(blueprint.build(_zeros, torch.zeros_like), "kept")


def test_what_was_replaced_and_added_goes_and_what_the_script_has_set_stays():
    module = Net()
    blueprint = Blueprint(module)
    inner, calls = module.inner, []
    module.inner = nn.Identity()  # as strategies do
    module.own_mark = 3
    module.dropout.p = 0.1
    freed = weakref.ref(inner.bias)
    blueprint.note_wrapped(module)
    assert freed() is None
    assert inner.bias.shape == (4,)
    assert inner.weight is module.tied.weight  # it is in the model still
    blueprint.note_settings(torch.device("cpu"), None)
    module.dropout.p = 0.3
    module.dropout.register_forward_hook(lambda *_: calls.append(1))
    module.tied.weight.requires_grad_(False)
    module.eval()
    module.mean.add_(1)
    built = blueprint.build(_zeros, torch.zeros_like)
    assert built is module
    assert module.inner is inner
    assert module.inner.weight is module.tied.weight
    assert not module.inner.weight.requires_grad
    assert not module.inner.weight.any()
    assert not hasattr(module, "own_mark")
    assert (module.dropout.p, module.dropout.training) == (0.3, False)
    module.dropout(torch.ones(2, 4))
    assert calls == [1]


def test_hooks_of_gradients_stay_with_their_handles():
    module, added = Net(), []
    blueprint = Blueprint(module)
    handle = module.inner.weight.register_hook(lambda gradient: 3 * gradient)
    module.inner.bias.register_post_accumulate_grad_hook(lambda parameter: added.append(parameter))
    blueprint.build(_zeros, torch.zeros_like)
    module.inner(torch.ones(1, 4)).sum().backward()
    assert module.inner.weight.grad.eq(3).all()
    assert len(added) == 1
    assert added[0] is module.inner.bias
    handle.remove()
    module.inner.weight.grad = None
    module.inner(torch.ones(1, 4)).sum().backward()
    assert module.inner.weight.grad.eq(1).all()


def test_hooks_on_what_a_strategy_has_made_are_named():
    module = Net()
    blueprint = Blueprint(module)
    module.inner = nn.Linear(4, 4)  # as tensor parallelism does
    blueprint.note_wrapped(module)
    module.inner.bias.register_hook(lambda gradient: gradient)
    assert blueprint.listened_elsewhere(module) == ["inner.bias"]


def test_torchscript_cannot_be_built_anew():
    assert "TorchScript" in Blueprint(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))).problem
