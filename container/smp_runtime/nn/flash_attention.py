"""``FlashAttentionLayer``: attention of a stacked ``qkv``, through PyTorch's flash kernels where they are."""

from __future__ import annotations

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.nn.attention_scores import Scoring, attend


class FlashAttentionLayer(nn.Module):
    """Scaled dot product attention; PyTorch picks its flash, memory efficient or plain kernel.

    Args:
        attention_dropout_prob: probability of dropping an attention weight in training.
        attention_head_size: needed with ``scale_attention_scores``, which divides scores by its square root.
        scale_attention_scores: see there.
        scale_attn_by_layer_idx: divide scores by ``layer_idx + 1`` too.
        layer_idx: the layer's number, from 0.
        scale: factor of the scores, in place of all of the above.
        triton_flash_attention: accepted; masks work with every kernel here.
        use_alibi: the mask that ``forward`` gets holds linear biases.

    Raises:
        SMPUserError: a size or number that the scale needs is missing.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.attention_dropout_prob = attention_dropout_prob
        self.use_alibi = use_alibi
        self.triton_flash_attention = triton_flash_attention
        self.scale = scale if scale is not None else 1.0
        if scale is None and scale_attention_scores:
            if attention_head_size is None:
                raise SMPUserError(
                    "scale_attention_scores is true but attention_head_size is None; pass the size of a head, or scale="
                )
            self.scale /= attention_head_size**0.5
        if scale is None and scale_attn_by_layer_idx:
            if layer_idx is None:
                raise SMPUserError(
                    "scale_attn_by_layer_idx is true but layer_idx is None; pass the layer's number, from 0"
                )
            self.scale /= layer_idx + 1

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Attention of ``qkv``, ``[batch, seq, 3, heads, head size]``.

        Args:
            attn_mask: added to the scores, broadcastable to ``[batch, heads, seq, seq]``.
            causal: each token attends to itself and those before it.

        Returns:
            ``[batch, heads, seq, head size]``.
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attend(query, key, value, attn_mask, Scoring(self.scale, causal), dropout)
