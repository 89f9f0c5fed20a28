"""``torch.accelerator``, PyTorch's names for whichever device there is: the emulated CUDA devices."""

from __future__ import annotations

from typing import Any

import torch

from smp_emulation import devices
from smp_emulation.calls import answer_each, answer_with, do_nothing
from smp_emulation.covered import memory, ordering

CUDA = torch.device("cuda")


class AcceleratorEvent(ordering.Event):
    """``torch.Event``: its first argument is a device."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **more: Any) -> None:
        super().__init__(enable_timing)


def _capability(device: Any = None, /) -> dict[str, Any]:
    devices.index_of(device)
    kinds = (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    )
    return {"supported_dtypes": set(kinds)}


def _now(device_index: Any = None, /) -> int:
    return memory.allocated_bytes(device_index)


CALLS = (
    answer_with("torch.accelerator.is_available", "True", lambda: True),
    answer_with("torch.accelerator.current_accelerator", "cuda", lambda check_available=False: CUDA),
    answer_with("torch.accelerator.device_count", "the ranks of this host", devices.count),
    *answer_each(
        "torch.accelerator", ("set_device_index", "set_device_idx"), "as torch.cuda.set_device()", devices.set_device
    ),
    *answer_each(
        "torch.accelerator",
        ("current_device_index", "current_device_idx"),
        "as torch.cuda.current_device()",
        devices.current_index,
    ),
    answer_with("torch.accelerator.device_index", "as torch.cuda.device()", devices.Entered),
    answer_with("torch.accelerator.get_device_capability", "types of elements", _capability),
    answer_with("torch.accelerator.current_stream", "the thread's stream", ordering.current_stream),
    answer_with("torch.accelerator.set_stream", "the thread's stream", ordering.set_stream),
    answer_with("torch.accelerator.synchronize", "nothing is under way", devices.synchronize),
    *answer_each("torch.accelerator", ("memory_allocated", "memory_reserved"), memory.PROCESS, memory.allocated_bytes),
    *answer_each(
        "torch.accelerator",
        ("max_memory_allocated", "max_memory_reserved"),
        f"{memory.PROCESS}, at most",
        memory.most_allocated,
    ),
    answer_with(
        "torch.accelerator.memory_stats", f"{memory.PROCESS}, under the allocator's names", memory.memory_statistics
    ),
    answer_with("torch.accelerator.get_memory_info", "this machine's main memory", memory.free_and_total),
    answer_with("torch.accelerator.reset_peak_memory_stats", "the peak of the process counts anew", memory.reset_peak),
    *answer_each(
        "torch.accelerator", ("empty_host_cache", "reset_accumulated_memory_stats"), "nothing to do", do_nothing
    ),
    answer_with(
        "torch.accelerator.empty_cache", "freed memory of the process goes back to the system", memory.empty_cache
    ),
    answer_with("torch.Stream", "a name, as torch.cuda.Stream", ordering.Stream),
    answer_with("torch.Event", "remembers the time, as torch.cuda.Event", AcceleratorEvent),
)
