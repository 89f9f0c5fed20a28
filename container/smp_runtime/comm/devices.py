"""Which device a rank computes on, and which backend its collectives use.

Ranks tell each other which GPUs they see, so that those of one machine take different ones, however many hosts the
machine stands for.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import smp_emulation
from smp_config import smddp
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import tensors_in

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters

#: Differs between machines, and is the same in all containers of one.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def has_gpu() -> bool:
    """Whether this process computes on CUDA devices: on real ones, whatever PyTorch says to a script."""
    return torch.cuda.is_available() and not smp_emulation.is_active()


def visible_gpus() -> list[str]:
    """What each CUDA device that this process sees is called everywhere, by its number here; empty without CUDA."""
    if not has_gpu():
        return []
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    found = []
    for number in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
        own = listed[number] if number < len(listed) else str(number)
        found.append(str(uuid) if uuid is not None else f"{_machine()}/{own}")
    return found


def _machine() -> str:
    """The machine that this process runs on, for GPUs without an identity of their own."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def assign_gpus(visible: Sequence[Sequence[str]]) -> list[int | None]:
    """Which of the CUDA devices that it sees each rank computes on: the one with the fewest ranks so far.

    Args:
        visible: by rank, what :func:`visible_gpus` gave there.

    Returns:
        By rank, a number among its own devices; None where it sees none.
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
    """The ranks of each GPU that :func:`assign_gpus` gives to several, in order."""
    ranks_of: dict[str, list[int]] = {}
    for rank, number in enumerate(assign_gpus(visible)):
        if number is not None:
            ranks_of.setdefault(visible[rank][number], []).append(rank)
    return [ranks for ranks in ranks_of.values() if len(ranks) > 1]


def use_device(number: int | None) -> torch.device:
    """The CUDA device of that number, which becomes the current one; the CPU for None."""
    if number is None:
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def choose_backend(
    parameters: ModelParallelParameters,
    device: torch.device,
    hosts: int,
    instance_type: str | None,
    visible: Sequence[Sequence[str]] = (),
) -> str:
    """The backend string of ``init_process_group`` for ``ddp_dist_backend``.

    CPU tensors always go over gloo, so that object collectives work beside NCCL. NCCL refuses two ranks on one GPU: where
    ranks share one, all tensors go over gloo.

    Args:
        instance_type: of all hosts; None where they differ or nobody knows. All ranks must give the same.
        visible: by rank, what :func:`visible_gpus` gave there.

    Raises:
        SMPUserError: NCCL was asked for on a machine without CUDA, or where ranks share a GPU.
    """
    requested = parameters.ddp_dist_backend
    if requested == "nccl" and device.type != "cuda":
        raise SMPUserError(
            'ddp_dist_backend is "nccl", but this process has no CUDA device; use "auto" or "gloo" on CPU instances'
        )
    if device.type == "cuda" and requested != "gloo" and (sharing := sharing_ranks(visible)):
        if requested != "auto":
            raise SMPUserError(
                f'ddp_dist_backend is "{requested}", which takes one rank per GPU, but {_crowd(visible, sharing)}; start at '
                'most one process per GPU, or set ddp_dist_backend to "auto" or "gloo"'
            )
        return "gloo"
    if smddp.is_chosen(parameters, instance_type, hosts):
        return smddp.BACKEND
    return "gloo" if requested == "gloo" else plain_backend(device)


def choose_host_collectives(
    parameters: ModelParallelParameters, device: torch.device, backend: str, *, process_mode: bool
) -> bool:
    """Whether ranks of one host are to reduce and gather through memory that they share, for ``host_collectives``.

    Args:
        backend: of :func:`choose_backend`.
        process_mode: of all ranks, which must get the same answer.

    Raises:
        SMPUserError: it was asked for on a GPU.
    """
    on_cpus = device.type == "cpu" and backend == "gloo"
    if parameters.host_collectives is None:
        return process_mode and on_cpus
    if parameters.host_collectives and not on_cpus:
        raise SMPUserError(
            f"host_collectives is true, but this rank computes on {device} with the collectives of {backend}; ranks share "
            "host memory in jobs on CPUs: remove host_collectives"
        )
    return parameters.host_collectives


def sharing_warning(
    parameters: ModelParallelParameters, device: torch.device, visible: Sequence[Sequence[str]]
) -> str | None:
    """What to say where NCCL would have been used if ranks did not share GPUs; None where it is not so."""
    if device.type != "cuda" or parameters.ddp_dist_backend != "auto" or not (sharing := sharing_ranks(visible)):
        return None
    return (
        f"{_crowd(visible, sharing)}: NCCL takes one rank per GPU, so all tensors between ranks go through host memory and gloo, "
        'which is slow; start at most one process per GPU, or silence this with ddp_dist_backend="gloo"'
    )


def _crowd(visible: Sequence[Sequence[str]], sharing: Sequence[Sequence[int]]) -> str:
    ranks = sum(1 for gpus in visible if gpus)
    gpus = len({gpu for seen in visible for gpu in seen})
    return (
        f"ranks {', '.join(map(str, sharing[0]))} share a GPU ({ranks} ranks see {gpus} GPU{'s' * (gpus != 1)} in all)"
    )


def plain_backend(device: torch.device) -> str:
    """The backend string of a group without collectives of this library's own."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def channel_backend(device: torch.device, backend: str) -> str | None:
    """What takes tensors of ``device`` from stage to stage; None if they go through host memory.

    Args:
        backend: of the job's groups. gloo sends no tensors of a GPU from rank to rank.
    """
    return "nccl" if device.type == "cuda" and backend != "gloo" else None


@contextlib.contextmanager
def in_order_with_script(device: torch.device) -> Iterator[None]:
    """Put work that is queued on the default stream of ``device`` in its place among the script's own.

    It comes behind what the script has queued on its stream, and before what it queues there afterwards. Other threads
    compute on the default stream anyway; inside, this one does so too, since it sends what they have computed.
    """
    if device.type != "cuda":
        yield
        return
    script, compute = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if script == compute:
        yield
        return
    compute.wait_stream(script)
    with torch.cuda.stream(compute):
        yield
    script.wait_stream(compute)


def keep_for_script(results: Any, device: torch.device) -> None:
    """Let nobody have the memory of tensors of other streams while the script's stream may still read them."""
    if device.type != "cuda":
        return
    script = torch.cuda.current_stream(device)
    if script != torch.cuda.default_stream(device):
        for tensor in tensors_in(results):
            if type(tensor) is torch.Tensor and tensor.device == device:
                tensor.record_stream(script)


def release_cached_memory(device: torch.device) -> None:
    """Give memory that nothing uses any more back to ``device``, also what only reference cycles hold."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated device memory on GPU, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
