"""Scales what backward adds to gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

_Gradients = tuple[torch.Tensor | None, ...]


class AccumulationScale:
    """Multiplies what ``backward()`` adds to the gradients of ``parameters``; ``torch.autograd.grad`` is left alone.

    Hooks of a tensor see both. So these are hooks of the graph's nodes that accumulate; each lasts as long as it is
    kept, and as its parameter stays of one type and on one device.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], factor: Callable[[], float]) -> None:
        self._parameters = list(parameters)
        self._factor = factor
        self._kinds: list[tuple[torch.dtype, torch.device] | None] = [None] * len(self._parameters)
        self._nodes: list[torch.autograd.graph.Node | None] = [None] * len(self._parameters)
        self.refresh()

    def refresh(self) -> None:
        """Follow parameters that have been cast or moved."""
        weak = weakref.ref(self)  # the garbage collector does not look into nodes

        def hook(gradients: _Gradients) -> _Gradients | None:
            return None if (me := weak()) is None else me.scaled(gradients)

        for index, parameter in enumerate(self._parameters):
            kind = (parameter.dtype, parameter.device)
            if kind != self._kinds[index] and parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_prehook(hook)
                self._kinds[index], self._nodes[index] = kind, node

    def scaled(self, gradients: _Gradients) -> _Gradients | None:
        """What is added instead of ``gradients``; None for themselves."""
        factor = self._factor()
        return None if factor == 1.0 else tuple(None if g is None else g * factor for g in gradients)
