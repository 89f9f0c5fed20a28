"""The part of a parameter that a rank of a plain script has: all of it with DDP, a shard with FSDP2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from smp_runtime.checkpoint.files.tensor_regions import TensorRegion

if TYPE_CHECKING:
    import torch
    from torch import nn


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor; nothing is imported if the script uses none."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, TensorRegion]:
    """Return the elements of a tensor that this rank has, and their place in the whole.

    A layout that is not cut into even chunks of one axis is gathered, which all ranks of its mesh must do together.
    """
    if not is_sharded(tensor):
        return tensor.detach(), TensorRegion.of(tuple(tensor.shape))
    bounds = _bounds(tensor)
    if bounds is None:
        return tensor.detach().full_tensor(), TensorRegion.of(tuple(tensor.shape))  # type: ignore[attr-defined]
    axis, start, stop = bounds
    region = TensorRegion.of(tuple(tensor.shape), *(() if axis is None else (axis, (start, stop))))
    return tensor.detach().to_local(), region  # type: ignore[attr-defined]


def _bounds(tensor: torch.Tensor) -> tuple[int | None, int, int] | None:
    """Return the axis, the start and the stop of this rank's chunk; None for another layout."""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    axis: int | None = None
    start, stop = 0, 0
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        # Subclasses cut in another way, and partial sums are no chunks.
        if type(placement).__name__ != "Shard" or axis not in (None, placement.dim):
            return None
        if axis is None:
            axis, start, stop = placement.dim, 0, tensor.shape[placement.dim]
        chunk = -(-(stop - start) // mesh.size(dimension))
        first = start + coordinate[dimension] * chunk
        start, stop = min(stop, first), min(stop, first + chunk)
    return axis, start, stop


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the script's own model: without ``DistributedDataParallel`` around it."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module
