"""The canary of what PyTorch keeps private of hooks of gradients, which stay a parameter's own; see ``test_torch_private.py``."""

from __future__ import annotations

import pytest
import torch
from support.canaries import Canaries
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


@pytest.mark.parametrize("name", CANARIES.checks)
def test_what_pytorch_keeps_private_of_hooks_does_what_it_is_used_for(name, request):
    CANARIES.run(name, request)
