"""Checksums that differ where copies of a tensor differ, and the tensors that several ranks hold copies of."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_runtime.checkpoint.live_state import region_of
from smp_runtime.tensors.parameter_attributes import get_data
from smp_tools.numerics.journal import part_name
from smp_tools.numerics.sketch import BITS, plain_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_runtime.parameters.registry import ParameterRecord

#: Number of pieces of a tensor. The sum of each piece has its own weight, so their order changes the checksum.
_PIECES = 61
#: Elements that are summed at once: their sum is exact in float64, and they stay in the cache of a processor.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Copy:
    """A tensor that may have copies on other ranks.

    Attributes:
        exact: an identifier of its elements; ranks with bitwise equal copies have the same one.
        close: the same for copies that may differ by rounding; 0 if all are bitwise equal.
    """

    name: str
    tensor: torch.Tensor
    exact: int
    close: int = 0


def copies_of(part: LocalPart, placed: ParallelState, ranks: Ranks) -> Iterator[Copy]:
    """Yield the trained parameters of this rank, and their float32 masters.

    Frozen parameters and buffers are left out: a script may update them separately on each rank, as batch norms do.
    """
    places = placed.shards.places if placed.shards is not None else {}
    masters = placed.optimizer_shards or {}
    for parameter in part.parameters():
        if not parameter.requires_grad:
            continue
        record = part.registry.record_of(parameter)
        first, last = places.get(parameter, (0, 0))
        if parameter not in places:
            yield _copy(record, get_data(parameter), region_of(record), ranks)
        elif first < last:
            yield _copy(record, parameter.ds_tensor, region_of(record, (first, last)), ranks)  # type: ignore[attr-defined]
        master = masters.get(parameter)
        if master is not None and master.is_apart:
            region = region_of(record, (master.start, master.stop))
            yield _copy(record, get_data(master.optimized), region, ranks, " (float32 master)")


def _copy(record: ParameterRecord, tensor: torch.Tensor, region: TensorRegion, ranks: Ranks, kind: str = "") -> Copy:
    name = " ".join(filter(None, (record.name, part_name(region)))) + kind
    is_split = record.placement.tensor_axis is not None
    if is_split or record.reduction is Group.DP or ranks.size(Group.TP) == 1:
        return Copy(name, tensor, _number(name))
    # Each tensor parallel rank has computed this gradient separately, from equal numbers. A GPU may add them in another order.
    return Copy(name, tensor, _number(f"{name}, tp rank {ranks.rank_in(Group.TP)}"), _number(f"{name}, close"))


@functools.lru_cache(maxsize=65536)
def _number(text: str) -> int:
    """Return a number of 64 bits, with a sign, that is the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def bits_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as whole numbers of their size, flat."""
    flat = plain_numbers(tensor).reshape(-1)
    return flat.view(BITS[flat.element_size()])


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that differs if any one bit does, or if pieces are exchanged: int64, ``[]``, on the tensor's device."""
    bits = bits_in(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        length = chunk.numel() // _PIECES
        pieces = _sums(chunk[: length * _PIECES].view(_PIECES, length)) * _weights(bits.device)
        total += (pieces.sum() + _sums(chunk[length * _PIECES :].view(1, -1)).sum()) * (2 * number + 1)
    return total


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the exact sum of each row, modulo 2^64."""
    if rows.dtype is torch.int64:
        return rows.sum(1)
    return rows.double().sum(1).long()  # much faster than a sum of whole numbers


def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers: their product with a difference of one bit is never 0 modulo 2^64."""
    return torch.arange(_PIECES, device=device) * 2 + 3
