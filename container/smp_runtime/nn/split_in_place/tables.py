"""Modules with own parameters that are split over the ranks: many experts, ``[experts, out, in]``, heads, or norms."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.parameters.registry import TensorSlice
from smp_runtime.tensor_parallel.initialisation import uniform_for


@dataclass(frozen=True)
class Tables:
    """How the parameters of such a module are split.

    Attributes:
        cuts: of each parameter that is split, its name, dim, and the lengths along it that are shared out by themselves.
        divided: parameters that every rank has whole and adds a share of.
        experts: how many there are, of a mixture.
        is_norm: it is a norm over features that are shared out.
    """

    cuts: tuple[tuple[str, int, tuple[int, ...]], ...]
    divided: tuple[str, ...] = ()
    experts: int = 0
    is_norm: bool = False

    @property
    def is_spread(self) -> bool:
        """Return whether each rank has whole experts."""
        if self.experts == 0:
            return False
        return all(dim == 0 for _, dim, _ in self.cuts)

    def slices(self, module: nn.Module, rank: int, size: int) -> dict[str, TensorSlice]:
        """Return a rank's slice of each parameter that is split."""
        shapes = {name: tuple(module.get_parameter(name).shape) for name, _, _ in self.cuts}
        return {name: TensorSlice.of(shapes[name], dim, rank, size, pieces) for name, dim, pieces in self.cuts}


class PlannedModule(DistributedModule):
    """A module with a part of the parameters of another; :func:`module_like` puts its own class in front.

    Args:
        original: that it stands for.
        tables: how it is split.
    """

    def __init__(self, original: nn.Module, tables: Tables) -> None:
        DistributedModule.__init__(self)
        inherit_attributes(original, self)
        for name, child in original._modules.items():
            self.add_module(name, child)
        cuts = {name: (dim, pieces) for name, dim, pieces in tables.cuts}
        for name, parameter in original._parameters.items():
            if parameter is None:
                self.register_parameter(name, None)
                continue
            shape, fill = tuple(parameter.shape), uniform_for(parameter.shape[-1])
            if name not in cuts:
                self.add_whole(name, shape, fill)
                continue
            dim, pieces = cuts[name]
            for piece in pieces or (shape[dim],):
                self.share_of(f"dim {dim} of {name}", piece)
            self.add_split(name, shape, dim, fill, pieces=pieces)


@functools.cache
def module_like(kind: type[nn.Module]) -> Any:
    """Return :class:`PlannedModule` with the ``forward`` of another class."""
    return type(kind.__name__, (kind, PlannedModule), {"__init__": PlannedModule.__init__})


def inherit_attributes(original: nn.Module, made: nn.Module) -> None:
    """Copy the attributes and the buffers of a module to its replacement, except PyTorch's internal ones."""
    internal = vars(nn.Module()).keys()
    made.__dict__.update({k: v for k, v in vars(original).items() if k not in internal})
    saved = original.state_dict()
    for name, buffer in original._buffers.items():
        made.register_buffer(name, buffer, persistent=name in saved)
