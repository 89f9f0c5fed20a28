"""Memory of emulated devices: which storages are on which device, what they hold, and who may have it after them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from smp_emulation.checked.streams.clocks import History
from smp_emulation.checked.streams.faults import StreamFault
from smp_emulation.checked.streams.registered_memory import RegisteredMemory
from smp_emulation.checked.streams.sites import find_site
from smp_emulation.gpu_model.model import stream_of_pool

if TYPE_CHECKING:
    from smp_emulation.checked.streams.execution import Lane
    from smp_emulation.gpu_model.allocator import Chunk
    from smp_emulation.gpu_model.model import GpuModel

#: What fresh memory is full of: NaN in every type with a point, −1 in the others.
_POISON = 0xFF
_PLAIN = {torch.Tensor, torch.nn.Parameter}


@dataclass(eq=False)
class MemoryBlock:
    """A piece of a device's memory between its allocation and the next.

    Attributes:
        elements: its bytes. The host sees other memory for the storage, which is never read.
        lane: the stream that it was allocated on; later work there may reuse it as soon as it is freed.
        users: other streams for which ``record_stream`` was called.
        line: the line that allocated it.
        freed: the line that released it, if known.
        chunk: its place in the model of the device's allocator.
    """

    elements: torch.Tensor
    lane: Lane
    line: str
    history: History = field(default_factory=History)
    users: set[int] = field(default_factory=set)
    freed: str = ""
    chunk: Chunk | None = None


@dataclass(eq=False)
class StoragePlace:
    """A storage that streams may touch.

    Attributes:
        device: number of its device; None for host memory.
        block: what it holds; None for host memory, and when its size is zero.
        history: of host memory.
        pinned: whether copies from and to it run by themselves.
        base: address of its first byte if the history is that of all registered memory, else 0.
    """

    device: int | None
    block: MemoryBlock | None = None
    history: History = field(default_factory=History)
    pinned: bool = False
    base: int = 0
    storage: weakref.ref[torch.UntypedStorage] | None = None

    def __str__(self) -> str:
        if self.device is None:
            return f"{'pinned ' if self.pinned else ''}host memory"
        made = f" allocated at {self.block.line}" if self.block is not None else ""
        return f"memory of cuda:{self.device}{made}"


class Memory:
    """The storages on devices, and the host memory that streams use.

    Args:
        model: counts memory as PyTorch's allocator divides it.
        default_streams: actors up to this number are default streams.
    """

    def __init__(self, model: GpuModel, default_streams: int) -> None:
        self._model = model
        self._default_streams = default_streams
        self._places: dict[int, StoragePlace] = {}
        self.registered = RegisteredMemory()
        #: Blocks of dead storages. The thread that frees a storage adds its block; :meth:`allocate` collects them.
        self._dead: deque[tuple[MemoryBlock, str]] = deque()
        self._free: dict[int, list[MemoryBlock]] = {}

    def place_of(self, tensor: torch.Tensor) -> StoragePlace | None:
        """Return the tensor's storage place, or None if streams do not use the tensor."""
        try:
            if type(tensor) in _PLAIN:
                return self._find(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                return self._find(tensor)
        except (NotImplementedError, RuntimeError):  # without a storage
            return None

    def placed(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, StoragePlace]]:
        """Return the tensors that streams use, with their storage places."""
        found = []
        for tensor in tensors:
            place = self.place_of(tensor)
            if place is not None:
                found.append((tensor, place))
        return found

    def _find(self, tensor: torch.Tensor) -> StoragePlace | None:
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None and self.registered.overlaps(storage):
            place = StoragePlace(None, history=self.registered.history, pinned=True, base=storage.data_ptr())
            self.register(tensor, place)
        return place

    def find_places_again(self) -> None:
        """Forget the places of host storages that have become pinned, or are not pinned any more."""
        for key, place in list(self._places.items()):
            storage = None if place.device is not None or place.storage is None else place.storage()
            if storage is not None and self.registered.overlaps(storage) != (place.base != 0):
                del self._places[key]

    def place_of_storage(self, storage: torch.UntypedStorage) -> StoragePlace | None:
        """Return the place of a storage, or None if streams do not use it."""
        return self._places.get(storage._cdata)

    def register(self, tensor: torch.Tensor, place: StoragePlace) -> None:
        """Register the tensor's storage at a place."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object, places: dict[int, StoragePlace] = self._places) -> None:
            # The key is an address, which may belong to a new storage by now.
            if places.get(key) is place:
                del places[key]
            self._release(place, find_site())

        # Weakly: an entry must not keep a tensor's memory in use.
        place.storage = weakref.ref(storage, died)
        self._places[key] = place

    def _release(self, place: StoragePlace, line: str) -> None:
        block, place.block = place.block, None
        if block is not None and place.device is not None:
            if block.chunk is not None:
                self._model.allocator(place.device).release(block.chunk, is_pending=bool(block.users))
            # Only noted: a storage dies at any moment, also inside :meth:`allocate`.
            self._dead.append((block, line))

    def resize(self, place: StoragePlace, size: int, lane: Lane) -> None:
        """Resize a device storage to ``size`` bytes; at size 0 its block is freed."""
        former = place.block
        if former is not None and former.elements.numel() == size:
            return
        self._release(place, find_site())
        if size and place.device is not None:
            place.block = self.allocate(place.device, size, lane)
            if former is not None:
                count = min(size, former.elements.numel())
                place.block.elements[:count] = former.elements[:count]

    def allocate(self, device: int, size: int, lane: Lane) -> MemoryBlock:
        """Allocate memory for work of a stream; memory freed there is reused first, as in PyTorch's allocator.

        Raises:
            StreamFault: another stream may still use the freed memory.
            torch.OutOfMemoryError: the device is full.
        """
        while self._dead:
            block, line = self._dead.popleft()
            block.freed = line
            self._free.setdefault(block.lane.actor, []).append(block)
        elements = None
        waiting = []
        for block in self._free.get(lane.actor, ()):
            if block.history.unknown_to(lane.clock):
                if fault := block.history.unknown_to(lane.clock, block.users):
                    raise StreamFault(
                        f"memory of cuda:{device} that was allocated at {block.line} is given back at {block.freed} and "
                        f"used again on {lane.name} at {find_site()}, while nothing says that the last use by another stream "
                        "is over: "
                        f"{fault}. Call record_stream on the tensor for {fault.name}, or let {lane.name} wait for it before the "
                        "tensor is freed"
                    )
                waiting.append(block)  # the allocator waits for an event before anybody gets it
                continue
            if block.users and block.chunk is not None:
                self._model.allocator(device).end_use(block.chunk)
            if elements is None and block.elements.numel() == size:
                elements = block.elements
        self._free[lane.actor] = waiting
        # Reuse needs no wait: the last owner's remaining work, and all that it waits for, runs earlier on this stream.
        self._model.contexts.use(device, "a tensor")
        stream = stream_of_pool(lane.actor - self._default_streams)
        chunk = self._model.allocator(device).allocate(size, stream)
        fresh = torch.empty(size, dtype=torch.uint8) if elements is None else elements
        if elements is None:
            fresh.fill_(_POISON)
        return MemoryBlock(fresh, lane, find_site(), chunk=chunk)

    def clear(self) -> None:
        """Forget all storages."""
        self._places.clear()
        self._free.clear()
        self._dead.clear()
        self.registered = RegisteredMemory()


def view_of(block: MemoryBlock, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``block`` that belong to the device tensor ``like``."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(block.elements.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the byte range, start and stop, from a tensor's first to its last element in the storage."""
    if not tensor.numel():
        return 0, 0
    size, start = tensor.element_size(), tensor.storage_offset()
    last = start + sum((length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True))
    return int(start * size), int((last + 1) * size)
