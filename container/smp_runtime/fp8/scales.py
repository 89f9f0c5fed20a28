"""The scales of one linear layer: of its input, its weight, and the gradient of its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from smp_runtime.fp8.recipe import DelayedScaling

#: The tensors of a layer, by their place in its scales.
INPUT, WEIGHT, GRADIENT = range(3)
TENSORS = 3

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_GREATEST = {kind: torch.finfo(kind).max for kind in (E4M3, E5M2)}


def to_eight_bits(values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return values times a scale, rounded to 8 bits; those beyond the greatest number become it."""
    wide = values if values.dtype is torch.float64 else values.float()
    greatest = _GREATEST[kind]
    return (wide * scale).clamp(-greatest, greatest).to(kind)


def from_eight_bits(rounded: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that 8 bits stand for."""
    wide = rounded.to(torch.float64 if dtype is torch.float64 else torch.float32)
    return (wide / scale).to(dtype)


def find_amax(values: torch.Tensor) -> torch.Tensor:
    """Return the greatest absolute value; 0 for none, and if it is not finite, since no scale fits that."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    greatest = values.detach().abs().amax().float()
    return torch.where(greatest.isfinite(), greatest, 0.0)


class LinearScales:
    """The scales of one linear layer, and the greatest values from which the next ones follow.

    Args:
        name: of the layer, the same on all ranks and in checkpoints.

    Attributes:
        scale: factors before rounding, ``[TENSORS]``; a change makes a new tensor, so that a pass under way keeps its own.
        history: the greatest values of earlier steps, the newest first: ``[amax_history_len, TENSORS]``.
        amax: the greatest values since the last update.
        weight_comes_rounded: whether a gather rounds the weight, and notes its greatest value.
        last: the window of the last forward pass, in which recomputing runs again; None if it was not in 8 bits.
    """

    def __init__(self, name: str, recipe: DelayedScaling, device: torch.device) -> None:
        self.name = name
        self.recipe = recipe
        self.scale = torch.ones(TENSORS, device=device)
        self.history = torch.zeros(recipe.amax_history_len, TENSORS, device=device)
        self.amax = torch.zeros(TENSORS, device=device)
        self.weight_comes_rounded = False
        self.last: Any = None
        self._is_known = False

    @property
    def has_values(self) -> bool:
        """Return whether the layer has multiplied."""
        return bool(self.history.any() or self.amax.any())

    @property
    def is_known(self) -> bool:
        """Return whether an update has seen the layer multiply; the same on all ranks of the group."""
        return self._is_known

    def kind_of(self, tensor: int) -> torch.dtype:
        """Return the format of a tensor."""
        maxima = self.recipe.fp8_format.value
        greatest = maxima.max_bwd if tensor == GRADIENT else maxima.max_fwd
        return E4M3 if greatest == _GREATEST[E4M3] else E5M2

    def note(self, tensor: int, values: torch.Tensor) -> None:
        """Take the greatest value of a tensor into account for later scales."""
        self._move(values.device)
        self.amax[tensor] = torch.maximum(self.amax[tensor], find_amax(values))

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """Return the scales on a device."""
        self._move(device)
        return self.scale

    def _move(self, device: torch.device) -> None:
        if self.scale.device != device:
            self.scale, self.history, self.amax = (each.to(device) for each in (self.scale, self.history, self.amax))

    def change_recipe(self, recipe: DelayedScaling) -> None:
        """Take another recipe; the newest values stay in the history."""
        if recipe.amax_history_len != len(self.history):  # also one that a checkpoint has made longer
            history = torch.zeros(recipe.amax_history_len, TENSORS, device=self.history.device)
            kept = min(len(history), len(self.history))
            history[:kept] = self.history[:kept]
            self.history = history
        self.recipe = recipe

    def restore(self, scale: torch.Tensor, history: torch.Tensor, amax: torch.Tensor) -> None:
        """Take saved values; a shorter history is filled up."""
        device = self.scale.device
        length = max(len(history), self.recipe.amax_history_len)
        self.history = torch.zeros(length, TENSORS, device=device)
        self.history[: len(history)] = history.to(device)
        self.scale, self.amax = scale.to(device), amax.to(device)
        self._is_known = bool(history[:, INPUT].any())

    def update(self, tensors: tuple[int, ...] = (INPUT, WEIGHT, GRADIENT)) -> None:
        """Put the greatest values since the last update into the history, and compute the scales that follow."""
        recipe = self.recipe
        chosen = list(tensors)
        history = self.history.clone()
        history[1:, chosen] = self.history[:-1, chosen]
        history[0, chosen] = self.amax[chosen]
        self.history = history
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(history)
        else:
            amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0]
        # One look at the values for each layer, until it was seen.
        self._is_known = self._is_known or bool(history[0, INPUT] > 0)
        found = self.scale.clone()
        for tensor in chosen:
            found[tensor] = self._find_scale(amax[tensor], self.scale[tensor], _GREATEST[self.kind_of(tensor)])
            self.amax[tensor] = 0.0
        self.scale = found

    def _find_scale(self, amax: torch.Tensor, scale: torch.Tensor, greatest: float) -> torch.Tensor:
        recipe = self.recipe
        if recipe.scaling_factor_compute_algo is not None:
            return recipe.scaling_factor_compute_algo(amax, scale, greatest, recipe)
        # A number over a tensor would be its reciprocal times the number, which rounds twice.
        found = amax.new_tensor(greatest).div(amax) / 2**recipe.margin
        found = torch.where((amax > 0) & amax.isfinite(), found, scale)
        return found.clamp(max=torch.finfo(torch.float32).max)
