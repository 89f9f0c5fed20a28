"""Kept activations wait in CPU memory: they leave when the forward pass of their region ends, and come back in time.

On a GPU copies run on two streams of their own, from and to one pool of pinned memory. On CPU they are real copies too, made at
once, so that order and memory can be observed without a GPU.

Activations that come back are allocated on the stream that copies them, so the load need not wait for the compute stream. PyTorch
keeps free memory by stream: what left on the compute stream is not used for them. So the reserved memory of the device has room
for the most activations that were loaded at once, in addition to the peak of the compute stream.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smp_runtime.activations.load_order import RegionKey, Tape, TapeEntry
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.host_memory.pinned_pool import HostBlock, PinnedPool
from smp_runtime.tensors.torch_private import backward_pass

#: Contexts for allocating a tensor in main memory; the last one is entered. A rehearsal adds one to count these tensors,
#: since all its tensors lie there.
in_host_memory: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [contextlib.nullcontext]


class Stored:
    """A tensor as it was when it was kept.

    Attributes:
        tensor: without its place in the graph; None while it is elsewhere.
        bytes: of its elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor.detach()
        self.bytes = tensor.numel() * tensor.element_size()
        # Shared by all views, so that any change in place shows.
        self._version = -1 if tensor.is_inference() else tensor._version

    def take(self, label: str) -> torch.Tensor:
        """Return the tensor, for the region ``label``.

        Raises:
            SMPUserError: If it was changed in place since it was kept.
        """
        if self.tensor is None:
            raise AssertionError("a tensor that is elsewhere was taken")
        self.check(self.tensor, label)
        return self.tensor

    def check(self, tensor: torch.Tensor, label: str = "", since: int | None = None) -> None:
        """Check that ``tensor`` has not changed since it was kept, or since its version was ``since``.

        Raises:
            SMPUserError: If it has.
        """
        version = self._version if since is None else since
        if version >= 0 and tensor._version != version:
            where = f" {label!r}" if label else ""
            raise SMPUserError(
                f"an argument of shape {list(tensor.shape)} of the checkpointed region{where} was changed in place "
                f"{tensor._version - version} times after the region began, and backward runs the region again from it; "
                "change a copy (x = x + y instead of x += y)",
                code="SMP309",
            )


class RegionUse(Protocol):
    """A use of a region, as the offloader sees it."""

    stored: list[Stored]
    has_run: bool
    key: Any


@dataclass
class Figures:
    """What the offloader has done; bytes of tensors that may leave."""

    resident: int = 0  # on the device now
    peak: int = 0  # most on the device at once
    left: int = 0  # copied to CPU memory
    came: int = 0  # copied back
    late: int = 0  # tensors that were copied back only when they were needed already


class Offloader:
    """Moves the kept activations of one rank.

    Args:
        horizon: tasks before its use at which an activation is loaded.
        where: returns the place of the running task, its action and the planned order of actions, if there is one.

    Attributes:
        figures: amounts that were moved; the caller may reset them.
        has_kept: whether there has been a tensor that may leave.
        has_moved: whether one has left.
    """

    def __init__(self, horizon: int, device: torch.device, where: Callable[[], tuple[Any, Any, Any]]) -> None:
        self.figures = Figures()
        self.has_kept = self.has_moved = False
        self.tape = Tape(horizon)
        self.device = device
        self._where = where
        # Reentrant: while a thread counts, the garbage collector may free a tensor on it, which is counted too.
        self._lock = threading.RLock()
        #: Uses before their backward pass, in the order of their forward passes.
        self._live: dict[RegionKey, weakref.ref[RegionUse]] = {}
        #: By id, with a weak reference to the tensor: an id is used again when its tensor is gone.
        self._by_tensor: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[_Movable]]] = {}
        self._leaving: list[_Leaving] = []
        is_gpu = device.type == "cuda"
        # A stream for each direction, so that copies of both run at the same time, and beside the computation.
        self.out_stream = torch.cuda.Stream(device) if is_gpu else None
        self.in_stream = torch.cuda.Stream(device) if is_gpu else None
        self._pool = PinnedPool(device) if is_gpu else None

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned host memory."""
        return 0 if self._pool is None else self._pool.bytes

    @property
    def is_idle(self) -> bool:
        """Return whether no region waits for its backward pass."""
        return not any(use() is not None for use in self._live.values())

    def begin_step(self) -> None:
        """Begin a step: wait for copies to CPU memory, and drop entries of freed tensors and uses."""
        self._check_leaving(wait=True)
        self._live = {key: use for key, use in self._live.items() if use() is not None}
        self._by_tensor = {key: known for key, known in self._by_tensor.items() if known[1]() is not None}
        self.tape.begin_step()

    def store(self, tensor: torch.Tensor) -> Stored:
        """Keep a tensor; one that was computed may leave, and parameters, masks and indices stay."""
        if not self._may_leave(tensor):
            return Stored(tensor)
        known = self._by_tensor.get(id(tensor))
        if known is not None and known[0]() is tensor:
            movable = known[1]()
            if movable is not None and movable.is_of(tensor):
                return movable
        movable = _Movable(tensor, self)
        # Weakly: only backward keeps them. The tensor is compared, since a new one may get the same id.
        self._by_tensor[id(tensor)] = (weakref.ref(tensor), weakref.ref(movable))
        return movable

    # -- what regions report ---------------------------------------------------------------------------------------

    def forward_begins(self, use: RegionUse) -> None:
        """Record that the forward pass of a region begins."""
        if backward_pass() != -1:
            return  # part of a backward pass, and gone with it
        place, action, order = self._where()
        use.key = self.tape.new_key(place)
        self._live[use.key] = weakref.ref(use)
        self.tape.note(TapeEntry("F", use.key), action, order)
        self._settle(use)

    def forward_ended(self, use: RegionUse) -> None:
        """Record that a region has run; its arguments may leave the device."""
        if use.key is not None:
            self._settle(None)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        return tensor.grad_fn is not None and tensor.device.type == self.device.type

    def backward_begins(self, use: RegionUse) -> None:
        """Record that a region is about to run again, and load its arguments."""
        if use.key is not None and self._live.pop(use.key, None) is not None:
            _, action, order = self._where()
            self.tape.note(TapeEntry("B", use.key), action, order)
        for stored in _movable(use):
            if stored.tensor is None:
                self.figures.late += 1
                stored.load()
        self._settle(use)

    def _settle(self, now: RegionUse | None) -> None:
        """Move tensors that are not used soon to CPU memory, then load those that are."""
        live = self._live_uses()
        soon = [live[key] for key in self.tape.coming(live) if key in live]
        needed = _ids_of(soon)
        if now is not None:
            needed.update(map(id, now.stored))
        for use in live.values():
            if use.has_run:
                self._let_leave(use, needed)
        # Copies that are done free their memory before more is taken, so that the peak stays low.
        self._check_leaving()
        for use in soon:
            for stored in _movable(use):
                if stored.tensor is None:
                    stored.load()

    def _live_uses(self) -> dict[RegionKey, RegionUse]:
        """Return the regions that wait for backward; those that the graph has dropped are forgotten."""
        live: dict[RegionKey, RegionUse] = {}
        for key, weak in self._live.items():
            use = weak()
            if use is not None:
                live[key] = use
        if len(live) < len(self._live):
            self._live = {key: self._live[key] for key in live}
        return live

    def _let_leave(self, use: RegionUse, needed: Container[int]) -> None:
        for stored in _movable(use):
            is_here = stored.tensor is not None
            if is_here and id(stored) not in needed:
                stored.leave()

    # -- copies ----------------------------------------------------------------------------------------------------

    def count(self, change: int) -> None:
        """Count bytes that come to the device or leave it."""
        # Called on the stages' threads and on autograd's.
        with self._lock:
            self.has_kept = True
            self.figures.resident += change
            self.figures.peak = max(self.figures.peak, self.figures.resident)

    def copied_out(self, stored: _Movable, tensor: torch.Tensor) -> tuple[torch.Tensor, HostBlock | None, Any]:
        """Copy a tensor to CPU memory; return the copy, its block of the pool, and the event after which it is complete."""
        self.figures.left += stored.bytes
        self.has_moved = True
        if self.out_stream is None or self._pool is None:
            with in_host_memory[-1]():
                host = torch.empty_like(tensor)
            return host.copy_(tensor), None, None
        stream = self.out_stream
        # The computation of the tensor is only queued: the copy must not begin before it.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), torch.no_grad():
            host, block = self._pool.take(tensor, stream)
            host.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        # Kept until the copy is complete. So its memory is not reused, and a change in place can be detected.
        self._leaving.append(_Leaving(stored, tensor, tensor._version, event))
        return host, block, event

    def give_back(self, block: HostBlock, event: Any) -> None:
        """Free a block of host memory, for use after the event."""
        if self._pool is not None:
            self._pool.give_back(block, event)

    def copied_in(self, stored: Stored, host: torch.Tensor, complete: Any) -> tuple[torch.Tensor, Any]:
        """Copy a tensor back to the device; return the copy and the event after which it is complete."""
        self.figures.came += stored.bytes
        if self.in_stream is None:
            return torch.empty_like(host).copy_(host), None
        stream = self.in_stream
        # The copy to host memory runs on another stream, and may not be done.
        stream.wait_event(complete)
        with torch.cuda.stream(stream), torch.no_grad():
            tensor = torch.empty_like(host, device=self.device)
            tensor.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return tensor, event

    def _check_leaving(self, *, wait: bool = False) -> None:
        remaining = []
        for leaving in self._leaving:
            if wait:
                leaving.event.synchronize()
            if wait or leaving.event.query():
                leaving.check()
            else:
                remaining.append(leaving)
        self._leaving = remaining

    def taken(self, stored: _Movable) -> None:
        """Stop watching the source of a copy that came back.

        The compute stream waits for the copy, so the source has been read. Later changes to it are harmless.
        """
        for leaving in self._leaving:
            if leaving.stored is stored:
                leaving.check()
        self._leaving = [leaving for leaving in self._leaving if leaving.stored is not stored]


@dataclass
class _Leaving:
    """A tensor that is being copied out, and its version when the copy began: its keeper may have another by now."""

    stored: _Movable
    tensor: torch.Tensor
    version: int
    event: Any

    def check(self) -> None:
        self.stored.check(self.tensor, since=self.version)


class _Movable(Stored):
    """A tensor that may wait in CPU memory."""

    def __init__(self, tensor: torch.Tensor, offloader: Offloader) -> None:
        super().__init__(tensor)
        self._offloader = offloader
        # Stays that of the source when ``tensor`` is a copy that came back.
        self._source_version = tensor._version
        self._host: torch.Tensor | None = None
        self._block: HostBlock | None = None
        self._event: Any = None
        offloader.count(self.bytes)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is unchanged since it was kept."""
        return self._source_version == tensor._version

    def leave(self) -> None:
        """Free the memory on the device."""
        tensor = self.tensor
        if tensor is None:
            raise AssertionError("a tensor that is elsewhere cannot leave")
        if self._host is None:
            self.check(tensor)
            self._host, self._block, self._event = self._offloader.copied_out(self, tensor)
        self.tensor = None
        self._offloader.count(-self.bytes)

    def load(self) -> None:
        """Begin to copy it back."""
        if self._host is None:
            raise AssertionError("a tensor that has not left cannot come back")
        self.tensor, self._event = self._offloader.copied_in(self, self._host, self._event)
        self._version = self.tensor._version
        self._offloader.count(self.bytes)

    def take(self, label: str) -> torch.Tensor:
        if self._event is not None and self.tensor is not None and self._host is not None:
            stream = torch.cuda.current_stream(self._offloader.device)
            stream.wait_event(self._event)
            # The memory belongs to the copy stream, which must not reuse it before this stream has read it.
            self.tensor.record_stream(stream)
            self._offloader.taken(self)
        return super().take(label)

    def __del__(self) -> None:
        # Absent if the constructor failed.
        block = getattr(self, "_block", None)
        if block is not None:
            self._offloader.give_back(block, self._event)
        if getattr(self, "tensor", None) is not None:
            self._offloader.count(-self.bytes)


def _ids_of(uses: Iterable[RegionUse]) -> set[int]:
    ids: set[int] = set()
    for use in uses:
        ids.update(map(id, use.stored))
    return ids


def _movable(use: RegionUse) -> Iterator[_Movable]:
    for stored in use.stored:
        if isinstance(stored, _Movable):
            yield stored
