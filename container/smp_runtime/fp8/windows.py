"""Windows of FP8: the calls for which one set of scales holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from smp_runtime.fp8.recipe import DelayedScaling
    from smp_runtime.fp8.scales import LinearScales


class Window:
    """Calls of linear layers with one set of scales: those in a context of the script, or of the whole job.

    Args:
        recipe: of the scales.
        records: whether the greatest values in it count for later scales, as in training.
        keeps: whether a layer has the scales of its first call in the window, also when it is called again after an update.

    Attributes:
        is_used: whether a layer has been called in it.
    """

    def __init__(self, recipe: DelayedScaling, *, records: bool, keeps: bool) -> None:
        self.recipe = recipe
        self.records = records
        self.is_used = False
        self._kept: dict[int, torch.Tensor] | None = {} if keeps else None

    def scale_of(self, scales: LinearScales, device: torch.device) -> torch.Tensor:
        """Return the scales of a layer in this window."""
        if self._kept is None:
            return scales.scale_on(device)
        found = self._kept.get(id(scales))
        if found is None:
            found = self._kept[id(scales)] = scales.scale_on(device)
        return found
