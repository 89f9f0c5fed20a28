"""Copies of many tensors at one moment, for a thread that reads them while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from smp_config.limits import timeout_seconds
from smp_runtime.errors import DeadlineError
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

    def make_room(self, tensors: list[torch.Tensor]) -> list[int]:
        """Return the places of the copies of tensors in the arena, which is enlarged if needed."""
        offsets, size = lay_out(tensors)
        if size > self.bytes:
            self.close()
            self._mapped, self._staging = self._map(size)
            self.bytes = size
        return offsets

    def give(self, copies: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        """Let each tensor lie at its place; it has a storage of its own there."""
        for copied, offset in zip(copies, offsets, strict=True):
            copied.set_(view_memory(self._mapped, offset, copied.shape, copied.dtype))  # type: ignore[call-overload]

    def _map(self, size: int) -> tuple[mmap.mmap, StagingMemory]:
        mapped = map_memory(size, for_gpu=self._device.type == "cuda")
        return mapped, StagingMemory(view_memory(mapped, 0, (size,), torch.uint8), self._device)

    def copy_some(self, tensors: list[torch.Tensor], offsets: Sequence[int]) -> None:
        """Copy tensors to their places, which follow each other; the copies are complete when the current stream is."""
        self._staging.copy(tensors, offsets)

    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, complete when the current stream is; they replace those of the call before."""
        offsets = self.make_room(tensors)
        self._staging.copy(tensors, offsets)
        views = (
            view_memory(self._mapped, at, each.shape, each.dtype) for each, at in zip(tensors, offsets, strict=True)
        )
        return list(views)

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


#: Snapshots of this process whose later copies are not complete.
_pending: set[TensorSnapshot] = set()


def wait_for_copies() -> None:
    """Block until no snapshot of this process has copies to make; call it before writing into what no script holds.

    Raises:
        DeadlineError: it took longer than ``SMP_TIMEOUT_SECONDS``.
    """
    for snapshot in tuple(_pending):
        seconds = timeout_seconds(os.environ)
        if not snapshot.wait(seconds):
            raise DeadlineError(
                f"the optimizer's state is not copied for the checkpoint after {seconds:.0f} s; look at the machine's memory, or "
                "raise SMP_TIMEOUT_SECONDS"
            )


class TensorSnapshot:
    """Tensors of one moment, in one arena: their sizes must be known before it can take them.

    Some are copied at once. Those that no script holds are copied by a thread, and whoever changes them waits for it by
    :func:`wait_for_copies`.
    """

    def __init__(self) -> None:
        self._now, self._later = _CopiedTogether(), _CopiedTogether()
        #: How often each tensor that is copied later had been changed in place.
        self._versions: list[int] = []
        #: Of those that are copied later; None as long as there is no room.
        self._places: list[int] | None = None
        self._is_copied = threading.Event()

    def keep(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will be the copy. It has its shape now, and its elements after :meth:`copy_to`."""
        return self._now.add(tensor)

    def keep_until_update(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that will be the copy. It has its shape now, and its elements after :meth:`copy_rest`.

        Its counter of changes must show all writes that do not wait for the copy.
        """
        if tensor.is_inference():  # it counts no changes
            return self._now.add(tensor)
        self._versions.append(tensor._version)
        return self._later.add(tensor)

    @torch.no_grad()
    def copy_to(self, arena: StagingArena) -> None:
        """Copy what must be copied at once; the copies are complete when the current stream is."""
        # Those of one time lie together: a copy through chunks writes the gaps between its tensors as well.
        offsets = arena.make_room([*self._now.sources, *self._later.sources])
        count = len(self._now.sources)
        arena.give(self._now.copies, offsets[:count])
        self._places = offsets[count:]
        if self._later.sources:
            _pending.add(self)
        arena.copy_some(self._now.sources, offsets[:count])

    @torch.no_grad()
    def copy_rest(self, arena: StagingArena) -> None:
        """Copy the others, on a thread, if :meth:`copy_to` has made room; return when the copies are complete.

        What :meth:`copy_to` began must be complete by then: that is the moment of the snapshot, for all streams.

        Raises:
            ChangedWhileCopiedError: something has changed one meanwhile.
        """
        later = self._later
        try:
            if self._places is not None:
                arena.give(later.copies, self._places)
                with _own_stream(later.sources):
                    arena.copy_some(later.sources, self._places)
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
            _pending.discard(self)
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
