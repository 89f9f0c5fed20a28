"""Which device a rank computes on, and which backend its collectives use."""

from __future__ import annotations

import os

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


def choose_backend(parameters: ModelParallelParameters, device: torch.device, hosts: int) -> str:
    """The backend string of ``init_process_group`` for ``ddp_dist_backend``.

    CPU tensors always go over gloo, so that object collectives work beside NCCL.

    Args:
        hosts: of the job.

    Raises:
        SMPUserError: NCCL was asked for on a machine without CUDA.
    """
    requested = parameters.ddp_dist_backend
    if requested == "nccl" and device.type != "cuda":
        raise SMPUserError(
            'ddp_dist_backend is "nccl", but this process has no CUDA device; use "auto" or "gloo" on CPU instances'
        )
    if smddp.is_chosen(parameters, os.environ.get("SM_CURRENT_INSTANCE_TYPE"), hosts):
        return smddp.BACKEND
    if requested == "gloo" or device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated device memory on GPU, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
