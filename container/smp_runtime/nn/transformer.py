"""``DistributedTransformer``: a sequence of distributed layers, with one way in and one way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from smp_runtime.activations.marking import FUNCTION, is_marked, mark, preserves_rng_state, unmark
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.layer import DistributedTransformerLayer, enter_all
from smp_runtime.nn.settings import LayerSettings
from smp_runtime.tensor_parallel.activation_layout import choose_flow

if TYPE_CHECKING:
    from smp_runtime.tensor_parallel.group import TensorGroup


class DistributedTransformer(DistributedModule):
    """``num_layers`` of :class:`DistributedTransformerLayer`.

    Args:
        num_layers: how many.
        num_attention_heads, attention_head_size, hidden_size: as in :class:`DistributedTransformerLayer`.
        intermediate_size, attention_dropout_prob, hidden_dropout_prob: as there.
        activation, layernorm_epsilon, initializer_range: as there.
        use_normal_initialization, causal_mask_size, add_cross_attention: as there.
        pre_layernorm, post_layernorm: as there.
        window_sizes: for each layer, to how many positions before it one attends, or None for all.
        options: more of :class:`smp_runtime.nn.settings.LayerSettings`.

    Attributes:
        seq_layers: the layers, an ``nn.Sequential``.

    Example:
        >>> sizes = {"num_attention_heads": 4, "attention_head_size": 16, "hidden_size": 64, "intermediate_size": 256}
        >>> transformer = smp.nn.DistributedTransformer(num_layers=2, **sizes)
        >>> len(transformer.seq_layers)
        2
    """

    def __init__(  # noqa: PLR0913 - the documented signature
        self,
        num_layers: int = 12,
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
        window_sizes: Sequence[int | None] | None = None,
        **options: Any,
    ) -> None:
        settings = LayerSettings.given(locals())
        super().__init__()
        layers = []
        for index in range(num_layers):
            own = {} if window_sizes is None else {"window_size": window_sizes[index]}
            layer = DistributedTransformerLayer(**{"layer_idx": index, **settings, **own})
            layer.converts = False
            layers.append(layer)
        self._settings = layers[0].settings if layers else None
        self.seq_layers = nn.Sequential(*layers)
        self.flow = choose_flow(self.tensor_group)

    def become_whole(self, alone: TensorGroup) -> None:
        """See :class:`DistributedModule`."""
        super().become_whole(alone)
        self.flow = choose_flow(alone)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the last layer's output, in a tuple like ``inputs``; see :class:`DistributedTransformerLayer`."""
        if self._settings is None:
            return inputs
        entered = enter_all(self.flow, self._settings, inputs)
        if (
            len(inputs) > 3 and not self._settings.add_cross_attention
        ):  # the cache is changed: each layer gets that of the caller
            output: tuple[Any, ...] = entered
            for layer in self.seq_layers:
                output = layer((output[0], *entered[1:]))
        else:
            output = self.seq_layers(entered)
        return (self.flow.leave(output[0], inputs[0]), *inputs[1:])

    @property
    def gradient_checkpointing(self) -> bool:
        """Return whether layers keep only their inputs for backward.

        Transformers' models set this property on their inner modules.
        """
        return any(is_marked(layer) for layer in self.seq_layers)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        if enabled:
            # Transformers leaves its settings here, in a function that is not called.
            self.checkpoint_layers(preserve_rng_state=preserves_rng_state(self.__dict__.get(FUNCTION)))
        else:
            for layer in self.seq_layers:
                unmark(layer)

    def checkpoint_layers(self, *, preserve_rng_state: bool = True, every: int = 1) -> None:
        """Let each layer, or the first of ``every`` so many, keep only its inputs for backward."""
        for index, layer in enumerate(self.seq_layers):
            if index % every == 0:
                mark(layer, preserve_rng_state)
            else:
                unmark(layer)
