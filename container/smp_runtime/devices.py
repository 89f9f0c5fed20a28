"""Which device a rank computes on, and which backend its collectives use."""

from __future__ import annotations

import torch

from smp_config import ModelParallelParameters, smddp
from smp_runtime.errors import SMPUserError


def choose_device(local_rank: int) -> torch.device:
    """CUDA device ``local_rank`` where there is one, else the CPU; also makes it the current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_backend(
    parameters: ModelParallelParameters, device: torch.device, hosts: int, instance_type: str | None
) -> str:
    """The backend string of ``init_process_group`` for ``ddp_dist_backend``.

    CPU tensors always go over gloo, so that object collectives work beside NCCL.

    Args:
        hosts: of the job.
        instance_type: of all hosts; None where they differ or nobody knows. All ranks must give the same.

    Raises:
        SMPUserError: NCCL was asked for on a machine without CUDA.
    """
    requested = parameters.ddp_dist_backend
    if requested == "nccl" and device.type != "cuda":
        raise SMPUserError(
            'ddp_dist_backend is "nccl", but this process has no CUDA device; use "auto" or "gloo" on CPU instances'
        )
    if smddp.is_chosen(parameters, instance_type, hosts):
        return smddp.BACKEND
    return "gloo" if requested == "gloo" else plain_backend(device)


def plain_backend(device: torch.device) -> str:
    """The backend string of a group without collectives of this library's own."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated device memory on GPU, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
