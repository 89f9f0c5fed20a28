"""Optimizer shards: the tensors that the inner optimizer really updates for each parameter on this rank.

In plain float32 training that is the parameter itself and there are none. In half precision it is a float32 copy. With
sharded state it is the part of the parameter that this rank owns, or nothing.

A gradient goes one way. The code that reduces it leaves it with the parameter, or here if only its owner gets it. The
optimizer takes it from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from smp_runtime.parameters.watched_values import note_values
from smp_runtime.tensors.host_memory.snapshot import wait_for_copies
from smp_runtime.tensors.parameter_attributes import get_data, get_gradient


@dataclass(eq=False)
class OptimizerShard:
    """The part of a parameter that this rank updates.

    Attributes:
        start: first element of the part, counted in the flattened parameter.
        stop: index after its last element.
        optimized: the tensor that the optimizer updates; float32, shaped like the parameter if it is whole, else flat.
        stored: the same elements in the model's own storage; may share storage with ``optimized``.
        number: of the parameter among all those with state sharded over the same ranks; None if it is not sharded.
        is_fragment: whether gradients are reduced to the rank that has these elements, and do not reach the parameter.
        reduced: of such a shard, the reduced gradient, or None while there is none.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    optimized: nn.Parameter
    stored: torch.Tensor
    number: int | None = None
    is_fragment: bool = False
    reduced: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        """Return the reduced gradient of these elements, or None if no rank used the parameter."""
        return self.reduced if self.is_fragment else get_gradient(self.parameter)

    @property
    def is_whole(self) -> bool:
        """Return whether the optimizer shard is the whole parameter."""
        return self.stop - self.start == self.parameter.numel()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return these elements of a tensor of the parameter's shape, shaped like ``optimized``; a view if possible."""
        return whole.reshape(-1)[self.start : self.stop].view(self.optimized.shape)

    @property
    def is_apart(self) -> bool:
        """Return whether the updated tensor has its own storage."""
        if self.optimized is self.parameter:
            return False
        return self.optimized.data_ptr() != self.stored.data_ptr()

    @torch.no_grad()
    def take(self, whole: torch.Tensor) -> None:
        """Take this part of a tensor of the parameter's shape, if the optimizer shard has storage of its own."""
        if whole.shape == self.parameter.shape and self.is_apart:
            wait_for_copies()
            self.optimized.copy_(self.part_of(whole))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the model's values, after a checkpoint was loaded into it."""
        if self.is_apart:
            wait_for_copies()
            self.optimized.copy_(self.stored)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take a script's writes into the model: elements that differ from ``optimized``, rounded as the model is."""
        if self.is_apart:
            wait_for_copies()
            rounded = self.optimized.to(self.stored.dtype)
            self.optimized.copy_(torch.where(self.stored == rounded, self.optimized, self.stored))
            note_values(self.optimized)


@torch.no_grad()
def store_all(shards: Iterable[OptimizerShard]) -> None:
    """Write updated values into the model, by one operation."""
    stored: list[torch.Tensor] = []
    optimized: list[torch.Tensor] = []
    for shard in shards:
        if shard.is_apart:
            stored.append(shard.stored)
            optimized.append(shard.optimized)
    # PyTorch refuses empty lists.
    if stored:
        wait_for_copies()
        torch._foreach_copy_(stored, optimized)


def whole_shard(parameter: nn.Parameter, masters: Mapping[nn.Parameter, torch.Tensor]) -> OptimizerShard:
    """Return the shard of a whole parameter: its float32 master, or the parameter if it was not cast."""
    return master_shard(parameter, masters[parameter]) if parameter in masters else parameter_shard(parameter)


def parameter_shard(parameter: nn.Parameter) -> OptimizerShard:
    """Return a shard that is the parameter itself."""
    return OptimizerShard(parameter, 0, parameter.numel(), parameter, get_data(parameter))


def master_shard(parameter: nn.Parameter, master: torch.Tensor) -> OptimizerShard:
    """Return a shard for replicated half precision training: the whole parameter with its float32 master."""
    optimized = nn.Parameter(master)
    return OptimizerShard(parameter, 0, parameter.numel(), optimized, get_data(parameter))
