"""Losses: each rank computes those of its positions; sums and counts are those of all."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from smp_runtime.context.copies import owner_of_memory
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
    losses = _lose_of_copy(func, given)
    losses = func(**given) if losses is None else losses
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


#: So many numbers are computed at a time.
_AT_A_TIME = 2**26


def _lose_of_copy(func: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor | None:
    """Return the losses of each row of scores that were converted for this, in less memory than PyTorch's; None of others.

    Where a model converts its scores to float32, PyTorch keeps their logarithms, and has two gradients of their size at once.
    Here the converted scores are kept, and there is one gradient.
    """
    scores, target = given["input"], given["target"]
    owner = owner_of_memory(scores)
    is_copy = owner.grad_fn is not None and owner.grad_fn.name() == "ToCopyBackward0"
    is_plain = given["weight"] is None and not given.get("label_smoothing") and not target.is_floating_point()
    is_wide = scores.dtype in (torch.float32, torch.float64)
    if func.__name__ != "cross_entropy" or scores.dim() != 2 or not (is_copy and is_plain and is_wide):
        return None
    losses: torch.Tensor = _LossOfRows.apply(scores, target, given["ignore_index"])
    return losses


class _LossOfRows(torch.autograd.Function):
    """The cross-entropy of each row of ``scores[rows, classes]``; backward the gradient, some rows at a time."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
        counts = target != ignored
        places = target.masked_fill(~counts, 0)[:, None]
        sums = torch.cat([rows.logsumexp(-1) for rows in scores.split(_rows_of(scores))])
        ctx.save_for_backward(scores, places, counts, sums)
        return torch.where(counts, sums - scores.gather(-1, places)[:, 0], 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scores, places, counts, sums = ctx.saved_tensors
        gradient = torch.where(counts, gradient, 0.0)[:, None]
        if torch.is_grad_enabled():  # which will be differentiated again
            weights = scores.softmax(-1)
            return weights.scatter_add(-1, places, -torch.ones_like(gradient)) * gradient, None, None
        result = torch.empty_like(scores)
        count = _rows_of(scores)
        parts = (each.split(count) for each in (result, scores, sums[:, None], places, gradient))
        for into, rows, of_rows, chosen, above in zip(*parts, strict=True):
            torch.sub(rows, of_rows, out=into)
            into.exp_().scatter_add_(-1, chosen, -torch.ones_like(above)).mul_(above)
        return result, None, None


def _rows_of(scores: torch.Tensor) -> int:
    return max(1, _AT_A_TIME // max(1, scores.shape[1]))


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
