"""Calls of ``torch.cuda`` about memory, answered by the model's allocators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_emulation.gpu_model.allocator import CachingAllocator
    from smp_emulation.gpu_model.model import GpuModel

_MIB = 2**20


def memory_calls(model: GpuModel, index: Callable[[Any], int]) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in ``torch.cuda``.

    Args:
        index: returns the number of the device that an argument means.
    """

    def of(device: Any = None) -> CachingAllocator:
        return model.allocator(index(device))

    def free_and_total(device: Any = None) -> tuple[int, int]:
        number = index(device)
        model.contexts.use(number, "torch.cuda.mem_get_info")
        return model.capacity - of(number).statistics().reserved.now, model.capacity

    def empty_cache() -> None:
        for allocator in model.allocators:
            allocator.empty_cache()

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        of(device).limit = int(model.capacity * fraction)

    def summary(device: Any = None, abbreviated: bool = False) -> str:
        statistics = of(device).statistics()
        lines = [
            f"{name:16} {amount.now / _MIB:12,.1f} MiB now {amount.peak / _MIB:12,.1f} MiB at most"
            for name, amount in statistics.amounts().items()
        ]
        return "\n".join([f"emulated CUDA device {index(device)}", *lines])

    return {
        "empty_cache": empty_cache,
        "memory_allocated": lambda device=None: of(device).statistics().allocated.now,
        "memory_reserved": lambda device=None: of(device).statistics().reserved.now,
        "max_memory_allocated": lambda device=None: of(device).statistics().allocated.peak,
        "max_memory_reserved": lambda device=None: of(device).statistics().reserved.peak,
        "reset_peak_memory_stats": lambda device=None: of(device).reset_peaks(),
        "memory_stats": lambda device=None: _statistics(of(device)),
        "memory_summary": summary,
        "mem_get_info": free_and_total,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: of(device).limit / model.capacity,
    }


def _statistics(allocator: CachingAllocator) -> OrderedDict[str, int]:
    statistics = allocator.statistics()
    found = OrderedDict[str, int]()
    for name, amount in statistics.amounts().items():
        found[f"{name}.all.current"] = amount.now
        found[f"{name}.all.peak"] = amount.peak
        found[f"{name}.all.allocated"] = amount.gained
        found[f"{name}.all.freed"] = amount.lost
    found["num_alloc_retries"] = statistics.retries
    found["num_ooms"] = statistics.out_of_memory
    return found
