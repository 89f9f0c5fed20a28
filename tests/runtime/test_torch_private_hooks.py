"""The canary of what PyTorch keeps private of modules, and of hooks of gradients, which stay a parameter's own.

See ``test_torch_private.py``.
"""

from __future__ import annotations

import pytest
import torch
from support.canaries import Canaries, Doubling
from torch import nn

from smp_runtime.tensors import torch_private as door

CANARIES = Canaries()
of = CANARIES.of


@of("gradient_hooks")
def _(_):
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert door.gradient_hooks(other) == (None, None)
    handle, added = one.register_hook(lambda gradient: 3 * gradient), []
    one.register_post_accumulate_grad_hook(added.append)
    door.swap_contents(one, other)  # its hooks stay its own
    one.sum().backward()
    assert one.grad.tolist() == [3, 3]
    assert added == [one]
    handle.remove()
    assert not door.gradient_hooks(one)[0]


@of("set_gradient_hooks")
def _(_):
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    handle = one.register_hook(lambda gradient: 3 * gradient)
    door.set_gradient_hooks(other, *door.gradient_hooks(one))
    other.sum().backward()
    assert other.grad.tolist() == [3, 3]
    handle.remove()
    other.sum().backward()
    assert other.grad.tolist() == [4, 4]


def test_a_frozen_parameter_with_a_graph_of_before_gets_other_contents():
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3), requires_grad=False)
    kept = one * 2  # as pruning keeps the weight
    one.requires_grad_(False)
    door.swap_contents(one, other)
    assert one.tolist() == [1, 1, 1]
    assert not one.requires_grad
    assert not other.requires_grad
    assert kept.tolist() == [0, 0]


@of("call_with_hooks")
def _(_):
    class Refusing(Doubling):
        def __call__(self, value):
            raise AssertionError("the call of the class")

    module = Refusing()
    module.register_forward_hook(lambda module, args, output: output + 1)
    assert door.call_with_hooks(module, 3) == 7


@of("NORMS_WITH_STATISTICS")
def _(_):
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d):
        assert issubclass(kind, door.NORMS_WITH_STATISTICS)
    assert not issubclass(nn.LayerNorm, door.NORMS_WITH_STATISTICS)


@of("IncompatibleKeys")
def _(_):
    made = door.IncompatibleKeys(["a"], ["b"])
    assert (made.missing_keys, made.unexpected_keys) == (["a"], ["b"])
    assert type(made) is type(nn.Linear(1, 1).load_state_dict({}, strict=False))


@of("before_loading")
def _(_):
    model, seen = nn.Sequential(nn.Linear(1, 1)), []
    door.before_loading(model[0], lambda module, state, prefix, *rest: seen.append((module, prefix)))
    model.load_state_dict(model.state_dict())
    assert seen == [(model[0], "0.")]


@of("dtype_asked_for")
def _(_):
    assert door.dtype_asked_for(torch.float64) is torch.float64
    assert door.dtype_asked_for("cpu", dtype=torch.float16) is torch.float16
    assert door.dtype_asked_for(torch.ones(1, dtype=torch.bfloat16)) is torch.bfloat16
    assert door.dtype_asked_for("cpu", non_blocking=True) is None


@of("device_asked_for")
def _(_):
    assert door.device_asked_for("meta", torch.float16) == torch.device("meta")
    assert door.device_asked_for(torch.ones(1)) == torch.device("cpu")
    assert door.device_asked_for(torch.float64) is None


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_pytorch_keeps_private_of_hooks_and_modules_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)
