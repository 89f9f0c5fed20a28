"""How a wrapped model looks from outside: attributes, names and iterators are those of the module inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.parameters.optimizer_shards import OptimizerShard
from smp_runtime.parameters.registry import ParameterRegistry


class WrappedNames(nn.Module):
    """A wrapper whose names are those of ``self.module``.

    Attributes:
        module: the user's module.
        registry: its parameters.
        optimizer_shards: what the optimizer updates instead of the parameters; None when it updates the parameters.
        _stage_of: pipeline stage of a module by its path; None while all of the model is on this rank.
        _stage: of this rank.
    """

    module: nn.Module
    registry: ParameterRegistry
    _stage_of: Callable[[str], int] | None
    _stage: int
    optimizer_shards: dict[nn.Parameter, OptimizerShard | None] | None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or name.startswith("__"):
                raise
            return getattr(super().__getattr__("module"), name)

    def get_module(self) -> nn.Module:
        """The user's module."""
        return self.module

    def _alias_module(self) -> None:
        # Scripts unwrap one, two or three levels; the module answers for each of them. Written past
        # nn.Module.__setattr__, so it is no submodule and appears in no state_dict.
        if not hasattr(self.module, "module"):
            self.module.__dict__["module"] = self.module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules under their names in the unwrapped module, so that all names agree with ``state_dict``."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules of this rank's stage."""
        return (module for _, module in self.local_named_modules())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this rank's stage, with names."""
        return ((path, module) for path, module in self.module.named_modules() if self._is_local(path))

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stage."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stage, with names."""
        return ((name, p) for name, p in self.module.named_parameters() if self._is_local(name.rpartition(".")[0]))

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers of this rank's stage."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of this rank's stage, with names."""
        return ((name, b) for name, b in self.module.named_buffers() if self._is_local(name.rpartition(".")[0]))

    def _is_local(self, path: str) -> bool:
        return self._stage_of is None or self._stage_of(path) == self._stage

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer of this rank updates, under the parameters' names; with sharded state the parts it owns."""
        for record in self.registry:
            if not self._is_local(record.name.rpartition(".")[0]):
                continue
            if self.optimizer_shards is None or record.parameter not in self.optimizer_shards:
                yield record.name, record.parameter
            elif (shard := self.optimizer_shards[record.parameter]) is not None:
                yield record.name, shard.optimized

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are reduced over the ``DP`` group."""
        return ((record.name, record.parameter) for record in self.registry.reduced_over(Group.DP))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters whose gradients are reduced over the ``RDP`` group: those of distributed modules."""
        return ((record.name, record.parameter) for record in self.registry.reduced_over(Group.RDP))

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Modules that are split over tensor parallel ranks."""
        return (module for module in self.module.modules() if hasattr(module, "tensor_slices"))

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter is split over tensor parallel ranks."""
        return self.registry.record_of(param).placement.tensor_axis is not None

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter sees the batch of the whole tensor parallel group."""
        return self.registry.record_of(param).reduction is Group.RDP

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Whether a buffer is split over tensor parallel ranks."""
        return False

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Whether a buffer sees the batch of the whole tensor parallel group."""
        return False
