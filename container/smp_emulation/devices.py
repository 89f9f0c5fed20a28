"""The emulated devices of a process: how many, which is current, what they are called; and what a device argument means here."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from smp_config.machine import emulation
from smp_config.machine.launchers import LOCAL_SIZE_VARIABLES
from smp_emulation.calls import CoveredCall, answer_each, answer_with, do_nothing
from smp_emulation.errors import CudaCallError, make_refusal

CPU = torch.device("cpu")

#: What ``torch.cuda.get_device_name()`` returns.
NAME = "CPU (emulated CUDA device)"

#: That of an A100: what scripts and libraries then choose (bfloat16, TF32) the CPU has, too.
CAPABILITY = (8, 0)

#: Value of ``torch.version.cuda``.
CUDA_VERSION = "12.8"


#: Of the libraries beside it.
NCCL_VERSION = (2, 27, 3)
CUDNN_VERSION = 91002


class _Current(threading.local):
    """A thread's current device, as CUDA has it: every thread begins with the first."""

    index = 0


_current = _Current()
_is_initialized = False


def count() -> int:
    """Return the number of devices: that of the environment, or one for each rank of this host."""
    chosen = emulation.device_count(os.environ)
    if chosen is not None:
        return chosen
    for name in LOCAL_SIZE_VARIABLES:
        text = os.environ.get(name, "")
        number = int(text) if text.isdigit() else 0
        if number > 0:
            return number
    return 1


def current_index() -> int:
    """Return the index of the calling thread's current device."""
    return _current.index


def initialize() -> None:
    """Note that CUDA is in use now."""
    global _is_initialized
    _is_initialized = True


#: Called with the number of a device that the process uses, and with one that ``set_device`` makes the current one.
_use_watcher: Callable[[int, str], None] | None = None
_choice_watcher: Callable[[int], None] | None = None


def watch_use(used: Callable[[int, str], None] | None, chosen: Callable[[int], None] | None) -> None:
    """Set the functions that are called when a device is used, and when one is chosen; None calls none."""
    global _use_watcher, _choice_watcher
    _use_watcher, _choice_watcher = used, chosen


def use_device(index: int, what: str) -> None:
    """Note that the process uses a device."""
    if _use_watcher is not None:
        _use_watcher(index, what)


def require(index: int) -> int:
    """Return ``index`` if the device exists.

    Raises:
        CudaCallError: there is no such device; PyTorch raises the same error on a GPU machine.
    """
    there = count()
    if 0 <= index < there:
        return index
    raise CudaCallError(
        f"CUDA error: invalid device ordinal: device {index} was asked for, and this process sees {there} emulated CUDA "
        f"device{'s' * (there != 1)} (0 to {there - 1}; one for each rank of the host, or "
        f"{emulation.DEVICES_VARIABLE} of them); give each rank its own by its local rank, "
        "as in torch.cuda.set_device(smp.local_rank())"
    )


def index_of(device: Any, optional: bool = True) -> int:
    """Return the index of the device that an argument of ``torch.cuda`` names.

    Args:
        device: a number, ``"cuda:1"``, a ``torch.device``, a ``torch.cuda.device``, or None for the current one.
        optional: whether None is allowed.
    """
    if device is None and optional:
        return current_index()
    if isinstance(device, Entered):
        return require(device.idx)
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        index: int | None = device.index
    elif isinstance(device, int) and not isinstance(device, bool):
        # PyTorch takes any negative number for the current device.
        index = None if device < 0 else device
    else:
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current_index() if index is None else require(index)


def real_device(device: Any) -> Any:
    """Return the real device of a tensor that a script requests on ``device``.

    CUDA devices and bare numbers mean the CPU; other devices are returned unchanged.
    """
    # By exact types, as this runs in every call that makes or moves a tensor.
    kind = type(device)
    if kind is torch.device:
        if device.type != "cuda":
            return device
    elif kind is str:
        if not device.startswith("cuda"):
            return device
        device = torch.device(device)
    elif kind is int:
        # get_device() of a CPU tensor returns -1, and scripts pass it on.
        if device >= 0:
            use_device(require(device), "a tensor")
        return CPU
    else:
        return device
    use_device(current_index() if device.index is None else require(device.index), "a tensor")
    return CPU


def kind_here(kind: Any) -> Any:
    """Return "cpu" for the device type ``cuda``, and other types unchanged."""
    if not isinstance(kind, str) or kind.partition(":")[0] != "cuda":
        return kind
    return "cpu"


def set_device(device: Any) -> None:
    """Make a device the calling thread's current one."""
    initialize()
    index = index_of(device)
    if index >= 0:
        _current.index = index
        if _choice_watcher is not None:
            _choice_watcher(index)


class Entered:
    """The context of ``torch.cuda.device`` and ``device_of``: a device is current inside."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_index()
        if self.idx >= 0:
            _current.index = self.idx

    def __exit__(self, *raised: object) -> None:
        _current.index = self.prev_idx


class _EnteredOf(Entered):
    def __init__(self, obj: Any) -> None:
        super().__init__(None)


def memory_of_the_machine() -> tuple[int, int]:
    """Return the available and total bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024, total
    except (OSError, KeyError):
        return total // 2, total


def device_properties(device: Any = None) -> Any:
    """Return the fields of ``torch.cuda.get_device_properties``."""
    index = index_of(device)
    return SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=memory_of_the_machine()[1],
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=0,
        is_multi_gpu_board=0,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936,
        L2_cache_size=41943040,
        gcnArchName=f"sm_{CAPABILITY[0]}{CAPABILITY[1]}",
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"emulated-{index}"),
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
    )


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    if allow_cpu and isinstance(device, torch.device | str) and torch.device(device).type == "cpu":
        return -1
    return index_of(device, optional=True)


def synchronize(device: Any = None) -> None:
    """Check that the device exists; there is nothing to wait for."""
    use_device(index_of(device), "torch.cuda.synchronize")


def _capability(device: Any = None) -> tuple[int, int]:
    index_of(device)
    return CAPABILITY


def _name(device: Any = None) -> str:
    index_of(device)
    return NAME


def _can_access(device: Any, peer_device: Any) -> bool:
    return index_of(device) != index_of(peer_device)


class _Runtime:
    """The result of ``torch.cuda.cudart()``: the profiler's calls succeed."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815 - CUDA's name

    def __getattr__(self, name: str) -> Any:
        if name in ("cudaProfilerStart", "cudaProfilerStop", "cudaProfilerInitialize"):
            return lambda *args: 0
        if name == "cudaMemGetInfo":
            return lambda device=None: memory_of_the_machine()
        # Python asks for such names itself, and takes this error for a no.
        if name.startswith("__"):
            raise AttributeError(name)
        return make_refusal(f"torch.cuda.cudart().{name}", "it is a call of CUDA's own runtime")


_SENSOR = "0, as no sensor is there"


def _sensor(device: Any = None) -> int:
    index_of(device)
    return 0


_sync_debug_mode = 0


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    global _sync_debug_mode
    _sync_debug_mode = {"default": 0, "warn": 1, "error": 2}[debug_mode] if isinstance(debug_mode, str) else debug_mode


CALLS = (
    answer_with("torch.cuda.is_available", "True", lambda: True),
    answer_with("torch.cuda.device_count", "the ranks of this host", count),
    answer_with("torch.cuda.is_initialized", "whether a call has needed a device", lambda: _is_initialized),
    answer_with("torch.cuda.init", "nothing to initialise", initialize),
    answer_with("torch.cuda._lazy_call", "called at once", lambda callable, **kwargs: callable()),
    answer_with("torch.cuda.set_device", "remembered for the thread, checked against device_count()", set_device),
    answer_with("torch.cuda.current_device", "what set_device() was given", current_index),
    answer_with("torch.cuda.device", "as set_device(), inside a with", Entered),
    answer_with("torch.cuda.device_of", "no change: every tensor lies on the CPU", _EnteredOf),
    answer_with("torch.cuda._utils._get_device_index", "a number", _get_device_index),
    answer_with("torch.cuda._get_device_index", "a number", _get_device_index),
    answer_with("torch.cuda.synchronize", "nothing is under way", synchronize),
    answer_with("torch.cuda.get_device_name", NAME, _name),
    answer_with("torch.cuda.get_device_properties", "an A100's, with this machine's memory", device_properties),
    answer_with("torch.cuda.get_device_capability", "8.0", _capability),
    answer_with("torch.cuda.get_arch_list", "sm_80", lambda: ["sm_80"]),
    answer_with("torch.cuda.get_gencode_flags", "those of sm_80", lambda: "-gencode compute=compute_80,code=sm_80"),
    answer_with("torch.cuda.is_bf16_supported", "True", lambda including_emulation=True: True),
    answer_with("torch.cuda.is_tf32_supported", "True", lambda: True),
    answer_with("torch.cuda.can_device_access_peer", "True for two devices", _can_access),
    answer_with("torch.cuda.cudart", "profiler calls; others are refused", _Runtime),
    answer_with("torch.cuda.check_error", "no error", do_nothing),
    answer_with("torch.cuda.get_sync_debug_mode", "what was set", lambda: _sync_debug_mode),
    answer_with("torch.cuda.set_sync_debug_mode", "remembered, without effect", _set_sync_debug_mode),
    *answer_each(
        "torch.cuda", ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), _SENSOR, _sensor
    ),
    answer_with("torch.cuda.nccl.version", str(NCCL_VERSION), lambda: NCCL_VERSION),
    answer_with("torch.cuda.nccl.is_available", "False, for any tensors", lambda tensors: False),
    answer_with("torch.cuda.is_current_stream_capturing", "False", lambda: False),
    answer_with("torch.backends.cuda.is_built", "True", lambda: True),
    answer_with("torch.backends.cudnn.is_available", "True", lambda: True),
    answer_with("torch.backends.cudnn.version", str(CUDNN_VERSION), lambda: CUDNN_VERSION),
    CoveredCall("torch.version.cuda", f"the build's, else {CUDA_VERSION}", lambda original: original or CUDA_VERSION),
)
