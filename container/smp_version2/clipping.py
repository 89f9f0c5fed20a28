"""``clip_grad_norm_`` of version 2: a norm that counts every element of all ranks' parameters once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_version2.moe.experts import find_own_parameters
from smp_version2.split_parameters import find_slices
from smp_version2.state import state

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The ranks over which the elements of a gradient are spread; None if each rank has all of them.
_Spread = tuple["dist.ProcessGroup | None", ...]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of a model so that their norm is at most ``max_norm``; all ranks call it.

    Args:
        model: the model as ``FullyShardedDataParallel`` or ``fully_shard`` has wrapped it, or one that nothing shards.
        max_norm: the greatest norm that all gradients together keep.
        norm_type: order of the norm; ``inf`` for the greatest element.

    Returns:
        The norm before, a scalar on the job's device.

    Raises:
        SMPUserError: no module, or a number that is not positive.
    """
    if not isinstance(model, nn.Module):
        raise SMPUserError(f"clip_grad_norm_ got {kind_of(model)}; pass the model that FSDP has wrapped", code="SMP303")
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not float(value) > 0:
            raise SMPUserError(f"clip_grad_norm_ got {name}={value}; pass a positive number", code="SMP303")
    split, experts = find_slices(model), find_own_parameters(model)
    gradients: dict[_Spread, list[torch.Tensor]] = {}
    for parameter, group in _list_parameters(model):
        tensor_group = state.tp_process_group if parameter in split else None
        expert_group = state.ep_process_group if parameter in experts else None
        here = gradients.setdefault((group, tensor_group, expert_group), [])
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        if gradient is not None:
            here.append(gradient)
    # Of the parameters, since a rank may have no gradient, and all ranks must add numbers of one type.
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    dtype = torch.float64 if is_double else torch.float32
    norm = _combine_norms(gradients, float(norm_type), dtype)
    # PyTorch's constant, so that clipped gradients equal those of one process.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for here in gradients.values():
        for gradient in here:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm


def _combine_norms(gradients: dict[_Spread, list[torch.Tensor]], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of all elements; every rank has the same kinds of gradients, in the same order."""
    device = state.joined.device
    is_greatest = math.isinf(norm_type)
    reduction = dist.ReduceOp.MAX if is_greatest else dist.ReduceOp.SUM
    total = torch.zeros((), device=device)
    for spread, here in gradients.items():
        norms = [
            torch.linalg.vector_norm(gradient, norm_type, dtype=dtype).to(device)
            for gradient in here
            if gradient.numel()
        ]
        norms = norms or [torch.zeros((), device=device, dtype=dtype)]
        part = torch.stack(norms).max() if is_greatest else (torch.stack(norms) ** norm_type).sum()
        for group in spread:
            if group is not None:
                dist.all_reduce(part, reduction, group)
        total = torch.maximum(total, part) if is_greatest else total + part
    return total if is_greatest else total ** (1.0 / norm_type)


def _list_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup | None]]:
    """Yield every parameter once, with the group that shards it."""
    seen: set[nn.Parameter] = set()
    units = FullyShardedDataParallel.fsdp_modules(model)
    # Parameters inside a nested unit belong to that one, so the innermost come first.
    for unit in reversed(units):
        group = None if unit.sharding_strategy is ShardingStrategy.NO_SHARD else unit.process_group
        for parameter in unit.parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield parameter, group
    for parameter in model.parameters():
        if parameter not in seen:
            seen.add(parameter)
            yield parameter, _find_shard_group(parameter)


def _find_shard_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Return the group that shards a parameter of ``fully_shard``."""
    if not isinstance(parameter, DTensor):
        return None
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            return parameter.device_mesh.get_group(dim)
    return None
