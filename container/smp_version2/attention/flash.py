"""``FlashSelfAttention`` and ``FlashGroupedQueryAttention``: attention from queries, keys and values in one of two layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.nn.attention_scores import Scoring, alibi_slopes, attend

#: Layouts, each with the dim of the heads.
_HEADS = {"b h s d": 1, "b s h d": 2}


class FlashSelfAttention(nn.Module):
    """Scaled dot product attention; PyTorch picks its flash, memory efficient or plain kernel.

    Args:
        attention_dropout_prob: probability of dropping an attention weight in training.
        scale: factor of the scores; None is 1 / sqrt(head size).
        triton_flash_attention: allows ``attn_mask`` together with ``use_alibi``; the kernels are PyTorch's all the same.
        use_alibi: linear biases of attention: those in ``attn_mask``, or computed where there is none.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.0,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale
        self.triton_flash_attention = triton_flash_attention
        self.use_alibi = use_alibi

    def forward(
        self,
        qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        attn_mask: torch.Tensor | None = None,
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b h s d",
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            qkv: queries, keys and values, or one tensor with the heads of all three behind each other.
            attn_mask: added to the scores, broadcastable to ``[batch, heads, tokens, tokens]``.
            causal: each token attends to itself and those before it.
            cast_dtype: type to compute in, unless the tensors are float16 or bfloat16; the result has theirs.
            layout: order of batch, heads, tokens and head size: ``"b h s d"`` or ``"b s h d"``.

        Returns:
            The weighted sums of the values, in the same layout.

        Raises:
            SMPUserError: another layout, or a mask without ``triton_flash_attention`` and ``use_alibi``.
        """
        heads = _heads_dim(layout)
        if attn_mask is not None and not (self.triton_flash_attention and self.use_alibi):
            raise SMPUserError(
                "FlashSelfAttention got attn_mask, which it takes with triton_flash_attention=True and use_alibi=True only; pass "
                "these, or leave the mask out and set causal",
                code="SMP307",
            )
        query, key, value = qkv.chunk(3, heads) if isinstance(qkv, torch.Tensor) else qkv
        return _attend(self, query, key, value, attn_mask, causal, cast_dtype, heads, uses_alibi=self.use_alibi)


class FlashGroupedQueryAttention(nn.Module):
    """Attention whose keys and values have fewer heads than its queries.

    Args:
        attention_dropout_prob, scale: as of :class:`FlashSelfAttention`.
    """

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        self.attention_dropout_prob = attention_dropout_prob
        self.scale = scale

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        cast_dtype: torch.dtype | None = None,
        layout: str = "b s h d",
    ) -> torch.Tensor:
        """Compute attention; arguments as of :class:`FlashSelfAttention`.

        Args:
            kv: keys and values, or one tensor with the heads of both behind each other.

        Raises:
            SMPUserError: another layout, or heads of the queries that are no multiple of the others.
        """
        heads = _heads_dim(layout)
        key, value = kv.chunk(2, heads) if isinstance(kv, torch.Tensor) else kv
        if q.shape[heads] % key.shape[heads]:
            raise SMPUserError(
                f"FlashGroupedQueryAttention got {q.shape[heads]} heads of queries and {key.shape[heads]} of keys in the layout "
                f"{layout!r}; the first must be a multiple of the second: check the layout",
                code="SMP307",
            )
        return _attend(self, q, key, value, None, causal, cast_dtype, heads)


def _heads_dim(layout: str) -> int:
    if layout not in _HEADS:
        raise SMPUserError(f'layout is {layout!r}; use "b h s d" or "b s h d"', code="SMP307")
    return _HEADS[layout]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    cast_dtype: torch.dtype | None,
    heads: int,
    *,
    uses_alibi: bool = False,
) -> torch.Tensor:
    given = value.dtype
    parts = [part if heads == 1 else part.transpose(1, 2) for part in (query, key, value)]
    if cast_dtype is not None and given not in (torch.float16, torch.bfloat16):
        parts = [part.to(cast_dtype) for part in parts]
    scale = module.scale if module.scale is not None else parts[0].shape[-1] ** -0.5
    slopes = alibi_slopes(parts[0].shape[1]) if uses_alibi and mask is None else None
    dropout = module.attention_dropout_prob if module.training else 0.0
    found = attend(parts[0], parts[1], parts[2], mask, Scoring(scale, causal, slopes=slopes), dropout).to(given)
    return found if heads == 1 else found.transpose(1, 2)
