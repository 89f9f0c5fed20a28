"""Equal replicas: parameters and buffers copied from the first data parallel rank to the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Collectives


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor],
    source: int,
    group: dist.ProcessGroup,
    collectives: Collectives,
    *,
    chunk_bytes: int = 64 * 2**20,
) -> None:
    """Overwrite ``tensors`` on every rank of ``group`` with those of global rank ``source``.

    Tensors of one type travel together in buffers of up to ``chunk_bytes``; a larger tensor travels alone, without
    a copy when it is contiguous.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in by_kind.values():
        chunk: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            nbytes = tensor.numel() * tensor.element_size()
            if chunk and size + nbytes > chunk_bytes:
                _broadcast_together(chunk, source, group, collectives)
                chunk, size = [], 0
            chunk.append(tensor)
            size += nbytes
        _broadcast_together(chunk, source, group, collectives)


def _broadcast_together(
    tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup, collectives: Collectives
) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].is_floating_point():
        collectives.broadcast(tensors[0].detach(), source, group).wait()
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    # gloo knows few whole number types; bytes carry them all.
    wire = flat if flat.is_floating_point() or flat.is_complex() else flat.view(torch.uint8)
    collectives.broadcast(wire, source, group).wait()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
