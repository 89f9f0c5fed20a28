"""Pinned host memory that tensors share in turn."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from smp_runtime.tensors.host_memory.pinned_memory import PinnedRanges, map_memory

#: Least bytes of a mapping: so many small tensors share one registration with CUDA.
SLAB = 2**26
_ALIGNED = 512
#: Events of a free block from which on those that have happened are removed.
_MOST_EVENTS = 8


@dataclass(frozen=True)
class HostBlock:
    """A part of a mapping.

    Attributes:
        slab: number of the mapping.
        start: its first byte there.
        stop: the one behind its last.
        events: after which all copies from and to it are complete.
    """

    slab: int
    start: int
    stop: int
    events: tuple[Any, ...] = ()


class PinnedPool:
    """Pinned host memory for tensors that leave a device and come back.

    Mappings grow with the tensors that are away at the same time. Freed blocks are used again, for tensors of any size, and join
    with free neighbors. A new mapping holds a whole number of tensors of the size that was missing, at least :data:`SLAB` bytes. So
    the pool takes the most bytes that were away at once, and less than a mapping more, if sizes repeat in each step.

    Attributes:
        bytes: of all mappings.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._slabs: list[mmap.mmap] = []
        self._ranges = PinnedRanges(device)
        self._free: list[HostBlock] = []  # in the order of slabs and starts
        #: Freed blocks. The garbage collector may free one in the middle of :meth:`take`, so it only adds to this list.
        self._returned: deque[HostBlock] = deque()
        self._lock = threading.Lock()

    def take(self, like: torch.Tensor, stream: torch.cuda.Stream) -> tuple[torch.Tensor, HostBlock]:
        """Return host memory in the form of a tensor, for copies that ``stream`` makes from now on, and its block."""
        form = torch.empty_like(like, device="meta")
        size = max(1, -(-like.numel() * like.element_size() // _ALIGNED)) * _ALIGNED
        with self._lock:
            while self._returned:
                self._join(self._returned.popleft())
            fitting = [block for block in self._free if block.stop - block.start >= size]
            block = min(fitting, key=lambda block: block.stop - block.start, default=None)
            if block is None:
                block = self._grow(size)
            self._free.remove(block)
            if block.start + size < block.stop:
                self._join(replace(block, start=block.start + size))
        # The stream waits, not the host: the device may be a step behind.
        for event in block.events:
            stream.wait_event(event)
        if like.numel() == 0:
            host = torch.empty(0, dtype=like.dtype, device="cpu")
        else:
            host = torch.frombuffer(self._slabs[block.slab], dtype=like.dtype, count=like.numel(), offset=block.start)
        host = host.as_strided(form.size(), form.stride())
        return host, replace(block, stop=block.start + size, events=())

    def give_back(self, block: HostBlock, event: Any) -> None:
        """Free a block; ``event`` is the one after which its last copy is complete."""
        self._returned.append(replace(block, events=(event,)))

    def _grow(self, size: int) -> HostBlock:
        length = size * -(-SLAB // size)
        slab = map_memory(length, for_gpu=True)
        self._ranges.add(torch.frombuffer(slab, dtype=torch.uint8))
        self._slabs.append(slab)
        self.bytes += length
        block = HostBlock(len(self._slabs) - 1, 0, length)
        self._free.append(block)
        return block

    def _join(self, block: HostBlock) -> None:
        """Add a free block, and join it with free neighbors."""
        remaining = []
        for other in self._free:
            if other.slab == block.slab and (other.stop == block.start or block.stop == other.start):
                events = (*other.events, *block.events)
                block = HostBlock(
                    block.slab, min(block.start, other.start), max(block.stop, other.stop), tuple(dict.fromkeys(events))
                )
            else:
                remaining.append(other)
        if len(block.events) > _MOST_EVENTS:
            block = replace(block, events=tuple(event for event in block.events if not event.query()))
        self._free = sorted([*remaining, block], key=lambda free: (free.slab, free.start))
