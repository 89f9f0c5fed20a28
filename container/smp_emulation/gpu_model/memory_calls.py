"""Calls of ``torch.cuda`` about memory, answered by the model's allocators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_emulation.gpu_model.allocator import CachingAllocator, Statistics
    from smp_emulation.gpu_model.model import GpuModel

_MIB = 2**20


def memory_calls(model: GpuModel, index: Callable[[Any], int]) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in ``torch.cuda``.

    Args:
        index: returns the number of the device that an argument means.
    """
    calls = _MemoryCalls(model, index)
    return {
        "empty_cache": calls.empty_cache,
        "memory_allocated": calls.allocated,
        "memory_reserved": calls.reserved,
        "memory_cached": calls.reserved,
        "device_memory_used": calls.reserved,
        "max_memory_allocated": calls.most_allocated,
        "max_memory_reserved": calls.most_reserved,
        "max_memory_cached": calls.most_reserved,
        "reset_peak_memory_stats": calls.reset_peaks,
        "reset_max_memory_allocated": calls.reset_peaks,
        "reset_max_memory_cached": calls.reset_peaks,
        "memory_stats": calls.all_statistics,
        "memory_summary": calls.summary,
        "mem_get_info": calls.free_and_total,
        "set_per_process_memory_fraction": calls.set_fraction,
        "get_per_process_memory_fraction": calls.fraction,
    }


class _MemoryCalls:
    """The functions; an argument ``device`` is whatever a script passes."""

    def __init__(self, model: GpuModel, index: Callable[[Any], int]) -> None:
        self._model = model
        self._index = index

    def _allocator(self, device: Any) -> CachingAllocator:
        return self._model.allocator(self._index(device))

    def _statistics(self, device: Any) -> Statistics:
        return self._allocator(device).statistics()

    def empty_cache(self) -> None:
        for allocator in self._model.allocators:
            allocator.empty_cache()

    def allocated(self, device: Any = None) -> int:
        return self._statistics(device).allocated.now

    def reserved(self, device: Any = None) -> int:
        return self._statistics(device).reserved.now

    def most_allocated(self, device: Any = None) -> int:
        return self._statistics(device).allocated.peak

    def most_reserved(self, device: Any = None) -> int:
        return self._statistics(device).reserved.peak

    def reset_peaks(self, device: Any = None) -> None:
        self._allocator(device).reset_peaks()

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        number = self._index(device)
        self._model.contexts.use(number, "torch.cuda.mem_get_info")
        return self._model.capacity - self.reserved(number), self._model.capacity

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._allocator(device).limit = int(self._model.capacity * fraction)

    def fraction(self, device: Any = None) -> float:
        return self._allocator(device).limit / self._model.capacity

    def all_statistics(self, device: Any = None) -> OrderedDict[str, int]:
        statistics = self._statistics(device)
        found = OrderedDict[str, int]()
        for name, amount in statistics.amounts().items():
            found[f"{name}.all.current"] = amount.now
            found[f"{name}.all.peak"] = amount.peak
            found[f"{name}.all.allocated"] = amount.gained
            found[f"{name}.all.freed"] = amount.lost
        found["num_alloc_retries"] = statistics.retries
        found["num_ooms"] = statistics.out_of_memory
        return found

    def summary(self, device: Any = None, abbreviated: bool = False) -> str:
        lines = [
            f"{name:16} {amount.now / _MIB:12,.1f} MiB now {amount.peak / _MIB:12,.1f} MiB at most"
            for name, amount in self._statistics(device).amounts().items()
        ]
        return "\n".join([f"emulated CUDA device {self._index(device)}", *lines])
