"""Gradient buckets: flat buffers that several gradients travel in together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Bucket:
    """Some parameters' gradients in one flat buffer.

    Attributes:
        indices: which parameters, by their index in the reducer's list.
        offsets: where each gradient begins, in elements.
        elements: of all gradients together; the buffer may be longer by a tail.
        pending: parameters whose gradient is not final yet in this window.
    """

    indices: list[int]
    offsets: list[int]
    elements: int
    dtype: torch.dtype
    device: torch.device
    tail: int = 0
    pending: int = 0
    _buffer: torch.Tensor | None = field(default=None, repr=False)

    @property
    def buffer(self) -> torch.Tensor:
        """The flat buffer, ``[elements + tail]``; allocated at first use and kept."""
        if self._buffer is None:
            self._buffer = torch.zeros(self.elements + self.tail, dtype=self.dtype, device=self.device)
        return self._buffer

    def views(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The part of the buffer of each parameter, shaped like it."""
        return [
            self.buffer[offset : offset + parameters[index].numel()].view(parameters[index].shape)
            for index, offset in zip(self.indices, self.offsets, strict=True)
        ]

    def tail_view(self) -> torch.Tensor:
        """The elements behind the gradients."""
        return self.buffer[self.elements :]


def make_buckets(parameters: Sequence[torch.Tensor], order: Sequence[int], cap_bytes: int, tail: int) -> list[Bucket]:
    """Fill buckets of at most ``cap_bytes`` with parameters in ``order``; no padding, so exactly their elements.

    A parameter larger than the cap has a bucket of its own. Parameters of different type or device never share
    one. The last bucket carries ``tail`` more elements.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for index in order:
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        bucket = open_buckets.get(kind)
        size = parameter.numel() * parameter.element_size()
        if bucket is None or bucket.elements * parameter.element_size() + size > cap_bytes:
            bucket = Bucket([], [], 0, parameter.dtype, parameter.device)
            open_buckets[kind] = bucket
            buckets.append(bucket)
        bucket.indices.append(index)
        bucket.offsets.append(bucket.elements)
        bucket.elements += parameter.numel()
    if buckets:
        buckets[-1].tail = tail
    return buckets
