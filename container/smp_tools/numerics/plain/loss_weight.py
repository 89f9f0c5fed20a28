"""The weight of a mean loss in a backward pass: 1/2 for ``(loss / 2).backward()``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_runtime.tensors.torch_private import loss_reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: Nodes that only scale their one input, or pass it on.
_SCALING = ("MulBackward", "DivBackward", "ToCopyBackward", "ViewBackward", "SqueezeBackward", "ReshapeAliasBackward")


class LossWeight:
    """The gradient that arrives at the mean behind a loss.

    Attributes:
        value: known after the backward pass; None if the loss is no scaled mean.
    """

    def __init__(self, loss: torch.Tensor) -> None:
        self.value: float | None = None
        node = _mean_behind(loss.grad_fn)
        self._handle = None if node is None else node.register_prehook(self._came)

    def _came(self, gradients: Sequence[torch.Tensor | None]) -> None:
        gradient = gradients[0]
        if gradient is not None and gradient.numel() == 1:
            self.value = float(gradient)

    def close(self) -> None:
        """Remove the hook, since a script may keep the graph."""
        if self._handle is not None:
            self._handle.remove()


def _mean_behind(node: torch.autograd.graph.Node | None) -> torch.autograd.graph.Node | None:
    """Return the node of the mean that a loss is a multiple of, or None."""
    while node is not None:
        name = node.name()
        is_mean = name.startswith("MeanBackward") or loss_reduction(node) == "mean"
        if is_mean:
            return node
        # Only a multiple of one value keeps the mean's denominator.
        inputs = [found for found, _ in node.next_functions if found is not None]
        is_multiple = name.startswith(_SCALING) and len(inputs) == 1
        if not is_multiple:
            return None
        node = inputs[0]
    return None
