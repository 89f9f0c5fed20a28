"""Attention masks at the entry of distributed layers: additive, and with the same shapes on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


def to_additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask as a summand for attention scores of type ``dtype``.

    Args:
        mask: additive, or of booleans with True for a position that takes part, as PyTorch's attention has it.

    Raises:
        SMPUserError: it holds whole numbers, which would be added as they are.
    """
    if mask is None or mask.dtype == dtype:
        return mask
    lowest = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
    if not mask.is_floating_point():
        raise SMPUserError(
            f"the attention mask {list(mask.shape)} is of type {mask.dtype}, and masks of {mask.dim()} dims are added to the "
            "scores: pass mask.bool() if 1 is for a position that takes part, or a floating point mask to add",
            code="SMP307",
        )
    return mask.to(dtype).clamp_min(lowest)  # a wider type's lowest number would become infinite


def agree_on_shape(group: TensorGroup, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check that the ranks' batches, each of its own, have one shape; all ranks of the group call it.

    Args:
        others: what must come with the batch on all ranks or on none, by name.

    Raises:
        SMPUserError: they differ in size or length, or in what comes with them.
    """
    if _differ(group):
        _agreed(group, tensor, None, others)


def agree_on_mask(
    group: TensorGroup, mask: torch.Tensor | None, like: torch.Tensor, **others: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a mask of one shape on all ranks; a rank without one gets zeros if another has one.

    Args:
        mask: additive, ``[batch or 1, heads or 1, queries or 1, keys or 1]``, or None.
        like: what it masks, ``[batch, seq, hidden]``.
        others: what must come with it on all ranks or on none, by name.

    Raises:
        SMPUserError: the ranks' batches differ in size or length or in what comes with them, or their masks do
            not fit each other.
    """
    if not _differ(group):
        return mask
    shapes = _agreed(group, like, None if mask is None else tuple(mask.shape[1:]), others)
    present = [shape for shape in shapes if shape is not None]
    if not present:
        return None
    try:
        common = torch.broadcast_shapes(*present)
    except RuntimeError:
        raise SMPUserError(
            f"the ranks of a tensor parallel group have attention masks of different shapes, {_listed(shapes)} (without the "
            "batch): make them alike, or set prescaled_batch to true and give all of them one batch",
            code="SMP307",
        ) from None
    if mask is None:
        return like.new_zeros((1, *common))
    return mask if tuple(mask.shape[1:]) == tuple(common) else mask.expand(mask.shape[0], *common)


def _differ(group: TensorGroup) -> bool:
    """Return whether each rank has a batch of its own."""
    has_own_batches = group.size > 1 and not group.prescaled
    return has_own_batches and not group.is_tracing


def _agreed(
    group: TensorGroup, batch: torch.Tensor, mask: tuple[int, ...] | None, others: Mapping[str, torch.Tensor | None]
) -> list[tuple[int, ...] | None]:
    """Return every rank's ``mask`` after a check of the shapes.

    It uses the control plane, so that no device has to be waited for.
    """
    ranks = group.ranks
    shapes = {name: None if other is None else _whole_shape(other, batch) for name, other in others.items()}
    every = ranks.control.allgather((tuple(batch.shape), mask, shapes), ranks.members(Group.TP))
    if any(shape != every[0][0] for shape, _, _ in every):
        raise SMPUserError(
            f"the batches of a tensor parallel group have different shapes, {_listed([shape for shape, _, _ in every])}, but "
            "distributed layers put them together: pad all to one length and use batches of one size; or, where a module's "
            "rows depend on the data as those of experts do, set prescaled_batch to true and give all ranks one batch",
            code="SMP307",
        )
    for name in shapes:
        found = [theirs[name] for _, _, theirs in every]
        if any(shape != found[0] for shape in found):
            raise SMPUserError(
                f"the ranks of a tensor parallel group have {name} of different shapes, {_listed(found)}, but distributed "
                "layers put them together: give them on all ranks, of the batch's shape, or on none",
                code="SMP307",
            )
    return [shape for _, shape, _ in every]


def _whole_shape(other: torch.Tensor, batch: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape for the whole batch; one row stands for all rows."""
    return (batch.shape[0], *other.shape[1:]) if other.shape[0] == 1 else tuple(other.shape)


def _listed(shapes: list[Any]) -> str:
    return ", ".join(
        f"{'none' if shape is None else list(shape)} on its rank {rank}" for rank, shape in enumerate(shapes)
    )
