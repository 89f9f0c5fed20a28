"""``DistributedTransformerOutputLayer``: each rank computes some of the intermediate features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_runtime.nn.linear import ColumnProjection, RowProjection
from smp_runtime.nn.settings import ACTIVATIONS, LayerSettings
from smp_runtime.nn.sublayer import HalfBlock

if TYPE_CHECKING:
    import torch


class DistributedTransformerOutputLayer(HalfBlock):
    """Two linear maps with an activation between, and dropout; added to the input, and normalised if asked for.

    Args:
        hidden_size, intermediate_size, hidden_dropout_prob, activation: as in :class:`DistributedTransformerLayer`.
        layernorm_epsilon, initializer_range, use_normal_initialization: as there.
        pre_layernorm, post_layernorm: as there.
        fp32_residual_addition: add the residual in float32.
        options: more of :class:`smp_runtime.nn.settings.LayerSettings`.

    Raises:
        IndivisibleError: (a ``ValueError``) the ranks do not divide the intermediate features.

    Example:
        >>> output = smp.nn.DistributedTransformerOutputLayer(hidden_size=64, intermediate_size=256)
        >>> output(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **options: Any,
    ) -> None:
        settings = LayerSettings.of(locals())
        super().__init__(settings)
        self.share_of("intermediate_size", intermediate_size)
        bias = settings.use_mlp_bias
        self.dense1 = ColumnProjection(hidden_size, intermediate_size, self._weight_std(), bias)
        if settings.gated_mlp:
            self.gate = ColumnProjection(hidden_size, intermediate_size, self._weight_std(), bias)
        std = self._weight_std(ends_in_residual=True)
        self.dense2 = RowProjection(intermediate_size, hidden_size, std, bias, self.row_reduction)
        self._add_norms(with_pre=not settings.single_pre_layernorm)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        if not self.converts:
            return self._inside(inputs)
        return self.flow.leave(self._inside(self.flow.enter(inputs)), inputs)

    def _inside(self, states: torch.Tensor) -> torch.Tensor:
        ready = self.ready()
        return self._residual(states, self.change(self.normed(states, ready), ready), ready[2:4])

    def ready(self) -> list[torch.Tensor | None]:
        """Return the parameters that work on rows, ready for use."""
        return self._row_parameters(self.dense2.bias)

    def change(self, normed: torch.Tensor, ready: list[torch.Tensor | None]) -> torch.Tensor:
        """Return the layer's addition to the residual stream; activations are laid out as inside the block."""
        maps = [self.dense1, self.gate] if self.settings.gated_mlp else [self.dense1]
        weights = [linear.weight for linear in maps]
        biases = [linear.bias for linear in maps]
        # Both maps in one call, since the flow gathers the sliced input once for them.
        first, *gates = self.flow.columns(normed, weights, biases)
        activate = ACTIVATIONS[self.settings.activation]
        features = activate(gates[0]) * first if gates else activate(first)
        output = self.flow.rows(features, self.dense2.weight, ready[4])
        return self.flow.dropout(output, self.settings.hidden_dropout_prob, self.training)
