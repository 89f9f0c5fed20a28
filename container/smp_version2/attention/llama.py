"""``LlamaFlashAttention``: the attention of Transformers' Llama by PyTorch's kernels, as scripts set it into each layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from smp_runtime.errors import SMPUserError


class LlamaFlashAttention(LlamaAttention):
    """Llama's attention, whose scores are never held whole.

    Args:
        config: of the model.
        layer_idx: number of the layer, from 0; needed with a cache of keys and values only.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        by_kernels = type(config).from_dict(config.to_dict(), attn_implementation="sdpa")
        super().__init__(by_kernels, layer_idx)  # type: ignore[arg-type]
        self._rotary: list[Any] = []  # no submodule: its buffer is no state of the model

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **more: Any,
    ) -> Any:
        """Compute attention.

        Args:
            attention_mask: as the model makes it for PyTorch's kernels; without one each token attends to those before it.
            position_ids: of the tokens, from 0 unless given.
            past_key_value: the cache, if one is used.
            use_cache: whether the cache is returned.
            more: what newer versions of Transformers pass, such as ``position_embeddings``.

        Returns:
            The result, None in place of weights, and the cache. Without the cache if ``position_embeddings`` are given, as newer
            versions of Transformers want it.

        Raises:
            SMPUserError: ``output_attentions``, or a cache without ``layer_idx``.
        """
        if output_attentions:
            raise SMPUserError(
                "LlamaFlashAttention got output_attentions=True, and holds no attention weights; leave it out, or keep the model's "
                "own attention",
                code="SMP307",
            )
        cache = more.pop("past_key_values", None) if past_key_value is None else past_key_value
        if cache is not None and self.layer_idx is None:
            raise SMPUserError(
                "LlamaFlashAttention got a cache and was made without layer_idx; make it with the layer's number, or pass "
                "use_cache=False",
                code="SMP307",
            )
        embeddings = more.pop("position_embeddings", None)
        is_newer = embeddings is not None
        if embeddings is None:
            embeddings = self._embed(hidden_states, position_ids)
        result, _ = super().forward(
            hidden_states=hidden_states,
            position_embeddings=embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
            **more,
        )
        if is_newer:
            return result, None
        returned_cache = cache if use_cache else None
        return result, None, returned_cache

    def _embed(self, hidden_states: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
        if not self._rotary:
            self._rotary.append(LlamaRotaryEmbedding(self.config, device=hidden_states.device))
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        return self._rotary[0](hidden_states, position_ids)
