"""Memory of one device as PyTorch's caching allocator divides it: segments, pools per stream, splits and the cache.

Only sizes are kept; the elements of tensors are elsewhere. The rules are those of PyTorch's documentation and its default settings:
sizes are rounded to 512 bytes, requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and
larger ones get a segment of their own, rounded to 2 MiB. A segment belongs to the stream that asked for it.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

MIB = 2**20
#: All sizes are multiples of it.
ROUND = 512
#: Largest request of the small pool, and the segments that serve it.
SMALL_REQUEST, SMALL_SEGMENT = MIB, 2 * MIB
#: Requests below the first get segments of the second; others get segments of a multiple of the third.
LARGE_REQUEST, LARGE_SEGMENT, ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB


@dataclass(eq=False)
class Chunk:
    """A part of a segment: in use, or free.

    Attributes:
        requested: bytes that were asked for; 0 if it is free.
        previous, next: its neighbors in the segment.
    """

    segment: MemorySegment
    offset: int
    size: int
    requested: int = 0
    is_free: bool = True
    previous: Chunk | None = None
    next: Chunk | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether the chunk is all of its segment."""
        return self.size == self.segment.size


@dataclass(eq=False)
class MemorySegment:
    """Memory that the allocator has got of the device, and keeps when tensors are freed.

    Attributes:
        stream: the number of the stream that may use it.
        is_small: whether it is of the small pool.
    """

    number: int
    stream: int
    size: int
    is_small: bool


@dataclass
class Amount:
    """Bytes now, and the most since the last reset."""

    now: int = 0
    peak: int = 0
    gained: int = 0
    lost: int = 0

    def add(self, size: int) -> None:
        """Add bytes; a negative size takes them away."""
        self.now += size
        self.peak = max(self.peak, self.now)
        if size > 0:
            self.gained += size
        else:
            self.lost -= size


@dataclass
class Statistics:
    """All that an allocator counts."""

    allocated: Amount = field(default_factory=Amount)
    active: Amount = field(default_factory=Amount)
    requested: Amount = field(default_factory=Amount)
    reserved: Amount = field(default_factory=Amount)
    retries: int = 0
    out_of_memory: int = 0

    def amounts(self) -> dict[str, Amount]:
        """Return the amounts by the names of ``torch.cuda.memory_stats``."""
        return {
            "allocated_bytes": self.allocated,
            "active_bytes": self.active,
            "requested_bytes": self.requested,
            "reserved_bytes": self.reserved,
        }


class _Pool:
    """Free chunks of one stream and kind, ordered by size: the smallest that is large enough is taken first."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, int, int, Chunk]] = []

    @staticmethod
    def _entry(chunk: Chunk) -> tuple[int, int, int, Chunk]:
        return chunk.size, chunk.segment.number, chunk.offset, chunk

    def add(self, chunk: Chunk) -> None:
        bisect.insort(self._chunks, self._entry(chunk), key=lambda entry: entry[:3])

    def remove(self, chunk: Chunk) -> None:
        place = bisect.bisect_left(self._chunks, self._entry(chunk)[:3], key=lambda entry: entry[:3])
        del self._chunks[place]

    def take(self, size: int) -> Chunk | None:
        place = bisect.bisect_left(self._chunks, size, key=lambda entry: entry[0])
        return self._chunks.pop(place)[3] if place < len(self._chunks) else None

    def whole(self) -> list[Chunk]:
        return [entry[3] for entry in self._chunks if entry[3].is_whole]


class CachingAllocator:
    """The allocator of one device.

    Args:
        device: its number, for errors.
        capacity: bytes that the device has.
        limit: bytes that the process may reserve; the capacity if not given.
    """

    def __init__(self, device: int, capacity: int, limit: int | None = None) -> None:
        self.device = device
        self.capacity = capacity
        self.limit = capacity if limit is None else limit
        self._statistics = Statistics()
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._segments: dict[int, MemorySegment] = {}
        self._numbers = 0
        # Reentrant: reading statistics from a thread that allocates is allowed.
        self._lock = threading.RLock()
        #: Chunks that were released. The garbage collector may release tensors in the middle of any call here, so
        #: they are only noted, and returned to their pools when the next call begins.
        self._released: deque[tuple[Chunk, bool]] = deque()
        self._pending: dict[int, Chunk] = {}

    def allocate(self, size: int, stream: int = 0) -> Chunk:
        """Return memory for a tensor.

        Args:
            size: bytes, more than 0.
            stream: number of the stream that may use it.

        Raises:
            torch.OutOfMemoryError: the limit is reached, and freeing what is cached does not help.
        """
        rounded = max(ROUND, _round_up(size, ROUND))
        is_small = rounded <= SMALL_REQUEST
        with self._lock:
            self._settle()
            chunk = self._pool(stream, is_small).take(rounded)
            if chunk is None:
                chunk = self._new_segment(size, rounded, stream, is_small)
            self._split(chunk, rounded)
            chunk.is_free, chunk.requested = False, size
            statistics = self._statistics
            statistics.allocated.add(chunk.size)
            statistics.active.add(chunk.size)
            statistics.requested.add(size)
            return chunk

    def release(self, chunk: Chunk, is_pending: bool = False) -> None:
        """Free the memory of a tensor.

        Args:
            chunk: what :meth:`allocate` returned.
            is_pending: whether another stream may still use it: it stays out of the pool until :meth:`end_use`.
        """
        # Without the lock, since the garbage collector may call this in the middle of a locked method.
        self._released.append((chunk, is_pending))

    def end_use(self, chunk: Chunk) -> None:
        """Return a pending chunk to its pool, because no stream uses it any more."""
        with self._lock:
            self._settle()
            if self._pending.pop(id(chunk), None) is not None:
                self._free(chunk)

    def empty_cache(self) -> None:
        """Return segments without a live tensor to the device, after all streams are done with what was freed."""
        with self._lock:
            self._settle()
            for chunk in self._pending.values():
                self._free(chunk)
            self._pending.clear()
            for pool in self._pools.values():
                for chunk in pool.whole():
                    pool.remove(chunk)
                    del self._segments[chunk.segment.number]
                    self._statistics.reserved.add(-chunk.size)

    def statistics(self) -> Statistics:
        """Return the statistics up to now."""
        with self._lock:
            self._settle()
            return self._statistics

    def reset_peaks(self) -> None:
        """Let all peaks begin at what is in use now."""
        for amount in self.statistics().amounts().values():
            amount.peak = amount.now

    def reserved_by_stream(self) -> dict[int, int]:
        """Return the reserved bytes of each stream."""
        found: dict[int, int] = {}
        with self._lock:
            for segment in self._segments.values():
                found[segment.stream] = found.get(segment.stream, 0) + segment.size
        return found

    def raise_if_hopeless(self, size: int) -> None:
        """Raise torch.OutOfMemoryError if a request exceeds the limit even with all other memory free."""
        if _segment_size(_round_up(size, ROUND)) > self.limit:
            raise self._error(size)

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _pool(self, stream: int, is_small: bool) -> _Pool:
        return self._pools.setdefault((stream, is_small), _Pool())

    def _settle(self) -> None:
        """Take in what was released since the last call."""
        while self._released:
            chunk, is_pending = self._released.popleft()
            self._statistics.allocated.add(-chunk.size)
            self._statistics.requested.add(-chunk.requested)
            if is_pending:
                self._pending[id(chunk)] = chunk
            else:
                self._free(chunk)

    def _new_segment(self, size: int, rounded: int, stream: int, is_small: bool) -> Chunk:
        wanted = _segment_size(rounded)
        if self._statistics.reserved.now + wanted > self.limit:
            self._statistics.retries += 1
            self.empty_cache()
        if self._statistics.reserved.now + wanted > self.limit:
            raise self._error(size)
        self._numbers += 1
        segment = self._segments[self._numbers] = MemorySegment(self._numbers, stream, wanted, is_small)
        self._statistics.reserved.add(wanted)
        return Chunk(segment, 0, wanted)

    def _split(self, chunk: Chunk, size: int) -> None:
        """Return what a chunk has beyond ``size`` to the pool, unless it is too little to be of use."""
        rest = chunk.size - size
        if rest < ROUND or (not chunk.segment.is_small and rest <= SMALL_REQUEST):
            return
        left = Chunk(chunk.segment, chunk.offset + size, rest, previous=chunk, next=chunk.next)
        if chunk.next is not None:
            chunk.next.previous = left
        chunk.next, chunk.size = left, size
        self._pool(chunk.segment.stream, chunk.segment.is_small).add(left)

    def _free(self, chunk: Chunk) -> None:
        """Return a chunk to its pool, joined with free neighbors."""
        self._statistics.active.add(-chunk.size)
        chunk.is_free, chunk.requested = True, 0
        pool = self._pool(chunk.segment.stream, chunk.segment.is_small)
        before, after = chunk.previous, chunk.next
        if after is not None and after.is_free:
            pool.remove(after)
            _join(chunk, after)
        if before is not None and before.is_free:
            pool.remove(before)
            _join(before, chunk)
            chunk = before
        pool.add(chunk)

    def _error(self, size: int) -> torch.OutOfMemoryError:
        statistics = self._statistics
        statistics.out_of_memory += 1
        reserved, allocated = statistics.reserved.now, statistics.allocated.now
        allowed = "" if self.limit >= self.capacity else f"{_shown(self.limit)} allowed; "
        free = max(0, self.capacity - reserved)
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {_shown(size)}. GPU {self.device} has a total capacity of "
            f"{_shown(self.capacity)} of which {_shown(free)} is free. {allowed}Of the allocated memory {_shown(allocated)} is "
            f"allocated by PyTorch, and {_shown(reserved - allocated)} is reserved by PyTorch but unallocated. "
            "(This is an emulated GPU; its memory is set by SMP_EMULATE_CUDA_MEMORY.)"
        )


def _join(first: Chunk, second: Chunk) -> None:
    """Append a chunk to its free neighbor before it."""
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _segment_size(size: int) -> int:
    """Return the size of a new segment for a rounded request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else _round_up(size, ROUND_LARGE)


def _shown(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def sum_by_stream(allocators: Iterable[CachingAllocator]) -> dict[tuple[int, int], int]:
    """Return the reserved bytes by device and stream."""
    return {
        (allocator.device, stream): size
        for allocator in allocators
        for stream, size in allocator.reserved_by_stream().items()
    }
