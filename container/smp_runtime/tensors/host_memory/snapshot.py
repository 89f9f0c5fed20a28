"""Copies of many tensors at one moment, for a thread that reads them while training goes on."""

from __future__ import annotations

import mmap

import torch

from smp_runtime.tensors.host_memory.pinned_memory import map_memory, view_memory
from smp_runtime.tensors.host_memory.staging import StagingMemory, lay_out


class StagingArena:
    """Host memory that snapshot after snapshot uses again, as large as the largest of them.

    It stays until it is closed. Freed in between, it would have to be pinned again for each snapshot, and pinning takes about 30
    times as long as a copy to pinned memory.

    Args:
        device: the device that the tensors are on.

    Attributes:
        bytes: its size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bytes = 0
        self._mapped, self._staging = self._map(0)

    @property
    def pinned_bytes(self) -> int:
        """Return the number of pinned bytes."""
        return self._staging.pinned_bytes

    def make_room(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the memory of the copies of tensors, each a tensor with a storage of its own; enlarge the arena if needed."""
        offsets, size = lay_out(tensors)
        if size > self.bytes:
            self.close()
            self._mapped, self._staging = self._map(size)
            self.bytes = size
        return [
            view_memory(self._mapped, offset, tensor.shape, tensor.dtype)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]

    def _map(self, size: int) -> tuple[mmap.mmap, StagingMemory]:
        mapped = map_memory(size, for_gpu=self._device.type == "cuda")
        return mapped, StagingMemory(view_memory(mapped, 0, (size,), torch.uint8), self._device)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, complete when the current stream is; they replace those of the call before."""
        copies = self.make_room(tensors)
        self._staging.copy(tensors, lay_out(tensors)[0])
        return copies

    def pin_later(self) -> None:
        """Start to pin the memory on a thread, if it is not pinned."""
        self._staging.pin_later()

    def wait_until_pinned(self, seconds: float) -> bool:
        """Wait for the thread of :meth:`pin_later`, and return whether all memory is pinned."""
        return self._staging.wait_until_pinned(seconds)

    def close(self) -> None:
        """Unpin the memory. It is freed when the last copy in it is."""
        self._staging.close()


class TensorSnapshot:
    """Tensors that are copied together: their sizes must be known before an arena can take them."""

    def __init__(self) -> None:
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def keep(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will be the copy. It has its shape now, and its elements after :meth:`copy_to`."""
        self._sources.append(tensor.detach())
        copied = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu"
        )  # takes no memory, since nothing is written
        self._copies.append(copied)
        return copied

    @torch.no_grad()
    def copy_to(self, arena: StagingArena) -> None:
        """Copy the tensors; the copies are complete when the current stream is."""
        for copied, memory in zip(self._copies, arena.make_room(self._sources), strict=True):
            copied.set_(memory)  # type: ignore[call-overload]
        arena.copy(self._sources)
        self._sources.clear()
