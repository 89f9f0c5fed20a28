"""The data parallel library's first interface, on top of ``torch.distributed``.

Scripts import it as ``import smdistributed.dataparallel.torch.distributed as dist``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as _TorchDistributedDataParallel

from smp_config.machine.launchers import LOCAL_RANK_VARIABLES
from smp_runtime.errors import SMPUserError
from smp_runtime.smddp.registration import BACKEND, register

#: Variables in which launchers pass the local rank.
_LOCAL_RANK_VARIABLES = ("SMDATAPARALLEL_LOCAL_RANK", *LOCAL_RANK_VARIABLES)


def is_available() -> bool:
    """Return whether this PyTorch has ``torch.distributed``."""
    return dist.is_available()


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """Join the job with the backend ``smddp``; a second call changes nothing.

    Args:
        *args: as for ``torch.distributed.init_process_group``; none are needed in a job that the launcher started.
    """
    register()
    if not dist.is_initialized():
        if not args:
            kwargs.setdefault("backend", BACKEND)
        dist.init_process_group(*args, **kwargs)


def get_local_rank() -> int:
    """Return this rank's number among those of its host.

    Raises:
        SMPUserError: the process was not started as a rank.
    """
    for name in _LOCAL_RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise SMPUserError(
        f"this process does not know its local rank: none of {', '.join(_LOCAL_RANK_VARIABLES)} is set, as the launcher of "
        'the job does for every rank; start the script with distribution={"smdistributed": {"dataparallel": '
        '{"enabled": True}}}, or set LOCAL_RANK to its number on the host, from 0',
        code="SMP316",
    )


def broadcast(
    tensor: torch.Tensor, src: int = 0, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Call ``torch.distributed.broadcast``, from rank 0 unless another is named."""
    return dist.broadcast(tensor, src, group, async_op)


def all_to_all_single(
    output_t: torch.Tensor,
    input_t: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Call ``torch.distributed.all_to_all_single`` with its former argument names."""
    return dist.all_to_all_single(output_t, input_t, output_split_sizes, input_split_sizes, group, async_op)


class DistributedDataParallel(_TorchDistributedDataParallel):
    """PyTorch's class with this library's arguments; the default process group is joined if it was not.

    Args:
        module: its gradients are averaged; on CUDA if there is a device, else on the CPU.
        device_ids: the module's one CUDA device; without meaning for a module on the CPU.
        output_device: of the outputs, the same device.
        broadcast_buffers: copy buffers from the first rank at every forward pass.
        process_group: the ranks that train together; all by default.
        bucket_cap_mb: most MB of gradients that travel together.
        **more: as for PyTorch's class.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        **more: Any,
    ) -> None:
        init_process_group()
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            **more,
        )
