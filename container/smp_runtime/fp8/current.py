"""Whether products of a linear layer are in 8 bits now: every linear layer asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

Multiply = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]


class AskedLayers(Protocol):
    """Knows which linear layers multiply in 8 bits."""

    def find_call(self, module: nn.Module) -> Multiply | None:
        """Return the function in place of ``F.linear`` for this call of a module; None for ``F.linear``."""
        ...

    def find_by_weight(self, weight: torch.Tensor) -> Multiply | None:
        """Return the same for a layer whose weight is applied by the module around it."""
        ...


#: Those of this process; none until something asks for FP8.
_layers: list[AskedLayers] = []


def find_call(module: nn.Module) -> Multiply | None:
    """Return the function in place of ``F.linear`` for this call of a module; None for ``F.linear``."""
    return _layers[-1].find_call(module) if _layers else None


def find_by_weight(weight: torch.Tensor) -> Multiply | None:
    """Return the same for a layer whose weight is applied by the module around it."""
    return _layers[-1].find_by_weight(weight) if _layers else None


def begin(layers: AskedLayers) -> None:
    """Let linear layers ask these."""
    _layers.append(layers)


def end(layers: AskedLayers) -> None:
    """Let them no longer ask these."""
    if layers in _layers:
        _layers.remove(layers)
