"""Copies of a device's tensors in one piece of host memory, fast from the first time on."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from smp_runtime.tensors.host_memory.pinned_memory import PinnedRanges, map_memory
from smp_runtime.tensors.host_memory.worker_threads import WorkerThreads

#: Bytes that are pinned or copied as one. CUDA blocks other calls while it pins, here for some milliseconds.
WINDOW = 2**24
#: Windows under way between the device and memory that is not pinned, and threads that take them there.
CHUNKS = 4
#: Every tensor begins at a multiple of it, as allocators of memory have it.
_ALIGNED = 64
#: Seconds to wait for a thread that pins one window.
_END_SECONDS = 60.0


def lay_out(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Return the offsets of tensors that follow each other, and the bytes of all."""
    offsets, end = [], 0
    for tensor in tensors:
        offset = -(-end // _ALIGNED) * _ALIGNED
        offsets.append(offset)
        end = offset + tensor.numel() * tensor.element_size()
    return offsets, end


class StagingMemory:
    """Host memory for copies of tensors.

    Pinning is slow: an H100's host pinned 1.7 GB/s, and copied 55 GB/s to pinned memory. So the first copies do not wait for
    it. They go through :data:`CHUNKS` small pinned chunks. Threads copy from there to the memory, which is not pinned yet, at
    several GB/s each. Meanwhile the device fills the next chunk. :meth:`pin_later` then starts a thread that pins the same memory
    window by window. Later copies go to pinned windows directly.

    The memory is needed once in each case, and :data:`CHUNKS` windows more while chunks are in use.

    Args:
        memory: flat, page-aligned bytes.
        device: the device that the tensors are on; on a CPU, nothing is ever pinned.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._bytes = memory
        self._device = device
        self._is_pinned = [False] * -(-memory.numel() // WINDOW)
        self._ranges = PinnedRanges(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        # Set to end the pinning thread between two windows, since pinning cannot be interrupted.
        self._ends = threading.Event()

    @property
    def pinned_bytes(self) -> int:
        """Return the number of pinned bytes."""
        return 0 if self._ranges is None else self._ranges.bytes

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Copy tensors to their offsets. Copies to pinned windows are complete only when the current stream is."""
        windows: dict[int, list[_Part]] = {}
        on_host: list[tuple[int, torch.Tensor]] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            if tensor.device.type != "cuda":
                on_host.append((offset, tensor))
            elif tensor.numel():
                _divide(offset, tensor, windows)
        unpinned, flat = [], _FlatBytes()
        for window, parts in windows.items():
            if not self._is_pinned[window]:
                unpinned.append(parts)
                continue
            for part in parts:
                self._bytes[part.start : part.stop].copy_(flat.of(part), non_blocking=True)
        if unpinned:
            self._copy_by_chunks(unpinned)
        # Last, since a chunk is copied with the gaps between its tensors.
        for offset, tensor in on_host:
            elements = _flatten(tensor)
            self._bytes[offset : offset + elements.numel()].copy_(elements)

    def pin_later(self) -> None:
        """Start to pin the memory on a thread, once."""
        if self._thread is None and self._ranges is not None and not self._ends.is_set():
            # Pinning takes seconds for gigabytes, and nothing needs it before the next save.
            thread = threading.Thread(target=self._pin, name="smp-pinning", daemon=True)
            with contextlib.suppress(RuntimeError):  # none starts while the interpreter ends, and then no save comes
                thread.start()
                self._thread = thread

    def wait_until_pinned(self, seconds: float) -> bool:
        """Wait for the thread of :meth:`pin_later`, and return whether all memory is pinned."""
        if self._thread is not None:
            self._thread.join(seconds)
        return all(self._is_pinned)

    def close(self) -> None:
        """Unpin the memory. Copies that were complete stay."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)
        if self._ranges is not None:
            self._is_pinned = [False] * len(self._is_pinned)
            self._ranges.close()

    def _pin(self) -> None:
        if self._ranges is None:
            raise AssertionError("memory for a CPU is not pinned")
        for number in range(len(self._is_pinned)):
            if self._ends.is_set():
                return
            window = self._bytes[number * WINDOW : (number + 1) * WINDOW]
            if not self._ranges.add(window):
                return
            self._is_pinned[number] = True

    def _copy_by_chunks(self, windows: list[list[_Part]]) -> None:
        """Copy the parts of windows through pinned chunks."""
        count, size = min(CHUNKS, len(windows)), min(WINDOW, self._bytes.numel())
        chunks = torch.frombuffer(map_memory(count * size, for_gpu=True), dtype=torch.uint8)
        ranges, flat = PinnedRanges(self._device), _FlatBytes()
        if not ranges.add(chunks):
            for part in itertools.chain.from_iterable(windows):
                self._bytes[part.start : part.stop].copy_(flat.of(part))
            return
        under_way: list[Future[None] | None] = [None] * count
        # Threads begin on device 0: waiting for an event there would create a context on it.
        with WorkerThreads(count, "smp-staging", lambda: torch.cuda.set_device(self._device)) as threads:
            for number, parts in enumerate(windows):
                index = number % count
                if (former := under_way[index]) is not None:
                    former.result()  # the chunk is free again
                first, stop = parts[0].start, parts[-1].stop
                chunk = chunks[index * size : index * size + stop - first]
                for part in parts:
                    chunk[part.start - first : part.stop - first].copy_(flat.of(part), non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
                under_way[index] = threads.submit(_copy_after, event, self._bytes[first:stop], chunk)
            for future in under_way:
                if future is not None:
                    future.result()
        ranges.close()


def _copy_after(event: torch.cuda.Event, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a chunk when the device has filled it."""
    # On a thread, so that the host does not wait here for the device.
    event.synchronize()
    target.copy_(source)


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that lies in one window.

    Attributes:
        start: its first byte in the memory.
        stop: the one behind its last.
        first: its first byte in the tensor.
    """

    tensor: torch.Tensor
    start: int
    stop: int
    first: int


class _FlatBytes:
    """The bytes of the last tensor. Those of a tensor that is not contiguous are a copy on the device: only one is kept."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, part: _Part) -> torch.Tensor:
        """Return the bytes of a part."""
        if self._last is None or self._last[0] is not part.tensor:
            self._last = None  # freed before the next copy is made
            self._last = part.tensor, _flatten(part.tensor)
        return self._last[1][part.first : part.first + part.stop - part.start]


def _divide(offset: int, tensor: torch.Tensor, windows: dict[int, list[_Part]]) -> None:
    """Add a tensor's parts to the windows that they lie in: each window is pinned separately, and no copy may cross two."""
    end = offset + tensor.numel() * tensor.element_size()
    for window in range(offset // WINDOW, -(-end // WINDOW)):
        start, stop = max(offset, window * WINDOW), min(end, (window + 1) * WINDOW)
        windows.setdefault(window, []).append(_Part(tensor, start, stop, start - offset))


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in order, as bytes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
