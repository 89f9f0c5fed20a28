"""Matrices that PyTorch's ``fully_shard`` has cut: DTensors. Every rank gets the whole direction."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor of PyTorch, without importing their module."""
    module = sys.modules.get("torch.distributed.tensor")  # there are none before it is imported
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def gathered(part: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a whole tensor, gathered from parts that lie on the ranks like those of a DTensor ``like``; it may be changed."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    spread = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.detach().stride()
    )
    return spread.full_tensor().contiguous()


def part_here(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's part of a whole tensor, as it has one of the DTensor ``like``."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    part: torch.Tensor = everywhere.redistribute(placements=like.placements).to_local()
    return part
