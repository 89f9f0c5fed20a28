"""``torch.accelerator``, PyTorch's names for whichever device there is: the emulated CUDA devices."""

from __future__ import annotations

from typing import Any

import torch

from smp_emulation import devices
from smp_emulation.calls import instead, nothing
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
    return memory.allocated(device_index)


CALLS = (
    instead("torch.accelerator.is_available", "True", lambda: True),
    instead("torch.accelerator.current_accelerator", "cuda", lambda check_available=False: CUDA),
    instead("torch.accelerator.device_count", "the ranks of this host", devices.count),
    *(
        instead(f"torch.accelerator.{name}", "as torch.cuda.set_device()", devices.set_device)
        for name in ("set_device_index", "set_device_idx")
    ),
    *(
        instead(f"torch.accelerator.{name}", "as torch.cuda.current_device()", devices.current)
        for name in ("current_device_index", "current_device_idx")
    ),
    instead("torch.accelerator.device_index", "as torch.cuda.device()", devices.Entered),
    instead("torch.accelerator.get_device_capability", "types of elements", _capability),
    instead("torch.accelerator.current_stream", "the thread's stream", ordering.current_stream),
    instead("torch.accelerator.set_stream", "the thread's stream", ordering.set_stream),
    instead("torch.accelerator.synchronize", "nothing is under way", devices.synchronize),
    *(
        instead(f"torch.accelerator.{name}", memory.PROCESS, memory.allocated)
        for name in ("memory_allocated", "memory_reserved")
    ),
    *(
        instead(f"torch.accelerator.{name}", f"{memory.PROCESS}, at most", memory.most_allocated)
        for name in ("max_memory_allocated", "max_memory_reserved")
    ),
    instead("torch.accelerator.memory_stats", f"{memory.PROCESS}, under the allocator's names", memory.statistics),
    instead("torch.accelerator.get_memory_info", "this machine's main memory", memory.free_and_total),
    instead("torch.accelerator.reset_peak_memory_stats", "the peak of the process counts anew", memory.reset_peak),
    *(
        instead(f"torch.accelerator.{name}", "nothing to do", nothing)
        for name in ("empty_host_cache", "reset_accumulated_memory_stats")
    ),
    instead("torch.accelerator.empty_cache", "freed memory of the process goes back to the system", memory.empty_cache),
    instead("torch.Stream", "a name, as torch.cuda.Stream", ordering.Stream),
    instead("torch.Event", "remembers the time, as torch.cuda.Event", AcceleratorEvent),
)
