"""Copies of many tensors at one moment, for a thread that reads them while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

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

    def copy_some(self, tensors: list[torch.Tensor], among: list[torch.Tensor], first: int) -> None:
        """Copy tensors to their memory; the copies are complete when the current stream is.

        Args:
            among: all tensors that :meth:`make_room` was called with.
            first: the index of ``tensors[0]`` among them; the others follow it.
        """
        self._staging.copy(tensors, lay_out(among)[0][first : first + len(tensors)])

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


@dataclass
class _CopiedTogether:
    """Tensors of a snapshot that are copied at one time.

    Attributes:
        sources: aliases, which keep the memory of a tensor that the optimizer replaces.
        copies: the tensors that were handed out for them.
    """

    sources: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sources.append(tensor.detach())
        copied = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu"
        )  # takes no memory, since nothing is written
        self.copies.append(copied)
        return copied


class ChangedWhileCopiedError(RuntimeError):
    """An error: a tensor was changed before its copy was complete, so the copy is of no moment."""


class TensorSnapshot:
    """Tensors of one moment, in one arena: their sizes must be known before it can take them.

    Some are copied at once. Those that only the optimizer's update changes are copied by a thread, and the update waits for it.
    """

    def __init__(self) -> None:
        self._now, self._later = _CopiedTogether(), _CopiedTogether()
        #: How often each tensor that is copied later had been changed in place.
        self._versions: list[int] = []
        self._has_room = False
        self._is_copied = threading.Event()

    def keep(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will be the copy. It has its shape now, and its elements after :meth:`copy_to`."""
        return self._now.add(tensor)

    def keep_until_update(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will be the copy. It has its shape now, and its elements after :meth:`copy_rest`."""
        if tensor.is_inference():  # it counts no changes
            return self._now.add(tensor)
        self._versions.append(tensor._version)
        return self._later.add(tensor)

    @torch.no_grad()
    def copy_to(self, arena: StagingArena) -> None:
        """Copy what must be copied at once; the copies are complete when the current stream is."""
        # Those of one time lie together: a copy through chunks writes the gaps between its tensors as well.
        everything = [*self._now.sources, *self._later.sources]
        room = arena.make_room(everything)
        for copied, memory in zip([*self._now.copies, *self._later.copies], room, strict=True):
            copied.set_(memory)  # type: ignore[call-overload]
        self._has_room = True
        arena.copy_some(self._now.sources, everything, 0)

    @torch.no_grad()
    def copy_rest(self, arena: StagingArena) -> None:
        """Copy the others, on a thread, if :meth:`copy_to` has made room; return when the copies are complete.

        What :meth:`copy_to` began must be complete by then: that is the moment of the snapshot, for all streams.

        Raises:
            ChangedWhileCopiedError: something has changed one meanwhile.
        """
        later, first = self._later, len(self._now.sources)
        try:
            everything = [*self._now.sources, *later.sources]
            if self._has_room:
                with _own_stream(later.sources):
                    arena.copy_some(later.sources, everything, first)
            versions = zip(later.sources, self._versions, strict=True)
            changed = [tensor for tensor, version in versions if tensor._version != version]
            if changed:
                raise ChangedWhileCopiedError(
                    f"{len(changed)} of {len(later.sources)} tensors of the optimizer's state, the first of shape "
                    f"{list(changed[0].shape)}, were changed in place while the save copied them, and not by "
                    "smp.DistributedOptimizer.step, which waits for that; call smp.wait_for_checkpoint() before the change, or "
                    "save with async_save=False"
                )
        finally:
            self._now, self._later = _CopiedTogether(), _CopiedTogether()
            self._is_copied.set()

    def wait(self, seconds: float) -> bool:
        """Block until :meth:`copy_rest` has returned, and return whether it has."""
        return self._is_copied.wait(seconds)


@contextlib.contextmanager
def _own_stream(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Run copies from a GPU on a stream of their own, beside those of training, and wait for them."""
    device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
    if device is None:
        yield
        return
    with torch.cuda.device(device):  # a thread begins on device 0
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()  # the sources may change, or be freed, only now
