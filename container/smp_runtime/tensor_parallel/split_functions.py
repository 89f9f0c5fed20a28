"""The two halves of a tensor parallel block, and its loss, each one autograd function.

*Columns* turns activations into this rank's features, all rows; *rows* turns this rank's features back. ``dim`` is
along which activations are sliced between the halves, or None when they are replicated. Collectives overlap with the arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp_runtime.fp8.current import find_by_weight
from smp_runtime.tensor_parallel import traced
from smp_runtime.tensor_parallel.collectives import (
    ActivationFunction,
    gather_slices,
    scatter_summed,
    sum_partials,
    use_replicated,
)
from smp_runtime.tensor_parallel.group import TensorGroup, join
from smp_runtime.tensor_parallel.traced import traced_group
from smp_runtime.tensors.nested import cast_as_autocast, rows_of
from smp_runtime.tensors.weight_gradients import weight_gradient_later

if TYPE_CHECKING:
    from smp_runtime.fp8.current import Multiply


def _weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the weight gradient ``[out, in]`` from ``[..., out]`` and ``[..., in]``."""
    return rows_of(gradient).t().mm(rows_of(inputs).conj())


def _now_or_later(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, may_wait: bool
) -> torch.Tensor | None:
    """Return the weight gradient, or None if a pipeline computes it later, when it would idle."""
    compute = functools.partial(_weight_gradient, gradient, inputs)
    return None if may_wait and weight_gradient_later(weight, compute) else compute()


def _bias_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return rows_of(gradient).sum(0)


def _columns_gradients(
    group: TensorGroup,
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dim: int | None,
    needed: Sequence[bool],
    may_wait: bool,
) -> list[torch.Tensor | None]:
    """Return the gradients of the input, of each weight, and of each bias.

    An entry is None if it is not needed or comes later. The input's gradient is reduced while those of the weights
    are computed. Sliced inputs are gathered again at the same time.
    """
    count = len(weights)
    needs_weights, needs_biases = needed[1 : 1 + count], needed[1 + count :]
    # Begun first, so that it runs while the input's gradient is computed.
    regathering = None
    if dim is not None and group.size > 1 and any(needs_weights):
        regathering = group.start_gather(x)
    dx, waiting = None, None
    if needed[0]:
        dx = gradients[0].matmul(weights[0].conj())
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            dx += gradient.matmul(weight.conj())
        # Before the weights' gradients, with which it overlaps.
        if group.size > 1:
            if dim is None:
                waiting = group.start_all_reduce(dx)
            else:
                dx, waiting = group.start_scatter_sum(dx, dim)
    full = x
    if regathering is not None and dim is not None:
        regathering[1].wait()
        full = join(regathering[0], dim)
    weight_gradients = [
        _now_or_later(gradient, full, weight, may_wait) if wanted else None
        for gradient, weight, wanted in zip(gradients, weights, needs_weights, strict=True)
    ]
    bias_gradients = [
        _bias_gradient(gradient) if wanted else None for gradient, wanted in zip(gradients, needs_biases, strict=True)
    ]
    # Last, since nothing above reads the reduced gradient.
    if waiting is not None:
        waiting.wait()
    return [dx, *weight_gradients, *bias_gradients]


@traced.define("columns_backward(Tensor[] gradients, Tensor x, Tensor[] weights, int? dim, bool[] needed) -> Tensor[]")
def _columns_backward(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dim: int | None,
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Compute the gradients as one operation of a compiled graph; empty tensors stand for those not needed."""
    found = _columns_gradients(traced.group(), gradients, x, weights, dim, needed, may_wait=False)
    return [x.new_empty(0) if each is None else each.contiguous() for each in found]


@traced.register_fake("columns_backward")
def _(
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dim: int | None,
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    shapes = [x.shape, *(weight.shape for weight in weights), *(weight.shape[:1] for weight in weights)]
    return [x.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, needed, strict=True)]


class _Columns(ActivationFunction):
    """Several linear maps of one input; sliced inputs are kept as slices."""

    joins, may_move_tokens, mixes_features = 2, True, True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, dim: int | None, count: int, *tensors: Any) -> Any:
        weights, biases = tensors[:count], tensors[count:]
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(x, *weights)
        full = x if dim is None else traced_group(group).gather(x, dim)
        return tuple(F.linear(full, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        if torch.compiler.is_compiling() and ctx.group.size > 1:
            found = torch.ops.smp.columns_backward(list(gradients), x, weights, ctx.dim, needed)
            found = [each if wanted else None for each, wanted in zip(found, needed, strict=True)]
        else:
            # Weight gradients of sliced inputs may not wait, since the gathered inputs would stay in memory until then.
            found = _columns_gradients(ctx.group, gradients, x, weights, ctx.dim, needed, may_wait=ctx.dim is None)
        return found[0], None, None, None, *found[1:]


class _Rows(ActivationFunction):
    """One linear map of this rank's features, summed over the ranks."""

    divides, may_move_tokens, mixes_features = 2, True, True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, dim: int | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        ctx.save_for_backward(x, weight)
        if group.size == 1:
            return F.linear(x, weight, bias)
        partial, ranks = F.linear(x, weight), traced_group(group)
        output = ranks.all_reduce(partial) if dim is None else ranks.scatter_sum(partial, dim)
        # Behind the sum, in which each rank's bias would count.
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        db = _bias_gradient(gradient) if ctx.needs_input_grad[4] else None
        full = gradient
        if ctx.dim is not None:
            full = traced_group(ctx.group).gather(gradient, ctx.dim)
        dx = full.matmul(weight.conj()) if ctx.needs_input_grad[0] else None
        # A compiled graph has no moment to which it could leave a gradient.
        may_wait = not torch.compiler.is_compiling()
        dw = _now_or_later(full, x, weight, may_wait) if ctx.needs_input_grad[3] else None
        return dx, None, None, dw, db


def multiply_columns(
    x: torch.Tensor,
    group: TensorGroup,
    dim: int | None,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Multiply ``x`` by each weight, for all rows.

    Args:
        x: ``[batch, seq, in]``, replicated; or this rank's slice of it along ``dim``.
        weights: each ``[out / size, in]``.

    Returns:
        for each weight ``[batch, seq, out / size]``, whole along ``dim``.
    """
    products = [find_by_weight(weight) for weight in weights]
    if any(product is not None for product in products):
        full = _whole_rows(x, group, dim)
        return tuple(
            (F.linear if product is None else product)(full, weight, bias)
            for product, weight, bias in zip(products, weights, biases, strict=True)
        )
    x, *rest = cast_as_autocast(x, *weights, *biases)
    return _Columns.apply(x, group, dim, len(weights), *rest)


def _whole_rows(x: torch.Tensor, group: TensorGroup, dim: int | None) -> torch.Tensor:
    """Return all rows for columns of a weight: gradients of replicated ones are summed."""
    if group.size == 1:
        return x
    return use_replicated(x, group) if dim is None else gather_slices(x, group, dim, partial=True)


def multiply_rows(
    x: torch.Tensor,
    group: TensorGroup,
    dim: int | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    multiply: Multiply | None = None,
) -> torch.Tensor:
    """Return the sum over ranks of ``x`` times ``weight``, plus ``bias``.

    Args:
        x: ``[batch, seq, in / size]``.
        weight: ``[out, in / size]``.
        bias: ``[out]``.
        multiply: in place of ``F.linear``; None for that, unless the weight's layer multiplies in 8 bits.

    Returns:
        ``[batch, seq, out]``, replicated; or this rank's slice of it along ``dim``.
    """
    multiply = multiply or find_by_weight(weight)
    if multiply is not None:
        if group.size == 1:
            return multiply(x, weight, bias)
        partial = multiply(x, weight, None)
        output = sum_partials(partial, group) if dim is None else scatter_summed(partial, group, dim)
        return output if bias is None else output + bias.to(output.dtype)
    x, weight, bias = cast_as_autocast(x, weight, bias)
    return _Rows.apply(x, group, dim, weight, bias)


class _SplitCrossEntropy(ActivationFunction):
    token_arguments, mixes_features = 2, True

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: TensorGroup, start: int) -> torch.Tensor:
        # The greatest logit over all ranks, so that no exponential overflows. The collectives only sum: gather first.
        greatest = (
            logits.amax(-1).float() if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf).float()
        )
        greatest = group.gather(greatest.unsqueeze(0), 0).amax(0)
        exponentials = (logits.float() - greatest.unsqueeze(-1)).exp_()
        inside = (targets >= start) & (targets < start + logits.shape[-1])
        index = torch.where(inside, targets - start, 0).unsqueeze(-1)
        mine = torch.where(inside, logits.float().gather(-1, index).squeeze(-1) - greatest, 0.0)
        sums, chosen = group.all_reduce(torch.stack([exponentials.sum(-1), mine]))
        ctx.save_for_backward(exponentials.div_(sums.unsqueeze(-1)), index, inside)
        ctx.dtype = logits.dtype
        return sums.log() - chosen

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, index, inside = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(-1, index, -inside.to(result.dtype).unsqueeze(-1))
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


def split_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: TensorGroup, start: int) -> torch.Tensor:
    """Return the negative log likelihood of each target, in float32 and replicated.

    Args:
        logits: ``[tokens, vocabulary of this rank]``; at least one row of the vocabulary.
        targets: ``[tokens]``, in the whole vocabulary; the same on every rank.
        start: where this rank's part of the vocabulary begins.
    """
    return _SplitCrossEntropy.apply(logits, targets, group, start)
