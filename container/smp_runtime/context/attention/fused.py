"""PyTorch's fused attention operators, which return the log-sum-exp of the scores and take it for their backward pass."""

# ruff: noqa: SLF001 - operators have no public names; those used are listed in torch_private

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

_aten = torch.ops.aten

#: PyTorch's numbers for its operators.
_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3

#: CUDA's efficient operator takes masks whose rows begin at multiples of so many elements, and rounds up the rows of its
#: log-sum-exp to as many.
_ALIGNED_MASK = 16
_ALIGNED_ROWS = 32
#: CUDA's flash operator takes widths that are multiples of it.
_ALIGNED_WIDTH = 8


class FusedOperator(NamedTuple):
    """A fused operator for a call.

    Attributes:
        kind: PyTorch's number for it.
        causal: whether each row attends to as many keys as its number.
        scale: of the scores.
    """

    kind: int
    causal: bool
    scale: float


def choose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, causal: bool, scale: float
) -> FusedOperator | None:
    """Return the operator that ``scaled_dot_product_attention`` would take for tensors like these; None if it has none."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not (q.shape[2] and k.shape[2] and q.numel() and v.numel()):
        return None
    if q.shape[-1] != v.shape[-1]:  # on CUDA, some operators would do; their backward passes differ by release
        return None
    shares_heads = q.shape[1] != k.shape[1]
    kind = int(_aten._fused_sdp_choice(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=shares_heads))
    known = [_FLASH]
    if device == "cuda":
        known = [_FLASH, _EFFICIENT, _CUDNN]
        # The flash operator of CUDA takes no mask; that of the CPU does.
        if bias is not None:
            known.remove(_FLASH)
    if kind not in known:
        return None
    return FusedOperator(kind, causal, scale)


def as_bias(tile: torch.Tensor | None, q: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what is added to the scores, and the rows that attend to none of the keys, ``[…, rows or 1, 1]``."""
    if tile is None:
        return None, None
    if tile.dtype is torch.bool:
        bias = torch.zeros(tile.shape, dtype=q.dtype, device=q.device).masked_fill_(~tile, -torch.inf)
        return bias, ~tile.any(-1, keepdim=True)
    # The operator for the CPU adds numbers of float32 to scores of narrower types.
    dtype = torch.float32 if tile.dtype is torch.float32 and q.device.type == "cpu" else q.dtype
    return tile.to(dtype), (tile == -torch.inf).all(-1, keepdim=True)


def forward(
    operator: FusedOperator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the log-sum-exp, ``[batch, heads, rows]``; rows that attend to nothing have any value."""
    causal, scale = operator.causal, operator.scale
    if q.device.type == "cpu":
        wide, wide_bias = map(_widened, (q, k, v)), None if bias is None else _widened(bias)
        found = _aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, causal, attn_mask=wide_bias, scale=scale)
        return found[0], found[1]
    rows, width = q.shape[2], q.shape[3]
    if operator.kind == _FLASH:
        padded = (_padded(each) for each in (q, k, v))
        found = _aten._scaled_dot_product_flash_attention(*padded, 0.0, causal, False, scale=scale)
        return found[0][..., :width], found[1][..., :rows]
    k, v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    bias = _expanded(bias, q, k)
    if operator.kind == _EFFICIENT:
        found = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        return found[0], found[1][..., :rows]
    found = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, False, scale=scale)
    return found[0], found[1].reshape(q.shape[:3])


def backward(
    operator: FusedOperator,
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        out, logsumexp: merged over all keys, so that the weights of these keys are those of the whole.
    """
    q, k, v = inputs
    causal, scale = operator.causal, operator.scale
    if q.device.type == "cpu":
        wide, wide_bias = map(_widened, (gradient, q, k, v, out)), None if bias is None else _widened(bias)
        found: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, logsumexp, 0.0, causal, attn_mask=wide_bias, scale=scale
        )
        return found[0], found[1], found[2]
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout
    sizes = (None, None, q.shape[2], k.shape[2])
    if operator.kind == _FLASH:
        width = q.shape[3]
        seeds = torch.zeros(2, dtype=torch.uint64, device=q.device), no_seed.to(torch.uint64)
        padded = [_padded(each) for each in (gradient, q, k, v, out)]
        found = _aten._scaled_dot_product_flash_attention_backward(
            *padded, logsumexp, *sizes, 0.0, causal, *seeds, scale=scale
        )
        return found[0][..., :width], found[1][..., :width], found[2][..., :width]
    wide_k, wide_v = _spread(k, q.shape[1]), _spread(v, q.shape[1])
    bias = _expanded(bias, q, k)
    if operator.kind == _EFFICIENT:
        missing = -q.shape[2] % _ALIGNED_ROWS
        aligned = F.pad(logsumexp, (0, missing), value=torch.inf)
        wanted = [True, True, True, False]
        found = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, wide_k, wide_v, bias, out, aligned, no_seed, no_seed, 0.0, wanted, causal, scale=scale
        )
    else:
        stats = logsumexp.unsqueeze(-1).contiguous()
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            gradient, q, wide_k, wide_v, out, stats, no_seed, no_seed, bias, *sizes, 0.0, causal, scale=scale
        )
    return found[0], _gathered(found[1], k.shape[1]), _gathered(found[2], k.shape[1])


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers of 16 bits as float32.

    The operator for the CPU rounds its results to the type of its inputs. Results over parts of the keys would be rounded before
    they merge, and gradients of queries would have up to five times the error of one process.
    """
    return tensor.float() if tensor.element_size() == 2 else tensor


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % _ALIGNED_WIDTH
    return F.pad(tensor, (0, missing)) if missing else tensor


def _expanded(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """Return a bias for each head and row, whose rows are aligned in memory."""
    if bias is None:
        return None
    missing = -bias.shape[-1] % _ALIGNED_MASK
    aligned = F.pad(bias, (0, missing))[..., : bias.shape[-1]] if missing else bias.contiguous()
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _spread(k: torch.Tensor, heads: int) -> torch.Tensor:
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def _gathered(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    if gradient.shape[1] == heads:
        return gradient
    return gradient.unflatten(1, (heads, gradient.shape[1] // heads)).sum(2)
