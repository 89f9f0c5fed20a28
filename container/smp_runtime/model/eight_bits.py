"""The parameter ``fp8`` of version 1: linear layers of wrapped models multiply in 8 bits, with scales that follow from updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_runtime.data.position import SourcePositions
from smp_runtime.fp8 import autocast
from smp_runtime.fp8.group import JobGroup
from smp_runtime.fp8.layers import EightBitLayers
from smp_runtime.fp8.recipe import DelayedScaling

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session

#: The scales' name in checkpoints, among positions in data sets.
_NAME = "fp8 scales"


class JobScales:
    """The scales of a job, which end with it."""

    outlives_regrouping = True

    def __init__(self, session: Session) -> None:
        ranks = session.ranks
        group = JobGroup(
            lambda: session.ranks.collectives,
            lambda: session.ranks.process_group(Group.WORLD),
            ranks.size(Group.WORLD),
            ranks.device,
        )
        self.layers = EightBitLayers(DelayedScaling(), always=True, group=group, speaks=ranks.rank == 0)
        end = autocast.begin(self.layers, follows_optimizers=False)
        session.after_update.append(lambda _: self.layers.optimizer_stepped())
        session.at_leave.append(end)
        SourcePositions.of(ranks).keep(_NAME, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the scales, the same on all ranks."""
        return self.layers.state_dict()

    def check_state(self, state: Any) -> None:
        """Raise CheckpointError unless they can be loaded."""
        self.layers.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved scales."""
        self.layers.load_state_dict(state)


def adopt_layers(session: Session, module: nn.Module) -> None:
    """Let a model's linear layers multiply in 8 bits, if the job asks for it; call it before parameters are placed."""
    if session.ranks.cfg.fp8:
        session.ranks.keep(JobScales, lambda: JobScales(session)).layers.adopt(module)


def note_weights(ranks: Ranks, module: nn.Module) -> None:
    """Remember the placed weights of layers that modules around them apply."""
    scales = ranks.kept(JobScales)
    if scales is not None:
        scales.layers.note_weights(module)
