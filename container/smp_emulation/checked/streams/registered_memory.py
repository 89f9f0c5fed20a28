"""Host memory that a program pins with ``cudaHostRegister``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_emulation.checked.streams.clocks import History

if TYPE_CHECKING:
    import torch


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
