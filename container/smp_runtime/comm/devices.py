"""Choice of a rank's device, and of the backend for its collectives.

Ranks exchange the GPUs that they see, so that ranks of one machine use different ones. This also holds if one
machine simulates several hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import smp_emulation
from smp_config.machine import collective_backends, device_files, shared_gpu
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import tensors_in

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters

#: Differs between machines, and is the same in all containers of one.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: First NCCL that takes several ranks on one GPU, if a variable allows it.
_FIRST_WITH_SHARED_GPUS = (2, 30)
_NCCL_LIBRARY = "libnccl.so.2"

#: Variables with which each rank counts as a host of its own: NCCL looks for ranks of one GPU among those of one host only.
#: Ranks then send through sockets; the ways inside a host are off, since the ranks would still find them.
_HOST_PER_RANK = {
    "NCCL_HOSTID": "smp-{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
#: Variables with which NCCL takes several ranks on one GPU.
_RANKS_PER_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_MAX_CTAS": "4",  # the kernels of more than two ranks would not fit on the GPU together
}


def has_gpu() -> bool:
    """Return whether this process computes on real CUDA devices.

    Emulated ones do not count, whatever PyTorch reports to the script.
    """
    return torch.cuda.is_available() and not smp_emulation.is_active()


def visible_gpus() -> list[str]:
    """Return the name of each CUDA device that this process sees, by local number; empty without CUDA.

    All processes have the same name for a device.
    """
    if not has_gpu():
        return []
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = []
    for number in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
        own = listed[number] if number < len(listed) else str(number)
        found.append(str(uuid) if uuid is not None else f"{_machine()}/{own}")
    return found


def refuse_unusable_gpus(environ: Mapping[str, str]) -> None:
    """Check that PyTorch can use this host's GPUs, since the job would train on the CPU without a word otherwise.

    Raises:
        SMPUserError: it cannot, and neither an emulation nor ``CUDA_VISIBLE_DEVICES`` asks for the CPU.
    """
    if torch.cuda.is_available() or smp_emulation.is_active():
        return
    files = device_files.nvidia_devices()
    if not device_files.count_visible(len(files), environ):
        return
    if torch.version.cuda is None:
        why = "is a build without CUDA; install PyTorch's build for the CUDA version of this driver"
    else:
        why = f"is built for CUDA {torch.version.cuda} and {_why_no_cuda()}; see what nvidia-smi reports, and update the driver"
    raise SMPUserError(
        f"this host has {len(files)} GPU{'s' * (len(files) != 1)} ({files[0]}{' …' * (len(files) > 1)}), but PyTorch "
        f"{torch.__version__} {why}; or set {device_files.VISIBLE_VARIABLE}= (empty) to train on the CPU",
        code="SMP311",
    )


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"cannot start it ({str(error).partition(chr(10))[0]})"
    return "finds no device"


def _machine() -> str:
    """Return an identifier of this machine, for GPUs without a UUID."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def assign_gpus(visible: Sequence[Sequence[str]]) -> list[int | None]:
    """Assign each rank one of the CUDA devices that it sees: the one with the fewest ranks so far.

    Args:
        visible: by rank, the result of :func:`visible_gpus` there.

    Returns:
        By rank, a local device number; None if the rank sees no device.
    """
    taken: dict[str, int] = {}
    chosen: list[int | None] = [None] * len(visible)
    # First those with the least choice, or one that sees all could take the only GPU of another.
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):
        if gpus := visible[rank]:
            number = min(range(len(gpus)), key=lambda number: taken.get(gpus[number], 0))
            taken[gpus[number]] = taken.get(gpus[number], 0) + 1
            chosen[rank] = number
    return chosen


def sharing_ranks(visible: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the ranks of each GPU that :func:`assign_gpus` assigns to several ranks, in order."""
    ranks_of: dict[str, list[int]] = {}
    for rank, number in enumerate(assign_gpus(visible)):
        if number is not None:
            gpu = visible[rank][number]
            ranks_of.setdefault(gpu, []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def use_device(number: int | None) -> torch.device:
    """Make the CUDA device of that number the current one, and return it; return the CPU for None."""
    if number is None:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def device_thread(target: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """Return a thread, not started yet, in which ``device`` is the current CUDA device.

    The current device of a new thread is the host's first one. A call of CUDA there would create a context on it, which
    takes memory that the rank of that device misses. The thread is a daemon: the end of the process does not wait for it.
    """

    def run() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        target()

    # A daemon: a thread in a collective that never ends must not keep the process alive.
    return threading.Thread(target=run, name=name, daemon=True)


def choose_backend(
    parameters: ModelParallelParameters,
    device: torch.device,
    hosts: int,
    instance_type: str | None,
    visible: Sequence[Sequence[str]] = (),
    shared: str = shared_gpu.GLOO,
) -> str:
    """Return the backend string for ``init_process_group``, as requested by ``ddp_dist_backend``.

    CPU tensors always use gloo, so that object collectives work beside NCCL. NCCL does not allow two ranks on one
    GPU. If ranks share a GPU, all tensors use gloo, unless ``shared`` is ``"nccl"``.

    Args:
        instance_type: of all hosts; None if they differ or it is unknown. It must be the same on all ranks.
        visible: by rank, the result of :func:`visible_gpus` there.
        shared: backend of ranks that share a GPU, the same on all ranks.

    Raises:
        SMPUserError: NCCL was requested without CUDA, or although ranks share a GPU.
    """
    requested = parameters.ddp_dist_backend
    if collective_backends.needs_gpu(requested) and device.type != "cuda":
        raise SMPUserError(
            f'ddp_dist_backend is "{requested}", but this process has no CUDA device; use "auto" or "gloo" on CPU instances',
            code="SMP311",
        )
    takes_one_rank = device.type == "cuda" and collective_backends.traits_on_gpus(requested).takes_one_rank_per_gpu
    sharing = sharing_ranks(visible) if takes_one_rank and shared == shared_gpu.GLOO else None
    if sharing:
        if requested != collective_backends.AUTOMATIC:
            raise SMPUserError(
                f'ddp_dist_backend is "{requested}", which takes one rank per GPU, but {_crowd(visible, sharing)}; start at '
                'most one process per GPU, or set ddp_dist_backend to "auto" or "gloo" '
                f"({shared_gpu.VARIABLE}={shared_gpu.NCCL} allows it for tests)",
                code="SMP311",
            )
        return collective_backends.HOST_BACKEND
    chosen = collective_backends.chosen_backend(parameters, hosts, instance_type)
    return collective_backends.group_backend(chosen, device.type)


def choose_host_collectives(
    parameters: ModelParallelParameters, device: torch.device, backend: str, *, process_mode: bool
) -> bool:
    """Return whether ranks of one host reduce and gather through shared memory, by ``host_collectives``.

    Args:
        backend: the result of :func:`choose_backend`.
        process_mode: the value of all ranks, since the result must be the same on all of them.

    Raises:
        SMPUserError: it was requested on a GPU.
    """
    on_cpus = device.type == "cpu" and backend == collective_backends.HOST_BACKEND
    if parameters.host_collectives is None:
        return process_mode and on_cpus
    if parameters.host_collectives and not on_cpus:
        raise SMPUserError(
            f"host_collectives is true, but this rank computes on {device} with the collectives of {backend}; ranks share "
            "host memory in jobs on CPUs: remove host_collectives",
            code="SMP311",
        )
    return parameters.host_collectives


def sharing_warning(
    parameters: ModelParallelParameters,
    device: torch.device,
    visible: Sequence[Sequence[str]],
    shared: str = shared_gpu.GLOO,
) -> str | None:
    """Return a warning that exchanges are slow because ranks share GPUs, or None if that is not so or was requested."""
    traits = collective_backends.traits_on_gpus(parameters.ddp_dist_backend)
    if device.type != "cuda" or not traits.takes_one_rank_per_gpu:
        return None
    sharing = sharing_ranks(visible)
    if not sharing:
        return None
    if shared == shared_gpu.NCCL:
        return (
            f"{_crowd(visible, sharing)}, and {shared_gpu.VARIABLE} is {shared_gpu.NCCL}: NCCL uses slow ways between them, which "
            "are for tests; start at most one process per GPU to train"
        )
    return (
        f"{_crowd(visible, sharing)}: NCCL takes one rank per GPU, so all tensors between ranks go through host memory and gloo, "
        'which is slow; start at most one process per GPU, or silence this with ddp_dist_backend="gloo"'
    )


def let_nccl_share(rank: int, machines: Sequence[str]) -> None:
    """Let NCCL take ranks that share a GPU; all ranks call it, before the first of them starts NCCL.

    Args:
        machines: by rank, the identifier of its machine.

    Raises:
        SMPUserError: the ranks are on several machines.
    """
    if len(set(machines)) > 1 or not all(machines):
        raise SMPUserError(
            f"{shared_gpu.VARIABLE} is {shared_gpu.NCCL}, but the {len(machines)} ranks are on {len(set(machines))} machines or "
            "containers with networks of their own; with it ranks reach each other over the loopback interface only: unset it, "
            "or start all ranks on one machine",
            code="SMP311",
        )
    os.environ.update(nccl_sharing_variables(rank, nccl_version()))


def nccl_sharing_variables(rank: int, version: tuple[int, ...]) -> dict[str, str]:
    """Return the variables with which an NCCL of that version takes ranks that share a GPU."""
    if version >= _FIRST_WITH_SHARED_GPUS:
        return dict(_RANKS_PER_GPU)
    return {name: value.replace("{rank}", str(rank)) for name, value in _HOST_PER_RANK.items()}


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that this process has loaded, or (0, 0) without one.

    ``torch.cuda.nccl.version()`` returns the one that PyTorch was built with; another may have been preloaded.
    """
    try:
        library = ctypes.CDLL(_NCCL_LIBRARY, mode=os.RTLD_NOLOAD)
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return number.value // 10_000, number.value // 100 % 100, number.value % 100
    except (OSError, AttributeError):  # not loaded, or part of PyTorch's own library
        pass
    try:
        return tuple(torch.cuda.nccl.version())
    except AttributeError:  # a PyTorch without CUDA
        return 0, 0


def _crowd(visible: Sequence[Sequence[str]], sharing: Sequence[Sequence[int]]) -> str:
    ranks = sum(1 for gpus in visible if gpus)
    gpus = len(set().union(*visible))
    plural = "" if gpus == 1 else "s"
    return f"ranks {', '.join(map(str, sharing[0]))} share a GPU ({ranks} ranks see {gpus} GPU{plural} in all)"


def plain_backend(device: torch.device) -> str:
    """Return the backend string of a group that does not use this library's own collectives."""
    return collective_backends.group_backend(collective_backends.AUTOMATIC, device.type)


def channel_backend(device: torch.device, backend: str) -> str | None:
    """Return the backend that sends tensors of ``device`` between stages, or None to use host memory.

    Args:
        backend: the backend of the job's groups. gloo cannot send GPU tensors between ranks.
    """
    traits = collective_backends.traits_of_group(backend, device.type)
    if device.type != "cuda" or traits is None:
        return None
    return traits.for_gpus if traits.for_gpus != collective_backends.HOST_BACKEND else None


@contextlib.contextmanager
def in_order_with_script(device: torch.device) -> Iterator[None]:
    """Run the block on the default stream of ``device``, in order with the script's stream.

    Work in the block runs after the work that the script has queued on its stream, and before the work that it queues there
    afterwards. Other threads compute on the default stream anyway. Inside, this thread does too, since it sends their
    results.
    """
    if device.type != "cuda":
        yield
        return
    script, compute = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if script == compute:
        yield
        return
    # The script's stream may still write the arguments, and reads the results behind the block.
    compute.wait_stream(script)
    with torch.cuda.stream(compute):
        yield
    script.wait_stream(compute)


def keep_for_script(results: Any, device: torch.device) -> None:
    """Keep tensors of other streams from being freed while the script's stream may still read them."""
    if device.type != "cuda":
        return
    script = torch.cuda.current_stream(device)
    if script == torch.cuda.default_stream(device):
        return
    # Freed memory is given out again in the order of the stream that it is of, and the script's stream may be behind.
    for tensor in tensors_in(results):
        if type(tensor) is torch.Tensor and tensor.device == device:
            tensor.record_stream(script)


def release_cached_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to ``device``, also what only reference cycles hold."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated device memory on GPU, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
