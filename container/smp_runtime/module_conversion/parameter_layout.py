"""The layout of distributed modules' parameters for the registry; state goes out whole and comes in sliced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.job import session as sessions
from smp_runtime.module_conversion.prescaled_batch_check import PrescaledBatchCheck
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.tensor_parallel.block_entry import entry_of
from smp_runtime.tensor_parallel.group import TensorGroup, gather_whole

if TYPE_CHECKING:
    from smp_runtime.parameters.registry import ParameterRegistry, TensorSlice


def place(module: nn.Module, registry: ParameterRegistry) -> None:
    """Record axis, slice and whole shape of split parameters, and the group over which each gradient is averaged."""
    _close_fast_paths(module)
    watch_batches(module)
    for part in module.modules():
        entry = entry_of(part)
        if entry is not None and not entry.prescaled:  # ordinary layers in it see the batch of the whole group
            for seen in part.parameters():
                registry.record_of(seen).reduction = Group.RDP
    _note_origins(module, registry)
    for part in distributed_modules(module):
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            record = registry.record_of(parameter)
            # A parameter that a subclass made on its own sees the same batch as a whole parameter.
            record.reduction = part.reductions.get(name, Group.RDP)
            where = part.tensor_slices.get(name)
            if where is not None:
                record.shape = where.shape
                record.placement = replace(
                    record.placement, tensor_axis=where.dim, tensor_slice=where.bounds, tensor_longest=where.size
                )


def _note_origins(module: nn.Module, registry: ParameterRegistry) -> None:
    """Record what matrices were in the modules that were replaced."""
    for prefix, part in module.named_modules():
        if not isinstance(part, DistributedModule) or not part.matrix_origins:
            continue
        parameters = dict(part.named_parameters(remove_duplicate=False))
        for name in parameters.keys() & part.matrix_origins.keys():
            origin = part.matrix_origins[name]
            if origin.name:
                path = f"{prefix}.{origin.name}".lstrip(".")
                origin = replace(origin, name=path)
            registry.record_of(parameters[name]).origin = origin


def watch_batches(module: nn.Module) -> None:
    """Check in the first forward passes that the ranks of a group have one batch, if the batch is common."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001 - PyTorch has no public list of them
    if any(isinstance(hook, PrescaledBatchCheck) for hook in hooks):
        return
    first = next(distributed_modules(module), None)
    if first is None:
        return
    group = first.tensor_group
    if group.size > 1 and group.prescaled:
        PrescaledBatchCheck(group).watch(module)


def _close_fast_paths(module: nn.Module) -> None:
    """Turn off PyTorch's fast path in encoder layers with distributed children.

    In evaluation it reads the children's weights, but distributed modules have only a part of them.
    """
    for part in module.modules():
        if not isinstance(part, nn.TransformerEncoderLayer):
            continue
        has_distributed = any(isinstance(child, DistributedModule) for child in part.modules())
        if has_distributed:
            part.activation_relu_or_gelu = 0


def distributed_modules(module: nn.Module) -> Iterator[DistributedModule]:
    """Return the distributed modules in ``module``, nested ones too."""
    return (part for part in module.modules() if isinstance(part, DistributedModule))


def slices_by_name(module: nn.Module) -> dict[str, TensorSlice]:
    """Return every split parameter's slice, under all of its names."""
    slices: dict[str, TensorSlice] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if not isinstance(part, DistributedModule):
            continue
        for name, where in part.tensor_slices.items():
            path = f"{prefix}.{name}".lstrip(".")
            slices[path] = where
    return slices


@torch.no_grad()
def whole_state(
    module: nn.Module, state: dict[str, Any], group: TensorGroup, *, to_first: bool = False
) -> dict[str, Any]:
    """Return ``state`` with split parameters whole; all ranks of the group call it.

    Args:
        to_first: only on the first rank of the group, and these on the CPU; the others get nothing.
    """
    slices = slices_by_name(module)
    if group.size == 1 or not slices:
        return state
    whole = type(state)()
    for name, value in state.items():
        where = slices.get(name)
        found = value if where is None else gather_whole(value, where, group)
        if not to_first:
            whole[name] = found
        elif group.rank == 0:
            whole[name] = found if where is None else found.cpu()
    return whole


def get_distribution_axis(param: torch.Tensor) -> int | None:
    """Return the dim along which a parameter of a wrapped model is split over tensor parallel ranks.

    Args:
        param: one of ``model.parameters()``.

    Returns:
        The dim, from 0; None if each rank has the parameter whole.

    Example:
        >>> smp.utils.get_distribution_axis(next(model.parameters())) is None  # without tensor parallelism
        True
    """
    for model in sessions.current_session().models:
        for record in model.registry:
            if record.parameter is param:
                return record.placement.tensor_axis
    return None
