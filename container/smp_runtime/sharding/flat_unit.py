"""Flat units: some parameters in one buffer, of which each rank of a group owns an equal shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from smp_runtime.comm.buckets import Bucket, make_buckets

#: Elements to which shards are rounded up, so that vector instructions and GPU loads stay aligned.
ALIGNMENT = 8


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that lies in one shard.

    Attributes:
        index: of the parameter in the unit's list.
        start: first element, counted in the flattened parameter.
        stop: behind the last one.
        offset: where it begins, counted in the shard.
    """

    index: int
    start: int
    stop: int
    offset: int


class FlatUnit:
    """Parameters whose storage is one flat buffer, ``[shards * shard_elements]``.

    The parameters become views of the buffer. Shards have equal length; the last ones end with padding, less than
    ``shards * ALIGNMENT`` elements in all.

    Args:
        parameters: all trained parameters; the unit holds those of ``bucket``.
        bucket: which parameters, in which order.
        shards: ranks that share the unit.
        rank: this rank's number among them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket: Bucket, shards: int, rank: int) -> None:
        self.bucket = bucket
        self.parameters = [parameters[index] for index in bucket.indices]
        self.shards = shards
        self.rank = rank
        per_rank = -(-bucket.elements // shards)
        self.shard_elements = -(-per_rank // ALIGNMENT) * ALIGNMENT
        self.filled = bucket.elements
        first = self.parameters[0]
        self.data = torch.zeros(shards * self.shard_elements, dtype=first.dtype, device=first.device)
        # Gradients travel in buffers of the same layout, so that shards of both match.
        bucket.elements = self.data.numel()
        with torch.no_grad():
            for parameter, offset in zip(self.parameters, bucket.offsets, strict=True):
                view = self.data[offset : offset + parameter.numel()].view(parameter.shape)
                view.copy_(parameter)
                parameter.data = view

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the buffer, ``[shard_elements]``."""
        return self.shard_of(self.data, self.rank)

    def shard_of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a buffer of this unit's layout."""
        return flat[rank * self.shard_elements : (rank + 1) * self.shard_elements]

    def fragments(self, rank: int) -> list[Fragment]:
        """The parts of parameters that lie in the shard of ``rank``, in the order of the buffer."""
        begin, end = rank * self.shard_elements, (rank + 1) * self.shard_elements
        found = []
        for index, (parameter, offset) in enumerate(zip(self.parameters, self.bucket.offsets, strict=True)):
            start, stop = max(begin, offset), min(end, offset + parameter.numel())
            if start < stop:
                found.append(Fragment(index, start - offset, stop - offset, start - begin))
        return found


def make_units(
    parameters: Sequence[nn.Parameter],
    *,
    unit_bytes: int,
    shards: int,
    rank: int,
    reduce_dtype: torch.dtype | None,
) -> list[FlatUnit]:
    """Divide parameters into units of about ``unit_bytes``, in the reverse of their order.

    Backward fills the units roughly in that order, so their gradients can travel while it goes on.
    """
    buckets = make_buckets(parameters, list(reversed(range(len(parameters)))), unit_bytes, reduce_dtype=reduce_dtype)
    return [FlatUnit(parameters, bucket, shards, rank) for bucket in buckets]
