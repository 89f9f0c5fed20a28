"""A linear map whose three products are of numbers of 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from smp_runtime.fp8.scales import GRADIENT, INPUT, WEIGHT, LinearScales, from_eight_bits, to_eight_bits
from smp_runtime.tensors.nested import cast_as_autocast
from smp_runtime.tensors.weight_gradients import weight_gradient_later

if TYPE_CHECKING:
    from smp_runtime.fp8.windows import Window


class _EightBitProduct(torch.autograd.Function):
    """The product of a rounded input and a rounded weight; gradients are those of products with a rounded gradient.

    The input is kept in 8 bits. The weight is kept as it is, so that a sharded one need not stay gathered.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scales: LinearScales, window: Window, records: bool
    ) -> torch.Tensor:
        scale = window.scale_of(scales, x.device)
        if records:
            scales.note(INPUT, x)
            if not scales.weight_comes_rounded:
                scales.note(WEIGHT, weight)
        kept = to_eight_bits(x, scale[INPUT], scales.kind_of(INPUT))
        ctx.scales, ctx.dtype, ctx.records = scales, x.dtype, window.records
        # Without a gradient of the input, backward needs no weight, and a sharded one is not gathered for it.
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None, scale)
        ctx.leaf = weight if ctx.needs_input_grad[1] and weight.is_leaf else None
        ctx.weight_dtype = weight.dtype
        return F.linear(from_eight_bits(kept, scale[INPUT], x.dtype), _rounded(weight, scale, scales))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept, weight, scale = ctx.saved_tensors
        scales: LinearScales = ctx.scales
        if ctx.records:
            scales.note(GRADIENT, gradient)
        kind = scales.kind_of(GRADIENT)
        rounded = from_eight_bits(to_eight_bits(gradient, scale[GRADIENT], kind), scale[GRADIENT], gradient.dtype)
        dx = rounded.matmul(_rounded(weight, scale, scales)) if ctx.needs_input_grad[0] else None

        def compute() -> torch.Tensor:
            rows = from_eight_bits(kept, scale[INPUT], ctx.dtype).flatten(0, -2)
            return rounded.flatten(0, -2).t().matmul(rows).to(ctx.weight_dtype)

        dw = None
        if ctx.needs_input_grad[1]:
            is_later = ctx.leaf is not None and weight_gradient_later(ctx.leaf, compute)
            dw = None if is_later else compute()
        return dx, dw, None, None, None


def _rounded(weight: torch.Tensor, scale: torch.Tensor, scales: LinearScales) -> torch.Tensor:
    """Return the numbers that a weight's 8 bits stand for."""
    return from_eight_bits(to_eight_bits(weight, scale[WEIGHT], scales.kind_of(WEIGHT)), scale[WEIGHT], weight.dtype)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: LinearScales,
    window: Window,
    records: bool,
) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)`` with products of 8 bits; the bias and its gradient are not rounded."""
    x, weight = cast_as_autocast(x, weight)
    is_row = x.dim() == 1
    output = _EightBitProduct.apply(x.unsqueeze(0) if is_row else x, weight, scales, window, records)
    output = output.squeeze(0) if is_row else output
    return output if bias is None else output + bias.to(output.dtype)
