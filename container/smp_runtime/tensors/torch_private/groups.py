"""What PyTorch keeps private of process groups and of the store that they have met through."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp_runtime.tensors.torch_private.lookup import find_private

#: The store through which the ranks of the default group have met.
default_store: Callable[[], dist.Store] = find_private(
    "agrees on checkpoints that are written in the background, and meets ranks of groups that a script has started",
    "distributed.distributed_c10d._get_default_store",
)

#: End collectives that are under way, and all groups; no rank need take part. PyTorch has it since 2.6.
abort_process_groups: Callable[[], None] = find_private(
    "leaves collectives that other ranks do not come to", "distributed.distributed_c10d._abort_process_group"
)

#: ``(group, output, input[, options])``: an all-gather into one tensor; its name changed in PyTorch 2.13.
all_gather_single: Any = find_private(
    "gathers shards", "distributed.ProcessGroup.all_gather_single", "distributed.ProcessGroup._allgather_base"
)

#: ``(group, outputs, inputs[, options])``: several of these at once.
all_gather_single_coalesced: Any = find_private(
    "gathers several shards at once",
    "distributed.ProcessGroup.all_gather_single_coalesced",
    "distributed.ProcessGroup.allgather_into_tensor_coalesced",
)

_set_default_backend: Callable[[Any, Any], None] = find_private(
    'serves the backend "smddp"', "distributed.ProcessGroup._set_default_backend"
)


def give_backends(group: Any, backends: Mapping[str, tuple[Any, Any]], default: Any) -> None:
    """Register backends, each with its type, by kind of device, with a process group that has none.

    Args:
        default: type of the backend for operations without a tensor that determines a device.

    Raises:
        SMPRuntimeError: this PyTorch is older than 2.6; its groups do not accept a default backend.
    """
    _set_default_backend(group, default)
    for device, (kind, backend) in backends.items():
        group._register_backend(torch.device(device), kind, backend)


def name_group(group: Any, name: str) -> None:
    """Give a process group its name, which errors and traces show."""
    group._set_group_name(name)


def count_collectives(backend: Any) -> None:
    """Let a backend number its collectives, which messages about ranks that fell behind need."""
    backend._set_sequence_number_for_group()


def timeout_of(backend: Any) -> timedelta:
    """Return the collective timeout of a backend with options."""
    return backend.options._timeout


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set how long a backend that is made with these options waits for a collective."""
    options._timeout = timeout


def absent_store() -> dist.Store:
    """Return a store for process groups without real other ranks; its import registers the backend ``"fake"``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_of_operation(value: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument of a ``torch.distributed`` operation is or names; else None."""
    with contextlib.suppress(RuntimeError, KeyError, ValueError):
        if isinstance(value, torch.ScriptObject):  # so is the operation of a reduction
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]  # a name
    return None
