"""``DistributedTransformerLayer``: attention and output layer, shared by the tensor parallel ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.activations.functional import checkpoint
from smp_runtime.activations.marking import is_marked
from smp_runtime.nn.attention import DistributedAttentionLayer
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.feed_forward import DistributedTransformerOutputLayer
from smp_runtime.nn.settings import LayerSettings
from smp_runtime.tensor_parallel.activation_layout import ActivationFlow, choose_flow

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


class DistributedTransformerLayer(DistributedModule):
    """One transformer layer.

    Args:
        num_attention_heads: heads over all ranks.
        attention_head_size: channels of a head.
        hidden_size: channels of input and output.
        intermediate_size: features between the output layer's maps, over all ranks.
        attention_dropout_prob: of attention weights.
        hidden_dropout_prob: of what both halves add.
        activation: ``"gelu"``, ``"relu"``, or another of :data:`smp_runtime.nn.settings.ACTIVATIONS`.
        layernorm_epsilon: added to variances.
        initializer_range: standard deviation of the weights under ``use_normal_initialization``.
        use_normal_initialization: else as PyTorch does.
        causal_mask_size: longest sequence under a causal mask, in positions; None attends everywhere.
        add_cross_attention: a second attention, with keys and values from ``cross_states``.
        pre_layernorm: normalize the input of each half; one of the two must be true.
        post_layernorm: normalize the output of each half.
        options: more of :class:`smp_runtime.nn.settings.LayerSettings`, such as ``use_alibi`` and ``alibi_bias_max``.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide the heads or the intermediate features.
        SMPUserError: settings that exclude each other.

    Example:
        >>> sizes = {"num_attention_heads": 4, "attention_head_size": 16, "hidden_size": 64, "intermediate_size": 256}
        >>> layer = smp.nn.DistributedTransformerLayer(**sizes, causal_mask_size=32)
        >>> output, mask = layer((torch.randn(2, 10, 64), None))  # sequences of 10 positions, and no other mask
        >>> output.shape
        torch.Size([2, 10, 64])
    """

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = LayerSettings.of(locals())
        arguments = self.settings.as_arguments()
        self.flow: ActivationFlow = choose_flow(self.tensor_group)
        self.converts = True
        self.attention = DistributedAttentionLayer(**arguments)
        self.cross_attention = (
            DistributedAttentionLayer(cross_attention=True, **arguments) if add_cross_attention else None
        )
        self.output = DistributedTransformerOutputLayer(**arguments)
        for half in (self.attention, self.cross_attention, self.output):
            if half is not None:
                half.converts = False

    #: The compiled method. Entry and exit stay outside, since the ranks may agree on shapes there.
    compiled_method = "_inside"

    def around_compiled(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`HalfBlock`."""
        return self.attention.around_compiled()

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.flow = choose_flow(alone)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the layer's output, in a tuple like ``inputs``.

        Args:
            inputs: ``(hidden_states, attention_mask)``; with cross attention ``(hidden_states, cross_states,
                attention_mask, cross_mask)``. States are ``[batch, seq, hidden]``; masks are added to the scores,
                ``[batch, 1, 1, keys]``, or None. Positions ``[batch, seq]`` for rotary embedding may follow, and a cache.
        """
        if not self.converts:
            return (self._inside(inputs), *inputs[1:])
        states = inputs[0]
        output = self._inside(enter_all(self.flow, self.settings, inputs))
        return (self.flow.leave(output, states), *inputs[1:])

    def _inside(self, inputs: tuple[Any, ...]) -> torch.Tensor:
        if self.cross_attention is not None:
            states, cross, mask, cross_mask, *rest = inputs
        else:
            (states, mask, *rest), cross, cross_mask = inputs, None, None
        if self.settings.parallel_attn_output:
            return self._parallel(states, mask, *rest)
        stream = self.attention((states, mask, *rest))
        if self.cross_attention is not None:
            stream = self.cross_attention((stream, cross, cross_mask))
        return self._narrowed(self.output(stream), states)

    def _parallel(
        self, states: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """Run both halves on the same input."""
        ready = self.attention.ready()
        normed = self.attention.normed(states, ready)
        attend = self.attention.change
        if is_marked(self.attention):  # checkpoint it here, since its own call is bypassed
            change = checkpoint(attend, normed, None, mask, positions, ready)
        else:
            change = attend(normed, None, mask, positions, ready, cache)
        ready = self.output.ready()
        if not self.settings.single_pre_layernorm:
            normed = self.output.normed(states, ready)
        return self._narrowed(self.output.added(states, change, self.output.change(normed, ready)), states)

    def _narrowed(self, stream: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the stream, which may be in float32 inside the layer, in the type of the layer's input."""
        return stream.to(states.dtype) if self.settings.fp32_residual_addition else stream


def enter_all(flow: ActivationFlow, settings: LayerSettings, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a layer's inputs, laid out as inside the block."""
    causal = settings.causal_mask_size is not None
    states = inputs[0]
    if settings.add_cross_attention:
        _, cross, mask, cross_mask, *rest = inputs
        middle = (
            flow.enter(cross),
            flow.enter_mask(mask, states, causal, rest[0] if rest else None),
            flow.enter_mask(cross_mask, cross, False),
        )
    else:
        _, mask, *rest = inputs
        middle = (flow.enter_mask(mask, states, causal, rest[0] if rest else None),)  # type: ignore[assignment]
    ids = (flow.enter_ids(each, states) if isinstance(each, torch.Tensor) else each for each in rest)
    return (flow.enter(states), *middle, *ids)
