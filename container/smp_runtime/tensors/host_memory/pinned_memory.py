"""Host memory in its exact size, and its registration with CUDA.

``torch.empty(pin_memory=True)`` rounds each tensor up to a power of two, and keeps it until the process ends. Here memory is
mapped in whole pages, registered by ``cudaHostRegister``, and given back to the system with its owner.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import torch

logger = logging.getLogger("smp")

#: Mappings that this process has made for a GPU, and those that a forked child has inherited.
_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []
# A forked child has no such mapping (MADV_DONTFORK). If it freed the object, it would unmap what lies there now.
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped))


def map_memory(size: int, *, for_gpu: bool) -> mmap.mmap:
    """Map at least ``size`` bytes, page aligned. The system provides each page when it is first written or pinned."""
    mapped = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # With huge pages, first writes and pinning handle 2 MiB at a time instead of 4 KiB.
    advices = ["MADV_HUGEPAGE"]
    if for_gpu:
        # Otherwise a fork (a data loader's worker) copies all pinned pages, or separates them from the GPU's view of them.
        advices.append("MADV_DONTFORK")
        _mapped.add(mapped)
    for advice in advices:
        with contextlib.suppress(AttributeError, OSError):  # a system without it
            mapped.madvise(getattr(mmap, advice))
    return mapped


def view_memory(mapped: mmap.mmap, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in mapped memory. Its storage has its own elements only, so ``torch.save`` writes no others."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(torch.Size(shape))


class PinnedRanges:
    """Ranges of host memory that are registered with CUDA.

    They are unregistered by :meth:`close`, or with this object. Until then their memory stays mapped.

    Args:
        device: a GPU that copies from and to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Unregistering must exclude a thread that registers.
        self._lock = threading.Lock()
        self._is_closed = False
        self._ranges: list[torch.Tensor] = []
        self._end = weakref.finalize(self, _unregister, self._ranges, device, os.getpid())
        self._end.atexit = False  # the driver frees everything when the process ends

    @property
    def bytes(self) -> int:
        """Return the bytes that are registered."""
        return sum(memory.numel() for memory in self._ranges)

    def add(self, memory: torch.Tensor) -> bool:
        """Register ``memory``, a flat tensor of bytes; return whether it is pinned now."""
        # A thread registers while the main thread may close: nothing may be registered afterwards.
        with self._lock:
            if self._is_closed:
                return False
            with torch.cuda.device(self._device):  # on another device, this would create a context there
                code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            if code == 0:
                self._ranges.append(memory)
                return True
        _clear_error(self._device)
        logger.warning(
            "%s bytes of host memory cannot be pinned (CUDA error %d): copies from and to the GPU take longer; give the container "
            "more memory, or a higher limit of locked memory",
            f"{memory.numel():,}",
            code,
        )
        return False

    def close(self) -> None:
        """Unregister all ranges, after all copies on the device."""
        with self._lock:
            self._is_closed = True
            _unregister(self._ranges, self._device, os.getpid())


def _unregister(ranges: list[torch.Tensor], device: torch.device, owner: int) -> None:
    if not ranges or os.getpid() != owner:  # a forked child has no registration
        return
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # a device that failed has no copies any more
        torch.cuda.synchronize(device)
        while ranges:
            torch.cuda.cudart().cudaHostUnregister(ranges.pop().data_ptr())


def _clear_error(device: torch.device) -> None:
    """Remove CUDA's record of the last error of this thread: the next kernel would report it as its own."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
