"""Modules in which each rank computes a summand: one collective around the module, instead of one for each part.

A mixture of experts is one: the ranks have a part of each expert, or whole experts of their own. Inside, every
gradient is partial, so each input gets the sum of them. The output is summed. A result that is the same on
all ranks, such as the router's, passes a share of its gradient back. The shares add up to the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.tensor_parallel import collectives
from smp_runtime.tensors.nested import leaves_of, map_leaves

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup


class PartialRegion:
    """Hooks around the calls of such a module."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def watch(self, module: nn.Module) -> None:
        """Begin with the next call of ``module``."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, with_kwargs=True)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the gradients of the inputs be summed over the ranks; PyTorch's hook."""

        def replicated(value: Any) -> Any:
            has_gradient = isinstance(value, torch.Tensor) and value.requires_grad
            return collectives.use_replicated(value, self._group) if has_gradient else value

        return tuple(map(replicated, args)), {name: replicated(value) for name, value in kwargs.items()}

    def leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        """Sum the first result of the input's size over the ranks; PyTorch's hook."""
        given = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor))
        is_summed = False

        def whole(value: Any) -> Any:
            nonlocal is_summed
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            has_features = value.shape[-1] == given.shape[-1]
            is_like_given = has_features and value.numel() == given.numel()
            if is_like_given and not is_summed:
                is_summed = True
                return collectives.sum_partials(value, self._group)
            if not value.requires_grad:
                return value
            return collectives.use_once(value, self._group)

        return map_leaves(whole, result)

    def __deepcopy__(self, memo: Any) -> PartialRegion:
        return self


class OwnExperts:
    """A hook in front of a module that has some of the experts: choices of others lead nowhere.

    Args:
        group: the ranks that share the experts out.
        experts: how many there are on all ranks.
    """

    def __init__(self, group: TensorGroup, experts: int) -> None:
        self._group, self._experts = group, experts

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Turn choices ``[tokens, k]`` into those among this rank's experts; PyTorch's hook.

        Choices of other ranks' experts become the number behind the last one.
        """
        here = self._experts // self._group.size
        first = self._group.rank * here
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        choices = next((t for t in tensors if not t.is_floating_point() and t.dim() == 2), None)
        if choices is None or self._group.size == 1:
            return None
        elsewhere = (choices < first) | (choices >= first + here)

        def mine(value: Any) -> Any:
            if value is choices:
                return (choices - first).masked_fill(elsewhere, here)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            if value.shape == choices.shape:
                return value.masked_fill(elsewhere, 0.0)
            has_all_experts = value.shape == (choices.shape[0], self._experts)
            if has_all_experts:
                return value.narrow(1, first, here)
            return value

        return tuple(map(mine, args)), {name: mine(value) for name, value in kwargs.items()}

    def __deepcopy__(self, memo: Any) -> OwnExperts:
        return self
