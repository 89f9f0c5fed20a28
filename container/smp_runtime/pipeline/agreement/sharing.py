"""Agreement between pipelines: each root stage shares a value with all pipelines that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane


@dataclass(frozen=True)
class PipelineAgreement:
    """An all-gather of one value per pipeline, for pipelines that must agree; equal for the same set of pipelines.

    Attributes:
        control: carries the values.
        members: global ranks of their root stages, the deciding one first.
    """

    control: ControlPlane
    members: Sequence[int]

    def __call__(self, value: Any) -> list[Any]:
        """Return each member's value, in the order of ``members``; every member calls it."""
        return self.control.allgather(value, self.members)
