"""``DistributedAttentionLayer``, split by heads over the ranks, and ``FlashAttentionLayer``, for a stacked ``qkv``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.activations.marking import mark
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.nn.attention_scores import Scoring, alibi_slopes, attend, rotate
from smp_runtime.nn.linear import ColumnProjection, RowProjection
from smp_runtime.nn.settings import LayerSettings
from smp_runtime.nn.sublayer import HalfBlock
from smp_runtime.tensor_parallel.activation_layout import split_dropout

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


class DistributedAttentionLayer(HalfBlock):
    """Self or cross attention, a linear map and dropout; added to the input, and normalized if asked for.

    It is checkpointed if the configuration sets ``checkpoint_attentions``.

    Args:
        num_attention_heads, attention_head_size, hidden_size: as in :class:`DistributedTransformerLayer`.
        attention_dropout_prob, hidden_dropout_prob, layernorm_epsilon: as there.
        initializer_range, use_normal_initialization, causal_mask_size: as there.
        pre_layernorm, post_layernorm: as there.
        cross_attention: keys and values come from ``cross_states``.
        options: more of :class:`smp_runtime.nn.settings.LayerSettings`.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide the heads.

    Example:
        >>> attention = smp.nn.DistributedAttentionLayer(num_attention_heads=4, attention_head_size=16, hidden_size=64)
        >>> attention((torch.randn(2, 10, 64), None)).shape  # sequences of 10 positions, and no mask
        torch.Size([2, 10, 64])
    """

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        settings = LayerSettings.of(locals())
        super().__init__(settings)
        self.cross_attention = cross_attention
        self.num_local_heads = self.share_of("num_attention_heads", num_attention_heads)
        key_heads = settings.num_key_value_heads or num_attention_heads
        self.num_local_key_value_heads = self.share_of("num_key_value_heads", key_heads)
        size, std = attention_head_size, self._weight_std()
        bias = settings.use_qkv_bias
        if settings.fused_qkv:
            self.query_key_value = ColumnProjection(hidden_size, 3 * num_attention_heads * size, std, bias)
        else:
            self.query = ColumnProjection(hidden_size, num_attention_heads * size, std, bias)
            self.key = ColumnProjection(hidden_size, key_heads * size, std, bias)
            self.value = ColumnProjection(hidden_size, key_heads * size, std, bias)
        self.dense = RowProjection(
            num_attention_heads * size,
            hidden_size,
            self._weight_std(ends_in_residual=True),
            settings.use_attn_dense_bias,
            self.row_reduction,
        )
        self._add_norms()
        #: Without parameters; it knows whether it drops out, and scripts look for it.
        self.flashmod = FlashAttentionLayer(attention_dropout_prob, attention_head_size)
        self._scoring = self._make_scoring()
        if self.tensor_group.ranks.cfg.checkpoint_attentions:
            mark(self)

    def forward(self, inputs: tuple[Any, ...]) -> torch.Tensor:
        """Compute attention of ``(hidden_states, attention_mask)``, with ``cross_states`` second in cross attention.

        Args:
            inputs: ``hidden_states`` and ``cross_states`` are ``[batch, seq, hidden]``, ``attention_mask`` is added to
                the scores, ``[batch, 1, 1, keys]``, or None; booleans are True for a position that takes part. Positions
                ``[batch, seq]`` for rotary embedding may follow the mask.

        Returns:
            ``[batch, seq, hidden]``.
        """
        cross = None
        if self.cross_attention:
            states, cross, mask, *rest = inputs
        else:
            states, mask, *rest = inputs
        positions, cache = (*rest, None, None)[:2]
        if not self.converts:
            return self._inside(states, cross, mask, positions, cache)
        attended = states if cross is None else cross
        # First of all: here the ranks agree on the shapes, which they gather next.
        mask = self.flow.enter_mask(mask, attended, self._scoring.causal, positions)
        entered_cross = None if cross is None else self.flow.enter(cross)
        entered = self.flow.enter(states)
        output = self._inside(entered, entered_cross, mask, self.flow.enter_ids(positions, states))
        return self.flow.leave(output, states)

    def _inside(
        self,
        states: torch.Tensor,
        cross: torch.Tensor | None,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        cache: Any = None,
    ) -> torch.Tensor:
        ready = self.ready()
        normed = self.normed(states, ready)
        return self._residual(states, self.change(normed, cross, mask, positions, ready, cache), ready[2:4])

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.num_local_heads = self.settings.num_attention_heads
        self.num_local_key_value_heads = self.settings.num_key_value_heads or self.num_local_heads
        self._scoring = self._make_scoring()

    def ready(self) -> list[torch.Tensor | None]:
        """Return the parameters that work on rows, ready for use."""
        return self._row_parameters(self.dense.bias)

    def change(
        self,
        normed: torch.Tensor,
        cross: torch.Tensor | None,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        ready: list[torch.Tensor | None],
        cache: Any = None,
    ) -> torch.Tensor:
        """Return the attention's addition to the residual stream; activations are laid out as inside the block.

        Args:
            cache: has keys and values of earlier tokens for this rank's heads, and gets those of these; or None.
        """
        query, key, value = self._heads(normed, cross)
        settings = self.settings
        # Before the cache, which keeps keys that are turned already.
        if settings.rotary_frequencies is not None:
            turn = (settings.rotary_frequencies, settings.rotary_interleaved, settings.rotary_scale, positions)
            query, key = rotate(query, *turn), rotate(key, *turn)
        if cache is not None:
            key, value = cache.update(key, value, settings.layer_idx)
            mask = None if mask is None else mask[..., -key.shape[2] :]  # a window's has fewer than there were
        self._check_length(key.shape[2])
        dropout = settings.attention_dropout_prob if self.training else 0.0
        with split_dropout(self.tensor_group, query.device, dropout > 0.0):
            context = self.flashmod.weigh(query, key, value, mask, self._scoring)
        context = context.transpose(1, 2).flatten(2)
        output = self.flow.rows(context, self.dense.weight, ready[4])
        return self.flow.dropout(output, settings.hidden_dropout_prob, self.training)

    def _heads(
        self, normed: torch.Tensor, cross: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of this rank's heads, each ``[batch, heads, seq, head size]``."""
        size = self.settings.attention_head_size
        if self.settings.fused_qkv:
            weights, biases = [self.query_key_value.weight], [self.query_key_value.bias]
            (together,) = self.flow.columns(normed, weights, biases)
            query, key, value = together.unflatten(-1, (self.num_local_heads, 3 * size)).transpose(1, 2).chunk(3, -1)
            return query, key, value
        maps = [self.query, self.key, self.value]
        # One call for all maps of one input, which is gathered once and whose gradients are summed once.
        if cross is None:
            results = self.flow.columns(normed, [m.weight for m in maps], [m.bias for m in maps])
        else:
            results = self.flow.columns(normed, [self.query.weight], [self.query.bias])
            results += self.flow.columns(cross, [m.weight for m in maps[1:]], [m.bias for m in maps[1:]])
        query, key, value = (result.unflatten(-1, (-1, size)).transpose(1, 2) for result in results)
        return query, key, value

    def _make_scoring(self) -> Scoring:
        settings = self.settings
        scale = 1.0
        if settings.scale_attention_scores:
            scale = settings.attention_head_size**-0.5
        if settings.scale_attn_by_layer_idx and settings.layer_idx is not None:
            scale /= settings.layer_idx + 1
        causal = settings.causal_mask_size is not None and not self.cross_attention
        window = settings.window_size if causal else None
        return Scoring(scale, causal, window, self._local_slopes(), settings.attention_in_fp32)

    def _local_slopes(self) -> tuple[float, ...] | None:
        """Return the ALiBi slopes of this rank's heads, if the layer uses them."""
        settings = self.settings
        if self.cross_attention or not settings.use_alibi:
            return None
        # The slopes depend on a head's number among all heads.
        first = self.tensor_group.rank * self.num_local_heads
        slopes = alibi_slopes(settings.num_attention_heads, settings.alibi_bias_max)
        return slopes[first : first + self.num_local_heads]

    def _check_length(self, length: int) -> None:
        longest = self.settings.causal_mask_size
        # Sliced activations may be padded up to the next multiple of the ranks.
        if self._scoring.causal and longest is not None and length - self.tensor_group.size >= longest:
            raise SMPUserError(
                f"the sequence has {length} tokens, but causal_mask_size is {longest}: shorten it, or make the layer with a "
                f"causal_mask_size of at least {length}",
                code="SMP307",
            )


class FlashAttentionLayer(nn.Module):
    """Scaled dot product attention; PyTorch picks its flash, memory efficient or plain kernel.

    Args:
        attention_dropout_prob: probability of dropping an attention weight in training.
        attention_head_size: channels of a head, needed with ``scale_attention_scores``, which divides scores by its square root.
        scale_attention_scores: see there.
        scale_attn_by_layer_idx: divide scores by ``layer_idx + 1`` too.
        layer_idx: the layer's number, from 0.
        scale: factor of the scores, in place of all of the above.
        triton_flash_attention: has no effect, with a warning: masks, linear biases and dropout work with PyTorch's kernels.
        use_alibi: linear biases of attention: those in the mask that ``forward`` gets, or computed where it gets none.

    Raises:
        SMPUserError: a size or number that the scale needs is missing.

    Example:
        >>> attention = smp.nn.FlashAttentionLayer(attention_dropout_prob=0.0, attention_head_size=16)
        >>> attention(torch.randn(2, 10, 3, 4, 16)).shape  # queries, keys and values of 2 samples, 10 positions, 4 heads
        torch.Size([2, 4, 10, 16])
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
        if triton_flash_attention:
            sessions.say_once(
                "FlashAttentionLayer(triton_flash_attention=True) ignored: PyTorch's attention computes masks and linear biases "
                "itself, and drops attention weights too if attention_dropout_prob is not 0"
            )
        self.scale = scale if scale is not None else 1.0
        if scale is None and scale_attention_scores:
            if attention_head_size is None:
                raise SMPUserError(
                    "scale_attention_scores is true but attention_head_size is None; pass the size of a head, or scale=",
                    code="SMP307",
                )
            self.scale /= attention_head_size**0.5
        if scale is None and scale_attn_by_layer_idx:
            if layer_idx is None:
                raise SMPUserError(
                    "scale_attn_by_layer_idx is true but layer_idx is None; pass the layer's number, from 0",
                    code="SMP307",
                )
            self.scale /= layer_idx + 1

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Compute attention of ``qkv``, ``[batch, seq, 3, heads, head size]``.

        Args:
            attn_mask: added to the scores, broadcastable to ``[batch, heads, seq, seq]``; under ``use_alibi`` it holds
                the linear biases.
            causal: each token attends to itself and those before it.

        Returns:
            ``[batch, heads, seq, head size]``.
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        slopes = alibi_slopes(query.shape[1]) if self.use_alibi and attn_mask is None else None
        return self.weigh(query, key, value, attn_mask, Scoring(self.scale, causal, slopes=slopes))

    def weigh(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Compute attention of separate queries, keys and values; see :func:`.attend`."""
        dropout = self.attention_dropout_prob if self.training else 0.0
        return attend(query, key, value, mask, scoring, dropout)
