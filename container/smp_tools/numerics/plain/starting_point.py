"""The weights with which the ranks have begun, from which the one process begins too.

Ranks of FSDP2 may draw their shards one by one, so the one process cannot draw the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.errors import SMPRuntimeError
from smp_tools.numerics.plain.layout import is_sharded, local_part

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion

_save = torch.save
_Part = tuple[torch.Tensor, int | None, tuple[int, ...]]


@torch.no_grad()
def save_start(folder: Path, number: int, rank: int, model: nn.Module) -> None:
    """Write this rank's shards of a model; rank 0 also writes what all ranks have."""
    found: dict[str, _Part] = {}
    for name, tensor in _state(model).items():
        local, region = local_part(tensor)
        if rank == 0 or is_sharded(tensor):
            found[name] = local.cpu().clone(), region.axis, region.cuts
    folder.mkdir(parents=True, exist_ok=True)
    _save(found, folder / f"model{number:03}-rank{rank:05}.pt")


@torch.no_grad()
def load_start(folder: Path, number: int, model: nn.Module) -> bool:
    """Give a model the weights of the ranks; returns whether its own were others.

    Raises:
        SMPRuntimeError: the ranks have another model.
    """
    parts = [torch.load(file, weights_only=True) for file in sorted(folder.glob(f"model{number:03}-rank*.pt"))]
    differs = False
    for name, tensor in _state(model).items():
        pieces: list[_Part] = [part[name] for part in parts if name in part]
        local, region = local_part(tensor)
        whole = _assembled(pieces, region)
        if whole is None or whole.shape != local.shape:
            raise SMPRuntimeError(
                f"the one process has {name} with the shape {list(tensor.shape)}, and the ranks have no such parameter: the "
                "script's model depends on the number of ranks, so it cannot be compared with one process"
            )
        differs = differs or not torch.equal(local.cpu(), whole)
        local.copy_(whole)
    return differs


def _state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _assembled(pieces: list[_Part], region: TensorRegion) -> torch.Tensor | None:
    """Return a whole tensor from the parts that ranks have written."""
    if not pieces:
        return None
    first, axis, _ = pieces[0]
    if axis is None:
        return first
    whole = first.new_empty(region.shape)
    for part, _, (start, stop) in pieces:
        whole.narrow(axis, start, stop - start).copy_(part)
    return whole
