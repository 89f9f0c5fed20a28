"""The result of ``torch.cuda.cudart()`` on emulated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_emulation.checked.streams.faults import StreamFault
from smp_emulation.checked.streams.sites import find_site

if TYPE_CHECKING:
    from smp_emulation.checked.streams.device import Devices

#: What CUDA returns for memory that is registered already, or not registered.
_ALREADY, _NOT = 712, 713


class CudaRuntime:
    """CUDA's runtime, which registers host memory."""

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
