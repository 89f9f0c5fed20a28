"""The machine: its software, its hardware, and the throughput that it reaches."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from gpu_check import environment
from gpu_check.processes import read_output
from gpu_check.results import emit

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    *("torch", "numpy", "triton", "transformers", "accelerate", "mpi4py", "pydantic", "annotated-types", "rich"),
    *("click", "safetensors", "cloudpickle", "pytest", "psutil", "nvidia-ml-py", "nvidia-nccl-cu13", "peft", "trl"),
    "datasets",
)
_GPU_QUERY = (
    "name,driver_version,memory.total,memory.used,compute_mode,mig.mode.current,clocks.sm,clocks.max.sm,power.limit,"
    "pcie.link.gen.current,pcie.link.width.current"
)


def check_env() -> None:
    """Emit versions, the machine's properties, the GPU's, and its throughput."""
    # Imported here, so that the time of the import is measured. Nothing has imported PyTorch before.
    begin = time.monotonic()
    import torch

    imported = time.monotonic() - begin
    from gpu_check.device import is_real

    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    emit(case="versions", python=sys.version.split()[0], import_torch_s=round(imported, 1), **versions)
    _describe_machine()
    if not torch.cuda.is_available():
        emit(case="gpu", ok=environment.is_tiny(), error="torch.cuda.is_available() is False")
        return
    if not is_real():
        return
    _describe_gpu()
    rates = {"bf16_tflops": round(_measure_tflops()), "copy_gbs": round(_measure_copies())}
    emit(case="ceilings", **rates, **_measure_host_memory())


def _describe_machine() -> None:
    interfaces = "/sys/class/net"
    host = socket.gethostname()
    emit(
        case="machine",
        smi=read_output("nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"),
        cpus=os.cpu_count(),
        mpirun=shutil.which("mpirun"),
        mpi_libs=read_output("sh", "-c", "ldconfig -p | grep -i libmpi | head -3"),
        interfaces=sorted(os.listdir(interfaces)) if os.path.isdir(interfaces) else None,
        hostname=host,
        resolves=read_output("getent", "hosts", host),
        shm=read_output("sh", "-c", "df -h /dev/shm /tmp | tail -2"),
        boot_id=read_output("cat", "/proc/sys/kernel/random/boot_id"),
        memory=read_output("sh", "-c", "grep -E 'MemTotal|MemAvailable' /proc/meminfo"),
        memlock=read_output("sh", "-c", "ulimit -l"),
        cgroup=read_output("sh", "-c", "cat /sys/fs/cgroup/memory.max 2>/dev/null"),
    )


def _describe_gpu() -> None:
    import torch

    properties = torch.cuda.get_device_properties(0)
    emit(
        case="gpu",
        name=properties.name,
        uuid=str(getattr(properties, "uuid", None)),
        memory_gib=round(properties.total_memory / 2**30, 1),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        cudnn=torch.backends.cudnn.version(),
        nccl_available=torch.distributed.is_nccl_available(),
        gloo_available=torch.distributed.is_gloo_available(),
        utilization=read_output(sys.executable, "-c", "import torch; print(torch.cuda.utilization(0))"),
    )


def _time_on_gpu(run: Any, many: int) -> float:
    """Return the seconds that the GPU needs for one of ``many`` runs."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(many):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3 / many


def _measure_tflops() -> float:
    """Return the TFLOP/s of a large matrix product in bf16."""
    import torch

    side = 64 if environment.is_tiny() else 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * side**3 / _time_on_gpu(lambda: a @ b, 20) / 1e12


def _make_block(divisor: int = 1, **options: Any) -> torch.Tensor:
    """Return memory of 2 GiB, divided by ``divisor``."""
    import torch

    size = 2**16 if environment.is_tiny() else 2**31
    return torch.empty(size // divisor, dtype=torch.uint8, **options)


def _measure_copies() -> float:
    """Return the GB/s that the GPU's memory reads and writes together."""
    source, target = _make_block(device="cuda"), _make_block(device="cuda")
    target.copy_(source)
    return 2 * source.nbytes / _time_on_gpu(lambda: target.copy_(source), 10) / 1e9


def _measure_host_memory() -> dict[str, float]:
    """Return the GB/s of copies to pinned host memory and back, and the seconds that pinning takes."""
    pinned, on_gpu = _make_block(4, pin_memory=True), _make_block(4, device="cuda")
    rates = {}
    for word, target, source in (("to_host", pinned, on_gpu), ("from_host", on_gpu, pinned)):
        target.copy_(source, non_blocking=True)
        seconds = _time_on_gpu(lambda target=target, source=source: target.copy_(source, non_blocking=True), 5)
        rates[f"{word}_gbs"] = round(source.nbytes / seconds / 1e9, 1)
    import torch

    begin = time.perf_counter()
    # One byte more than 1 GiB: the host allocator rounds up to a power of two.
    torch.empty(_make_block().nbytes // 2 + 1, dtype=torch.uint8, pin_memory=True)
    rates["pin_2gib_s"] = round(time.perf_counter() - begin, 3)
    return rates
