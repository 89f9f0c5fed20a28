"""All-gather requests in bytes: the same form for one tensor, a list of tensors, and several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GatherItem:
    """One all-gather.

    Attributes:
        outputs: by group rank, where its shard goes: contiguous, ``[bytes]`` of uint8.
        shard: this rank's, ``[bytes]``; may be its output.
        filled: the caller's tensors that get the result.
        report: returns the value of the future: the same as that of the plain backend of the device.
        finish: copies the outputs into ``filled``; None if they are there already.
    """

    outputs: Sequence[torch.Tensor]
    shard: torch.Tensor
    filled: Sequence[torch.Tensor]
    report: Callable[[], list[torch.Tensor]]
    finish: Callable[[], Any] | None = None

    @classmethod
    def into_one(cls, output: torch.Tensor, shard: torch.Tensor, size: int) -> GatherItem | None:
        """Return the gather of all shards into ``output``, one after the other; None if shapes or types do not fit."""
        if not (_alike(output, shard) and output.numel() == size * shard.numel()):
            return None
        dense = output if _is_dense(output) else _dense_like(output)
        rows = as_bytes(dense).view(size, -1)
        finish = None if dense is output else lambda: output.copy_(dense)

        def report() -> list[torch.Tensor]:
            whole = output.detach()
            # gloo reports one part per rank, NCCL all in one.
            divides = whole.device.type == "cpu" and whole.dim() > 0 and whole.shape[0] % size == 0
            return list(whole.chunk(size)) if divides else [output]

        return cls(tuple(rows), as_bytes(resolve_values(shard).contiguous()), [output], report, finish)

    @classmethod
    def into_pieces(cls, output: torch.Tensor, shard: torch.Tensor, size: int, step: int) -> list[GatherItem]:
        """Return one gather for every ``step`` bytes of the shards, in order; both tensors are contiguous."""
        rows, mine = as_bytes(output).view(size, -1), as_bytes(shard)
        parts = [slice(begin, begin + step) for begin in range(0, mine.numel(), step)]
        return [cls([row[part] for row in rows], mine[part], [output], lambda: [output]) for part in parts]

    @classmethod
    def into_list(
        cls, outputs: Sequence[torch.Tensor], shard: torch.Tensor, size: int, *, through_one: bool = False
    ) -> GatherItem | None:
        """Return the gather of each shard into a tensor of its own; None if shapes or types do not fit.

        Args:
            outputs: by rank.
            through_one: gather into one tensor, ``[size, *shard.shape]``, and report that, as NCCL does.
        """
        if len(outputs) != size or not all(_alike(o, shard) and o.numel() == shard.numel() for o in outputs):
            return None
        mine, filled = as_bytes(resolve_values(shard).contiguous()), list(outputs)
        if through_one:
            whole = torch.empty((size, *shard.shape), dtype=shard.dtype, device=shard.device)

            def unpack() -> None:
                for wanted, there in zip(filled, whole, strict=True):
                    wanted.copy_(there.view(wanted.shape))

            return cls(tuple(as_bytes(whole).view(size, -1)), mine, filled, lambda: [whole], unpack)
        dense = [o if _is_dense(o) else _dense_like(o) for o in filled]
        moved = [(wanted, there) for wanted, there in zip(filled, dense, strict=True) if wanted is not there]

        def finish() -> None:
            for wanted, there in moved:
                wanted.copy_(there)

        return cls([as_bytes(tensor) for tensor in dense], mine, filled, lambda: filled, finish if moved else None)


def resolve_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its actual values in memory: not conjugated or negated only when they are read."""
    return tensor.resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, ``[bytes]`` of uint8."""
    # Contiguous tensors may still have odd strides in dimensions with one element.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# This must not look at what may differ between ranks, such as strides: all of them go the same way.
def _alike(output: torch.Tensor, shard: torch.Tensor) -> bool:
    are_strided = output.layout is torch.strided and shard.layout is torch.strided
    if not are_strided or shard.is_quantized:
        return False
    return output.dtype is shard.dtype and output.device == shard.device


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether received bytes can be written to a tensor's memory as they are."""
    is_lazily_changed = tensor.is_conj() or tensor.is_neg()
    return tensor.is_contiguous() and not is_lazily_changed


def _dense_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
