"""One parameter object gets the contents of another, so that all who hold it see them."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from smp_runtime.tensors.torch_private import swap_in_place


def swap_contents(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Swap values, device, type and gradients of two parameters; each object stays what it was to those who hold it.

    Unlike ``torch.utils.swap_tensors`` it also swaps parameters that something refers to weakly, as recurrent layers do
    to find their weights again: they shall find the new contents.

    Raises:
        RuntimeError: an autograd graph or a view holds one of them.
    """
    if not weakref.getweakrefs(parameter):
        torch.utils.swap_tensors(parameter, other)
        return
    parameter.__class__, other.__class__ = other.__class__, parameter.__class__
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    swap_in_place(parameter, other)
