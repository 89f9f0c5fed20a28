"""Losses: each rank computes those of its positions; sums and counts are those of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from smp_runtime.context.rules.pointwise import align, run_aligned
from smp_runtime.context.sequence import ShardedSequence, rule, sequences_in

#: Losses of each element.
_OF_ELEMENTS = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "poisson_nll_loss",
    "soft_margin_loss",
    "hinge_embedding_loss",
)


def _bind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _reduction_of(given: dict[str, Any]) -> str | None:
    """Return the reduction; None if old arguments choose it."""
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    return None if is_old else given["reduction"]


@rule(*(f"F.{name}" for name in _OF_ELEMENTS))
def _lose_by_element(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _bind(func, args, kwargs)
    reduction = _reduction_of(given)
    if reduction is None:
        return NotImplemented
    given["reduction"] = "none"
    first = max(sequences_in(given), key=lambda sequence: sequence.dim())
    losses = run_aligned(func.__name__, func, (), given, first)
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        return losses.sum() / losses.shape[0]
    return losses.sum() if reduction == "sum" else losses.mean()


@rule("F.cross_entropy", "F.nll_loss")
def _lose_by_class(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _bind(func, args, kwargs)
    reduction, scores = _reduction_of(given), given["input"]
    if reduction is None or not isinstance(scores, ShardedSequence) or isinstance(given["weight"], ShardedSequence):
        return NotImplemented
    classes = 0 if scores.dim() == 1 else 1
    if scores.dim_held == classes:
        return NotImplemented
    target = given["target"]
    has_probabilities = target.is_floating_point()
    same_dims = has_probabilities or scores.dim_held == 0
    dim = scores.dim_held if same_dims else scores.dim_held - 1
    target = align(target, scores.sequence_layout, dim - target.dim(), scores, func.__name__)
    given.update(input=scores.local, target=target, reduction="none")
    losses = func(**given)
    if reduction == "none":
        return scores.like(losses, dim if not has_probabilities or dim == 0 else dim - 1)
    # As in one process, losses and targets of half precision are added up in float32.
    total = losses.sum(dtype=torch.float64 if losses.dtype is torch.float64 else torch.float32)
    if reduction == "sum":
        return scores.group.sum(total).to(losses.dtype)
    if has_probabilities:
        return (scores.group.sum(total) / (scores.numel() // scores.shape[classes])).to(losses.dtype)
    count = _count(target, given["weight"], given["ignore_index"], losses)
    total, count = scores.group.sum(torch.stack([total, count.to(total.dtype)])).unbind()
    return (total / count.detach()).to(losses.dtype)


def _count(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, losses: torch.Tensor) -> torch.Tensor:
    """Return the number of targets that count, or the sum of their classes' weights."""
    counts = target != ignored
    if weight is None:
        return counts.sum()
    of_class = weight.detach()[target.masked_fill(~counts, 0)]
    return torch.where(counts, of_class, 0).sum()


@rule("cross_entropy_loss", "nll_loss")
def _lose_in_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return NotImplemented


@rule("F.cosine_similarity", "cosine_similarity")
def _compare_directions(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"dim": 1, **dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)), **kwargs}
    first = max(sequences_in(given), key=lambda sequence: sequence.dim())
    dim = given["dim"] % first.dim()
    if dim == first.dim_held:
        return NotImplemented
    held = first.dim_held - first.dim()
    parts = {key: align(value, first.sequence_layout, held, first, "cosine_similarity") for key, value in given.items()}
    return first.like(F.cosine_similarity(**parts), first.dim_held - (dim < first.dim_held))
