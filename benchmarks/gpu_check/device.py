"""The device on which checks compute: the GPU, emulated devices, or the CPU."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import smdistributed.modelparallel.torch as smp
from gpu_check import environment

GIB = 2**30


def get_device() -> torch.device:
    """Return the device of models and batches."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_real() -> bool:
    """Return whether there is a GPU, and no emulation in its place."""
    return torch.cuda.is_available() and not environment.is_emulated()


def fuse_on_gpu() -> bool | None:
    """Return the argument ``fused`` of an optimizer that uses PyTorch's fused kernels on a GPU."""
    return is_real() or None


def synchronize() -> None:
    """Block until the GPU has done all that is queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if is_real():
        torch.cuda.empty_cache()


def shut_down() -> None:
    """Leave the session, so that the next case can start one."""
    smp.shutdown()
    free_memory()


def use_exact_attention() -> contextlib.AbstractContextManager[None]:
    """Use the same attention kernel on all sides of a comparison. Its backward pass has a fixed order."""
    return sdpa_kernel([SDPBackend.MATH])


def time_run(run: Callable[[], object]) -> float:
    """Return the seconds of one run, until the GPU has done its work."""
    begin = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - begin


def measure_peak(make: Callable[[], Callable[[], object]]) -> tuple[int, int] | None:
    """Return the peak memory of a step.

    Args:
        make: creates the step, with its model and optimizer. The third step is measured.

    Returns:
        The peaks of allocated and reserved memory, in bytes; None without a GPU, which runs one step only.
    """
    free_memory()
    if not is_real():
        run = make()
        run()
        return None
    before = torch.cuda.memory_allocated()
    run = make()
    run()
    run()
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize()
    peak = (torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved())
    del run
    free_memory()
    return peak


def describe_peak(peak: tuple[int, int] | None) -> dict[str, float]:
    """Return a result of :func:`measure_peak` in GiB; empty for None."""
    if peak is None:
        return {}
    return {"peak_gib": round(peak[0] / GIB, 2), "reserved_gib": round(peak[1] / GIB, 2)}
