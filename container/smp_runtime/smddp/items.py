"""What an all-gather is asked to do, in bytes: the same for one tensor, a list of tensors, and several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Item:
    """One all-gather.

    Attributes:
        outputs: by group rank, where its shard goes: contiguous, ``[bytes]`` of uint8.
        shard: this rank's, ``[bytes]``; may be its output.
        wanted: the tensors that were to be filled.
        finish: copies to these what is in the outputs; None where it is there already.
    """

    outputs: Sequence[torch.Tensor]
    shard: torch.Tensor
    wanted: Sequence[torch.Tensor]
    finish: Callable[[], Any] | None = None

    @classmethod
    def into_one(cls, output: torch.Tensor, shard: torch.Tensor, size: int) -> Item | None:
        """All shards into ``output``, one after the other; None where shapes or types do not fit each other."""
        if not (_alike(output, shard) and output.numel() == size * shard.numel()):
            return None
        dense = (
            output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device=output.device)
        )
        rows = as_bytes(dense).view(size, -1)
        finish = None if dense is output else lambda: output.copy_(dense)
        return cls(tuple(rows), as_bytes(shard.contiguous()), [output], finish)

    @classmethod
    def into_list(cls, outputs: Sequence[torch.Tensor], shard: torch.Tensor, size: int) -> Item | None:
        """Each shard into a tensor of its own; None where shapes or types do not fit each other."""
        if len(outputs) != size or not all(_alike(o, shard) and o.numel() == shard.numel() for o in outputs):
            return None
        dense = [o if o.is_contiguous() else torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
        moved = [(wanted, there) for wanted, there in zip(outputs, dense, strict=True) if wanted is not there]

        def finish() -> None:
            for wanted, there in moved:
                wanted.copy_(there)

        rows = [as_bytes(tensor) for tensor in dense]
        return cls(rows, as_bytes(shard.contiguous()), list(outputs), finish if moved else None)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, ``[bytes]`` of uint8."""
    # Contiguous tensors may still have odd strides where a dimension has one element.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _alike(output: torch.Tensor, shard: torch.Tensor) -> bool:
    plain = output.layout is torch.strided and shard.layout is torch.strided and not shard.is_quantized
    return plain and output.dtype is shard.dtype and output.device == shard.device and not shard.is_conj()
