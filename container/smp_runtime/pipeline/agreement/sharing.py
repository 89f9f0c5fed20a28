"""What pipelines tell each other: a value of each root stage, for all that must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane


@dataclass(frozen=True)
class PipelineAgreement:
    """Gives the values of all pipelines that must agree; equal where the same ones do.

    Attributes:
        control: carries the values.
        members: global ranks of their root stages, the deciding one first.
    """

    control: ControlPlane
    members: Sequence[int]

    def __call__(self, value: Any) -> list[Any]:
        """Return the value of each, in the order of ``members``; every member calls it."""
        return self.control.allgather(value, self.members)
