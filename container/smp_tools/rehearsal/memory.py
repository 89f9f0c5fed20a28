"""Bytes of live tensors, the code that created them, and the moment of their peak.

Storages are counted, from the operation that creates them until the last tensor releases them. A storage that is emptied in
place (as :mod:`smp_runtime.sharding` frees gathered parameters) counts with its remaining bytes. The count is the same in a
rehearsal and in a job that performs its operations, so both can be compared.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_emulation.gpu_model.allocator import CachingAllocator
from smp_records.rehearsal import MemoryOverTime, PeakHolder
from smp_records.script_lines import script_line
from smp_runtime.tensors.torch_private import key_of_storage, storage_key

if TYPE_CHECKING:
    from smp_emulation.gpu_model.allocator import Chunk
    from smp_tools.rehearsal.skip_compute_mode import SkippedOperation

#: Of the modelled device: a rehearsal shows what a job needs, not whether it fails.
_NO_LIMIT = 2**60

#: Points of the curve that are kept.
_MOST_POINTS = 400

#: Holders that are named.
_MOST_HOLDERS = 10

#: Packages that move other packages' tensors from rank to rank.
_CARRIERS = ("smp_runtime.data_parallel", "smp_runtime.sharding", "smp_runtime.comm", "smp_runtime.pipeline.transport")


@dataclass(frozen=True)
class RankPhase:
    """The phase and module that a rank was in."""

    phase: str
    module: str


@dataclass(eq=False)
class _Storage:
    """A storage that is alive, or was at the peak."""

    size: int
    born: int  # number of the change
    where: RankPhase
    operation: str
    kind: str = ""  # empty if it is not known
    carries: bool = False  # made by a package that moves others' tensors
    microbatch: int | None = None  # the one with the forward pass that made it
    in_host: bool = False  # in main memory if the job has GPUs
    letting_go: weakref.ref[torch.UntypedStorage] | None = None  # hears of it
    block: Chunk | None = None  # of the modelled allocator; None in main memory, or if it is empty


class _ThreadMemory(threading.local):
    """State of one thread."""

    in_host = False


class LiveMemory:
    """Counts storages that operations make, on all threads.

    Args:
        where: what the calling thread is at.
        clock: for the curve, in seconds.

    Attributes:
        now: bytes alive, without those in main memory.
        peak: the most since :meth:`watch_peak`.
        host_now, host_peak: the same of main memory.
        microbatch: the one that the calling thread runs; None outside of one.
        most_of_microbatch: bytes that the forward pass of one microbatch has made and that were alive together, at most; since
            :meth:`watch_peak`.
    """

    def __init__(self, where: Callable[[], RankPhase], clock: Callable[[], float] = lambda: 0.0) -> None:
        self._where = where
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: a storage may be freed, which calls _gone, while another is noted
        self._alive: dict[int, _Storage] = {}
        self._gone_since_peak: list[_Storage] = []
        self._changes = 0
        self._here = _ThreadMemory()
        self.now = self.host_now = 0
        self.peak = self.host_peak = 0
        self.microbatch: Callable[[], int | None] = lambda: None
        self._of_microbatch: dict[int, int] = {}
        self.most_of_microbatch = 0
        self._peak_change = 0
        self.peak_at = RankPhase("start", "")
        self.peak_line = ""
        #: What a GPU would reserve for the same storages, if all were made on one stream.
        self._allocator = CachingAllocator(0, _NO_LIMIT)
        #: Changes in the recorded step: time, bytes, and the storage that changed.
        self._events: list[tuple[float, int, _Storage]] = []
        self._records = False

    def performed(self, operation: SkippedOperation) -> None:
        """Note the storages of new results."""
        for tensor in operation.made:
            if not tensor.is_meta and tensor.layout is torch.strided:
                self._note(tensor.untyped_storage(), operation.function.__name__)

    def _note(self, storage: torch.UntypedStorage, operation: str) -> None:
        key = key_of_storage(storage)
        with self._lock:
            if key in self._alive:
                return
            self._changes += 1
            where = self._where()
            entry = _Storage(storage.nbytes(), self._changes, where, operation, carries=_is_carrier_s())
            entry.in_host = self._here.in_host
            if where.phase == "forward" and not entry.carries and not entry.in_host:
                entry.microbatch = self.microbatch()
            self._alive[key] = entry
            entry.letting_go = weakref.ref(storage, lambda _: self._gone(key, entry))
            self._grow(entry.size, entry)

    @contextlib.contextmanager
    def in_host_memory(self) -> Iterator[None]:
        """Count what the calling thread allocates in the block as main memory of a job with GPUs."""
        before, self._here.in_host = self._here.in_host, True
        try:
            yield
        finally:
            self._here.in_host = before

    def _grow(self, size: int, entry: _Storage) -> None:
        self._place(entry)
        if entry.in_host:
            self.host_now += size
            self.host_peak = max(self.host_peak, self.host_now)
            return
        if entry.microbatch is not None:
            held = self._of_microbatch[entry.microbatch] = self._of_microbatch.get(entry.microbatch, 0) + size
            self.most_of_microbatch = max(self.most_of_microbatch, held)
        self.now += size
        self._event(size, entry)
        if self.now > self.peak:
            self.peak, self._peak_change = self.now, self._changes
            self._gone_since_peak.clear()
            self.peak_at = self._where()
            file, line = script_line()
            self.peak_line = f"{file}:{line}" if file else ""

    @property
    def reserved(self) -> int:
        """Return the most bytes that PyTorch's allocator has reserved for these storages."""
        return self._allocator.statistics().reserved.peak

    def begin_reserving(self) -> None:
        """Begin again with the storages of now; a model that is made whole before it is shared out lies in main memory."""
        with self._lock:
            self._allocator = CachingAllocator(0, _NO_LIMIT)
            for entry in sorted(self._alive.values(), key=lambda one: one.born):
                entry.block = None
                self._place(entry)

    def _place(self, entry: _Storage) -> None:
        """Give the entry a block of its size, in place of the one that it has."""
        self._release(entry)
        if entry.size and not entry.in_host:
            entry.block = self._allocator.allocate(entry.size)

    def _release(self, entry: _Storage) -> None:
        block, entry.block = entry.block, None
        if block is not None:
            self._allocator.release(block)

    def _gone(self, key: int, entry: _Storage) -> None:
        with self._lock:
            entry.letting_go = None  # which holds the entry
            if self._alive.pop(key, None) is None:
                return
            if entry.in_host:
                self.host_now -= entry.size
                return
            self._changes += 1
            self._release(entry)
            self._shrink(entry.size, entry)
            if entry.size and entry.born <= self._peak_change:
                self._gone_since_peak.append(entry)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the size of a storage that was emptied or filled in place."""
        with self._lock:
            entry = self._alive.get(key_of_storage(storage))
            if entry is None or entry.size == storage.nbytes():
                return
            before = entry.size
            if entry.in_host:
                entry.size = storage.nbytes()
                self.host_now += entry.size - before
                self.host_peak = max(self.host_peak, self.host_now)
                return
            self._changes += 1
            if before > storage.nbytes():
                # The former bytes may have been part of the peak: a second entry keeps them there.
                if entry.born <= self._peak_change:
                    left = _Storage(before, entry.born, entry.where, entry.operation, entry.kind, entry.carries)
                    self._gone_since_peak.append(left)
                self._shrink(before - storage.nbytes(), entry)
                entry.size, entry.born = storage.nbytes(), self._changes
                self._place(entry)
            else:
                entry.size, entry.born, entry.where = storage.nbytes(), self._changes, self._where()
                self._grow(entry.size - before, entry)

    def _shrink(self, size: int, entry: _Storage) -> None:
        self.now -= size
        if entry.microbatch is not None:
            self._of_microbatch[entry.microbatch] -= size
        self._event(-size, entry)

    def mark(self, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Set the kind of tensors that are alive now."""
        with self._lock:
            for tensor in tensors:
                if tensor is None or tensor.is_meta or tensor.layout is not torch.strided:
                    continue
                entry = self._alive.get(storage_key(tensor))
                if entry is not None:
                    entry.kind = kind

    def watch_peak(self) -> None:
        """Reset the peak to the memory that is in use now."""
        with self._lock:
            self._gone_since_peak.clear()
            self.peak, self._peak_change, self.peak_at = self.now, self._changes, self._where()
            self.host_peak = self.host_now
            self.most_of_microbatch = max(self._of_microbatch.values(), default=0)

    def _event(self, change: int, entry: _Storage) -> None:
        if self._records and change:
            self._events.append((self._clock(), change, entry))

    def begin_curve(self) -> None:
        """Record the live memory from now on."""
        with self._lock:
            self._events.clear()
            self._records = True

    def curve(self) -> MemoryOverTime:
        """Return the live bytes since :meth:`begin_curve` over time, by kind.

        Each stretch of time is represented by its highest point, so no peak is lost.
        """
        with self._lock:
            events = list(self._events)
            held: dict[str, int] = {}
            for entry in self._alive.values():
                if entry.in_host:
                    continue
                held[_kind_of(entry)] = held.get(_kind_of(entry), 0) + entry.size
        for _, change, entry in events:  # back to the beginning
            held[_kind_of(entry)] = held.get(_kind_of(entry), 0) - change
        seconds: list[float] = []
        owners: dict[str, list[int]] = {kind: [] for kind in held}
        width = max(1, -(-len(events) // _MOST_POINTS))
        for first in range(0, len(events), width):
            highest, when = dict(held), events[first][0]
            for moment, change, entry in events[first : first + width]:
                held[_kind_of(entry)] += change
                if sum(held.values()) >= sum(highest.values()):
                    highest, when = dict(held), moment
            seconds.append(when - events[0][0])
            for kind, sizes in owners.items():
                sizes.append(highest[kind])
        return MemoryOverTime(seconds=seconds, owners=owners)

    def at_peak(self) -> list[PeakHolder]:
        """Return all holders of memory at the peak, by place, the largest first."""
        with self._lock:
            alive = [entry for entry in self._alive.values() if entry.born <= self._peak_change and not entry.in_host]
            found: dict[tuple[str, str, str, str], tuple[int, int]] = {}
            for entry in (*alive, *self._gone_since_peak):
                key = (_kind_of(entry), entry.where.module, entry.where.phase, entry.operation)
                count, size = found.get(key, (0, 0))
                found[key] = count + 1, size + entry.size
        holders = [
            PeakHolder(kind=kind, module=module, phase=phase, operation=operation, count=count, bytes=size)
            for (kind, module, phase, operation), (count, size) in found.items()
            if size
        ]
        return sorted(holders, key=lambda holder: -holder.bytes)


def largest_holders(holders: Sequence[PeakHolder]) -> list[PeakHolder]:
    """Return the ten largest holders, for a report."""
    return list(holders[:_MOST_HOLDERS])


def by_kind(holders: Sequence[PeakHolder]) -> dict[str, int]:
    """Return the bytes of each kind."""
    found: dict[str, int] = {}
    for holder in holders:
        found[holder.kind] = found.get(holder.kind, 0) + holder.bytes
    return found


def _kind_of(entry: _Storage) -> str:
    if entry.kind:
        return entry.kind
    if entry.carries:
        return "buffer"
    return {"forward": "activation", "backward": "activation", "update": "temporary"}.get(entry.where.phase, "other")


def _is_carrier_s() -> bool:
    """Return whether the innermost code outside PyTorch belongs to a package that carries tensors."""
    frame = sys._getframe(3)  # noqa: SLF001 - inspect.currentframe() and its f_back take several times as long
    for _ in range(12):
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch", "smp_emulation", "smp_tools.rehearsal")):
            return name.startswith(_CARRIERS)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
