"""Attention from queries, keys and values: scores, masks and biases, by PyTorch's scaled dot product attention."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from smp_runtime.tensor_parallel.masks import to_additive

#: Whether ``scaled_dot_product_attention`` knows of grouped heads, since PyTorch 2.5.
_HAS_GROUPS = hasattr(torch.backends.cuda.SDPAParams, "enable_gqa")


@dataclass(frozen=True)
class Scoring:
    """How tokens attend to each other.

    Attributes:
        scale: factor of the scores.
        causal: each token attends to itself and those before it.
        window: and only to so many last ones.
        slopes: linear bias per head and distance; None means no bias.
        in_fp32: compute in float32, and return the values' type.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    slopes: tuple[float, ...] | None = None
    in_fp32: bool = False


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return weighted sums of the values.

    Args:
        query: ``[batch, heads, queries, head size]``.
        key: ``[batch, heads or a divisor, keys, head size]``; value likewise.
        mask: added to the scores, ``[batch or 1, heads or 1, queries or 1, keys]``; booleans are True for a
            position that takes part.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[batch, heads, queries, head size]``.
    """
    dtype = value.dtype
    # Products of queries and keys overflow in float16, and lose digits in bfloat16.
    if scoring.in_fp32:
        query, key, value = query.float(), key.float(), value.float()
    bias = _bias(query, key.shape[2], mask, scoring)
    groups = query.shape[1] // key.shape[1]
    by_kernel: dict[str, bool] = {}
    is_causal = scoring.causal and bias is None and query.shape[2] > 1
    if groups > 1 and bias is None and is_grouped_by_kernel(query, key, value, dropout, is_causal=is_causal):
        by_kernel["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # Under autocast the kernel would go back to half precision.
    leaves = scoring.in_fp32 and not query.is_meta
    wide = torch.autocast(query.device.type, enabled=False) if leaves else contextlib.nullcontext()
    with wide:
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scoring.scale,
            **by_kernel,
        )
    return context.to(dtype)


def is_grouped_by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, *, is_causal: bool
) -> bool:
    """Return whether flash attention runs, which copies no heads of keys and values where queries have more of them.

    PyTorch's other kernels do not take them, and it would then go back to the slowest one. Never on the CPU.
    """
    if not _HAS_GROUPS or query.device.type != "cuda":
        return False
    params = torch.backends.cuda.SDPAParams(query, key, value, None, dropout, is_causal, True)
    return torch.backends.cuda.can_use_flash_attention(params)


def _bias(query: torch.Tensor, keys: int, mask: torch.Tensor | None, scoring: Scoring) -> torch.Tensor | None:
    """Return the sum of all biases of the scores; None if the kernel's own causal mask is enough."""
    queries = query.shape[2]
    window = scoring.window
    if window is not None and window >= keys:
        window = None
    before = keys - queries if scoring.causal else 0  # tokens that only a cache has
    is_plain = mask is None and scoring.slopes is None and window is None
    if is_plain and (not before or queries == 1):
        return None
    lowest = torch.finfo(query.dtype).min
    bias = to_additive(mask, query.dtype)
    if not scoring.causal and scoring.slopes is None:
        return bias
    # How far back each key lies, [queries, keys].
    places = torch.arange(before, before + queries, device=query.device)
    distance = places[:, None] - torch.arange(keys, device=query.device)
    if scoring.slopes is not None:
        slopes = _numbers_on(scoring.slopes, query.dtype, query.device)
        linear = -slopes[:, None, None] * distance.abs()
        bias = (linear if bias is None else bias + linear).clamp_min(lowest)
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
    if scoring.causal:
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance >= window)
        if bias is None:
            bias = query.new_zeros(1, 1, queries, keys)
        bias = bias.masked_fill(hidden, lowest)
    return bias


def alibi_slopes(heads: int, bias_max: int = 8) -> tuple[float, ...]:
    """Return each head's slope: a geometric series that ends at ``2^-bias_max`` (arXiv 2108.12409).

    For a number of heads that is no power of two, return those of the next power, the odd ones first.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-bias_max * (head + 1) / power) for head in range(power)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def _numbers_on(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the numbers as a vector on a device; a GPU gets them once, since the host waits for each such copy."""
    make = _made_on if torch.compiler.is_compiling() else _kept_on
    return make(numbers, dtype, device)


def _made_on(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def _kept_on(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Kept for later calls, also those that train.
    with torch.inference_mode(False), torch.no_grad():
        return _made_on(numbers, dtype, device)


@functools.lru_cache(maxsize=16)
def _angles(
    frequencies: tuple[float, ...], length: int, scale: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, each ``[length, pairs]`` in float32."""
    # Kept for later calls, also those that train.
    with torch.inference_mode(False), torch.no_grad():
        return _computed_angles(frequencies, length, scale, device)


def _computed_angles(
    frequencies: tuple[float, ...], length: int, scale: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * _numbers_on(frequencies, torch.float32, device)
    return angles.cos() * scale, angles.sin() * scale


def rotate(
    tensor: torch.Tensor,
    frequencies: tuple[float, ...],
    interleaved: bool,
    scale: float = 1.0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply rotary position embedding to the first ``2 · pairs`` channels.

    Args:
        tensor: ``[batch, heads, seq, head size]``.
        frequencies: angle per position of each pair of channels.
        interleaved: pairs are neighbors; else channel i goes with i + pairs.
        positions: ``[batch or 1, seq]``; None means 0, 1, 2, …
    """
    pairs = len(frequencies)
    if positions is None:
        length = -(-tensor.shape[2] // 256) * 256  # rounded, so that few lengths are kept
        of_positions = _computed_angles if torch.compiler.is_compiling() else _angles
        cos, sin = (table[: tensor.shape[2]] for table in of_positions(frequencies, length, scale, tensor.device))
    else:
        # In float32: half precision cannot tell positions of some thousand apart.
        angles = positions[:, None, :, None].float() * _numbers_on(frequencies, torch.float32, tensor.device)
        cos, sin = angles.cos() * scale, angles.sin() * scale
    cos, sin = cos.to(tensor.dtype), sin.to(tensor.dtype)
    turned, rest = tensor[..., : 2 * pairs], tensor[..., 2 * pairs :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    results = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(results, -1).flatten(-2) if interleaved else torch.cat(results, -1)
    return turned if not rest.shape[-1] else torch.cat([turned, rest], -1)
