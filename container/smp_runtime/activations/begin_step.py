"""What a step of a model does first with its regions, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_runtime.activations.activations import Activations, StagedRegions
from smp_runtime.activations.marking import has_marks
from smp_runtime.activations.taking_over import take_over

if TYPE_CHECKING:
    from torch import nn


def begin_step(module: nn.Module, placement: StagedRegions | None) -> None:
    """A step of a model begins; every rank of a pipeline calls it.

    Args:
        module: what was wrapped.
        placement: of its regions on the stages of a pipeline; None without one.

    Raises:
        SMPUserError: a checkpointed module is split over stages that were set by hand.
    """
    here = Activations.here()
    if placement is not None:
        here.placement = placement
    if placement is not None or here.offloader is not None:
        take_over(module)
    if here.placement is not None:
        here.placement.check(module)
    here.step_begins(here.offloader is not None and has_marks(module))
