"""Communication between processes: gloo stands in for NCCL, and modules with a GPU argument stay on the CPU."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from types import SimpleNamespace
from typing import Any

import torch

from smp_config.machine.launchers import is_first_rank
from smp_emulation.calls import CoveredCall, answer_with
from smp_emulation.devices import kind_here, real_device

logger = logging.getLogger("smp_emulation")


def backend_here(backend: Any) -> Any:
    """Return the CPU backend that stands in for the backend that a GPU script names."""
    if not isinstance(backend, str):
        return backend
    is_of_gpus = False
    kept = []
    for entry in backend.lower().split(","):
        kind, _, name = entry.rpartition(":")
        if name == "nccl" or kind == "cuda":
            is_of_gpus = True
        elif kind:
            kept.append(entry)
    if not is_of_gpus:
        return backend
    return ",".join(kept) or "gloo"


def _init_process_group(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        used = backend_here(backend)
        if used != backend:
            # These are NCCL's.
            kwargs.pop("pg_options", None)
            if is_first_rank(os.environ):
                logger.warning(
                    "init_process_group(%r): no GPU here, so the collectives of all ranks go over %s (SMP_EMULATE_CUDA=1)",
                    backend,
                    used,
                )
        device = kwargs.pop("device_id", None)
        if isinstance(device, torch.device) and device.type != "cuda":
            kwargs["device_id"] = device
        elif device is not None:
            real_device(device)  # a number that is not there is an error on a GPU machine, too
        return original(used, *args, **kwargs)

    return init_process_group


class _NcclOptions:
    """The arguments of ``ProcessGroupNCCL.Options``, which have no effect here."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


def _nccl_group(original: Any) -> Any:
    return original or type("ProcessGroupNCCL", (), {"Options": _NcclOptions})


def _with_backend(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(*args, **kwargs)
        given = bound.arguments
        if (used := backend_here(given.get("backend"))) != given.get("backend"):
            given["backend"] = used
            given.pop("pg_options", None)
        if given.get("device_id") is not None:
            given.pop("device_id")
        return original(*bound.args, **bound.kwargs)

    return call


def _with_device(original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = real_device(kwargs["device"])
        return original(*[real_device(each) if isinstance(each, torch.device) else each for each in args], **kwargs)

    return call


def _barrier(original: Any) -> Any:
    @functools.wraps(original)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        # gloo refuses device_ids.
        return original(group, async_op)

    return barrier


def _init_device_mesh(original: Any) -> Any:
    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(kind_here(device_type), *args, **kwargs)

    return init_device_mesh


def _device_mesh(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, kind_here(device_type), *args, **kwargs)

    return init


def _ddp(original: Any) -> Any:
    @functools.wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        devices = list(device_ids or ())
        if output_device is not None:
            devices.append(output_device)
        for device in devices:
            real_device(device)
        # DistributedDataParallel takes no device_ids for a module on the CPU.
        original(self, module, None, None, *args, **kwargs)

    return init


def _data_parallel(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        for device in device_ids or ():
            real_device(device)
        torch.nn.Module.__init__(self)
        self.module, self.dim, self.device_ids, self.output_device = module, dim, [], output_device

    return init


def _copies(tensor: torch.Tensor, devices: Any = None, *, out: Any = None) -> tuple[torch.Tensor, ...]:
    if out is not None:
        return tuple(each.copy_(tensor) for each in out)
    return tuple(tensor.clone() for _ in devices)


def _copies_of_all(tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[torch.Tensor]]:
    copies = []
    for _ in devices:
        copies.append([tensor.clone() for tensor in tensors])
    return copies


def _sum(inputs: Any, destination: Any = None) -> torch.Tensor:
    return torch.stack(tuple(inputs)).sum(0)


def _sums(inputs: Any, destination: Any = None, buffer_size: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(_sum(each) for each in zip(*inputs, strict=True))


def _parts(
    tensor: torch.Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Any = None,
) -> tuple[torch.Tensor, ...]:
    if out is not None:
        chunk_sizes = [each.size(dim) for each in out]
    parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes is not None else tensor.chunk(len(devices), dim)
    if out is not None:
        return tuple(each.copy_(part) for each, part in zip(out, parts, strict=True))
    return tuple(part.clone() for part in parts)


def _together(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
    return torch.cat(tuple(tensors), dim) if out is None else torch.cat(tuple(tensors), dim, out=out)


CALLS = (
    answer_with("torch.cuda.comm.broadcast", "copies", _copies),
    answer_with("torch.cuda.comm.broadcast_coalesced", "copies", _copies_of_all),
    answer_with("torch.cuda.comm.reduce_add", "a sum", _sum),
    answer_with("torch.cuda.comm.reduce_add_coalesced", "sums", _sums),
    answer_with("torch.cuda.comm.scatter", "copies of parts", _parts),
    answer_with("torch.cuda.comm.gather", "one tensor", _together),
    CoveredCall("torch.distributed.init_process_group", "gloo for NCCL, with a line in the log", _init_process_group),
    CoveredCall("torch.distributed.ProcessGroupNCCL", "has Options, which are not read", _nccl_group, is_new=True),
    CoveredCall("torch.distributed.new_group", "gloo for NCCL", _with_backend),
    CoveredCall("torch.distributed.barrier", "without device_ids", _barrier),
    *(
        CoveredCall(f"torch.distributed.{name}", "the CPU for a CUDA device", _with_device)
        for name in ("broadcast_object_list", "send_object_list", "recv_object_list")
    ),
    answer_with("torch.distributed.is_nccl_available", "True", lambda: True),
    CoveredCall("torch.distributed.init_device_mesh", "a mesh of CPUs", _init_device_mesh),
    CoveredCall("torch.distributed.DeviceMesh.__init__", "a mesh of CPUs", _device_mesh),
    CoveredCall("torch.nn.parallel.DistributedDataParallel.__init__", "without device_ids", _ddp),
    CoveredCall("torch.nn.DataParallel.__init__", "calls its module", _data_parallel),
)
