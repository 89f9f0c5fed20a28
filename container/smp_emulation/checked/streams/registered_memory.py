"""Host memory that a program pins with ``cudaHostRegister``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_emulation.checked.streams.clocks import History
from smp_emulation.checked.streams.faults import StreamFault
from smp_emulation.checked.streams.sites import find_site

if TYPE_CHECKING:
    import torch

    from smp_emulation.checked.streams.device import Devices

#: What CUDA returns for memory that is registered already, or not registered.
_ALREADY, _NOT = 712, 713


class RegisteredMemory:
    """Registered ranges of addresses.

    Attributes:
        history: of all of them, by address: tensors with storages of their own may lie in one range.
    """

    def __init__(self) -> None:
        self.history = History()
        self._ranges: dict[int, int] = {}  # by the first address, the one behind the last

    def overlaps(self, storage: torch.UntypedStorage) -> bool:
        """Return whether part of a storage is registered."""
        if not self._ranges or storage.device.type != "cpu":
            return False
        first = storage.data_ptr()
        return self._is_taken(first, first + storage.nbytes())

    def _is_taken(self, first: int, last: int) -> bool:
        return any(start < last and first < stop for start, stop in self._ranges.items())

    def add(self, address: int, size: int) -> bool:
        """Register a range; return False if part of it is registered already."""
        if self._is_taken(address, address + size):
            return False
        self._ranges[address] = address + size
        return True

    def remove(self, address: int) -> tuple[int, int] | None:
        """Remove a range, and return its first address and the one behind its last; None if there is no such range."""
        stop = self._ranges.pop(address, None)
        return None if stop is None else (address, stop)


class CudaRuntime:
    """The result of ``torch.cuda.cudart()``: it registers host memory."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Pin host memory."""
        with self._devices.lock:
            if not self._devices.memory.registered.add(address, size):
                return _ALREADY
            self._devices.memory.find_places_again()
            return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Unpin host memory.

        Raises:
            StreamFault: a stream may still use it.
        """
        with self._devices.lock:
            memory = self._devices.memory
            removed = memory.registered.remove(address)
            if removed is None:
                return _NOT
            fault = memory.registered.history.forget(*removed, self._devices.host)
            memory.find_places_again()
        if fault:
            raise StreamFault(
                f"pinned host memory is unregistered at {find_site()} while nothing says that its last use by a stream is over: "
                f"{fault}. Synchronize the stream on the host before it"
            )
        return 0
