"""Gradients of parameters that an optimizer does not update, such as a layer that joins its groups later.

A script may clip them together with the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from smp_runtime.optim.gradient_norms import clamp, multiply
from smp_runtime.tensors.parameter_attributes import get_gradient

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.job.trained import TrainedModel


class OtherGradients:
    """Gradients of parameters outside of an optimizer's groups.

    Args:
        model: the model of the optimizer's shards; None if the optimizer updates the parameters themselves.
        own: the optimizer's parameters.
        among: the parameters to look at; None for the optimizer's own alone.
        scale: the loss scale of the gradients.

    Attributes:
        scale: the loss scale of the gradients.
    """

    def __init__(
        self,
        model: TrainedModel | None,
        own: Iterable[nn.Parameter],
        among: Iterable[nn.Parameter] | None,
        scale: float,
    ) -> None:
        self.scale = scale
        #: Parameter, gradient, and whether this rank counts it in norms.
        self._found: list[tuple[nn.Parameter, torch.Tensor, bool]] = []
        shards = model.optimizer_shards or {} if model is not None else {}
        state = model.sharded_state if model is not None else None
        known = set(own)
        for parameter in dict.fromkeys(among or ()):
            if parameter in known:
                continue
            shard = shards.get(parameter)
            if shard is not None:
                gradient = shard.gradient
            elif parameter in shards:  # another rank has the gradient
                gradient = None
            else:
                gradient = get_gradient(parameter)
            if gradient is not None:
                counts = state is None or shard is None or state.counts(shard)
                self._found.append((parameter, gradient, counts))

    def pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the parameters and gradients that this rank counts in norms, without the loss scale."""
        pairs = []
        for parameter, gradient, counts in self._found:
            if not counts:
                continue
            unscaled = gradient if self.scale == 1.0 else gradient.float() / self.scale
            pairs.append((parameter, unscaled))
        return pairs

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply them in place."""
        multiply([gradient for _, gradient, _ in self._found], factor)

    def clamp(self, limit: float) -> None:
        """Bring their elements between ``-limit`` and ``limit``."""
        clamp([gradient for _, gradient, _ in self._found], limit * self.scale)
