"""Memory of the emulated devices: that of this process, and of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections import OrderedDict
from typing import Any

from smp_emulation.calls import CoveredCall, answer_each, answer_with, do_nothing, refuse_call, refuse_each
from smp_emulation.devices import NAME, index_of, memory_of_the_machine

_PAGE = os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    """Return the bytes of main memory that this process uses now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return _peak_bytes()


def _peak_bytes() -> int:
    """Return the peak memory of the process in bytes since the last reset, or since its start if the system cannot reset it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def allocated_bytes(device: Any = None) -> int:
    """Return the bytes of main memory that this process uses."""
    index_of(device)
    return _resident_bytes()


def most_allocated(device: Any = None) -> int:
    """Return the most bytes that the process has used since the last reset."""
    index_of(device)
    return max(_peak_bytes(), _resident_bytes())


def reset_peak(device: Any = None) -> None:
    """Let the peak count anew."""
    index_of(device)
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # for the kernel, 5 resets the peak to the memory in use
    except OSError:
        pass  # not Linux, or not allowed: the peak stays that of the whole process


def empty_cache() -> None:
    """Return freed memory in the process's allocator to the system, so that `allocated` is the memory in use."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without malloc_trim keeps freed memory
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def free_and_total(device: Any = None) -> tuple[int, int]:
    """Return the free and total bytes of the machine's main memory."""
    index_of(device)
    return memory_of_the_machine()


def memory_statistics(device: Any = None) -> OrderedDict[str, Any]:
    """Return the process's memory under the names of CUDA's allocator; all other statistics are 0."""
    now, most = allocated_bytes(device), most_allocated(device)
    stats: OrderedDict[str, Any] = OrderedDict()
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes"):
        for pool in ("all", "large_pool", "small_pool"):
            is_counted = pool == "all" and kind != "inactive_split_bytes"
            values = {"current": now, "peak": most, "allocated": most, "freed": most - now}
            for part, value in values.items():
                stats[f"{kind}.{pool}.{part}"] = value if is_counted else 0
    for kind in ("allocation", "segment", "active", "inactive_split"):
        for pool in ("all", "large_pool", "small_pool"):
            for part in ("current", "peak", "allocated", "freed"):
                stats[f"{kind}.{pool}.{part}"] = 0
    for name in (
        "num_alloc_retries",
        "num_ooms",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "max_split_size",
    ):
        stats[name] = 0
    return stats


def _nested_stats(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in memory_statistics(device).items():
        *way, last = name.split(".")
        place = nested
        for part in way:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _summary(device: Any = None, abbreviated: bool = False) -> str:
    now, most = allocated_bytes(device), most_allocated(device)
    free, total = memory_of_the_machine()
    return (
        f"{NAME}, device {index_of(device)}: this process uses {now / 2**20:,.1f} MiB of main memory ({most / 2**20:,.1f} MiB at "
        f"most); the machine has {total / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB free"
    )


def _processes(device: Any = None) -> str:
    return f"GPU:{index_of(device)}\nprocess {os.getpid():>10d} uses {allocated_bytes(device) / 2**20:>12.3f} MB memory (emulated)"


#: By device: the part of its memory that a script has allowed this process.
_fraction: dict[int, float] = {}


def _set_fraction(fraction: float, device: Any = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _fraction[index_of(device)] = fraction


PROCESS = "this process's main memory"
_POOL = "it manages memory of a GPU"

CALLS: tuple[CoveredCall, ...] = (
    *answer_each("torch.cuda", ("memory_allocated", "memory_reserved", "memory_cached"), PROCESS, allocated_bytes),
    *answer_each(
        "torch.cuda",
        ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"),
        f"{PROCESS}, at most",
        most_allocated,
    ),
    answer_with("torch.cuda.device_memory_used", PROCESS, allocated_bytes),
    *answer_each(
        "torch.cuda",
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        "the peak of the process counts anew",
        reset_peak,
    ),
    *answer_each(
        "torch.cuda",
        (
            "reset_accumulated_memory_stats",
            "reset_accumulated_host_memory_stats",
            "reset_peak_host_memory_stats",
            "ipc_collect",
            "caching_allocator_enable",
        ),
        "nothing to do",
        do_nothing,
    ),
    answer_with("torch.cuda.empty_cache", "freed memory of the process goes back to the system", empty_cache),
    answer_with("torch.cuda.mem_get_info", "this machine's main memory", free_and_total),
    answer_with("torch.cuda.memory_stats", f"{PROCESS}, under the allocator's names", memory_statistics),
    answer_with("torch.cuda.memory_stats_as_nested_dict", f"{PROCESS}, under the allocator's names", _nested_stats),
    answer_with("torch.cuda.host_memory_stats", "empty", OrderedDict),
    answer_with("torch.cuda.host_memory_stats_as_nested_dict", "empty", dict),
    answer_with("torch.cuda.memory_summary", "a sentence", _summary),
    answer_with("torch.cuda.memory_snapshot", "empty", lambda *args, **kwargs: []),
    answer_with("torch.cuda.memory._record_memory_history", "records nothing", do_nothing),
    answer_with("torch.cuda.memory._dump_snapshot", "writes nothing", do_nothing),
    answer_with("torch.cuda.memory._snapshot", "empty", lambda *args, **kwargs: {"segments": [], "device_traces": []}),
    answer_with("torch.cuda.list_gpu_processes", "this process", _processes),
    answer_with("torch.cuda.set_per_process_memory_fraction", "remembered, without effect", _set_fraction),
    answer_with(
        "torch.cuda.get_per_process_memory_fraction",
        "what was set",
        lambda device=None: _fraction.get(index_of(device), 1.0),
    ),
    answer_with("torch.cuda.get_allocator_backend", "native", lambda: "native"),
    *refuse_each("torch.cuda", ("caching_allocator_alloc", "caching_allocator_delete"), _POOL),
    *refuse_each("torch.cuda", ("change_current_allocator", "caching_allocator_disabled"), _POOL),
    *refuse_each("torch.cuda", ("CUDAPluggableAllocator", "MemPool"), _POOL, is_class=True),
    refuse_call("torch.cuda.use_mem_pool", _POOL),
)
