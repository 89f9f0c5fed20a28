"""Uses of a GPU's memory, and the memory of a GPU of one pipeline stage by them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_estimator.planning.memory.activations import StageActivations


class Kind(enum.Enum):
    """A use of a GPU's memory; the value is the word in tables."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    MASTER = "master copies"
    ACTIVATIONS = "activations"
    COPIES = "half precision copies"
    GATHERED = "gathered parameters"
    BUCKETS = "reduce buckets"
    SMDDP = "SMDDP buffers"
    COMMUNICATORS = "communicators"


#: Held from the first step to the last; the rest comes and goes within a step.
STATE = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.MASTER)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one GPU in one pipeline stage.

    Attributes:
        stage: counted from 0.
        elements: parameter elements that this rank computes with (after pipeline and tensor parallelism).
        kinds: bytes by kind, in backward.
        at_loss: bytes at the loss, where no gradient is there yet; 0 where it is part of backward like any other moment.
        gradient_copy: bytes of the fp32 copy of half precision gradients, in ``optimizer.step()`` only.
        in_update: bytes in ``optimizer.step()``, when activations and buckets are gone.
    """

    stage: int
    layers: int
    elements: int
    kinds: dict[Kind, int]
    activations: StageActivations
    at_loss: int = field(repr=False)
    gradient_copy: int = field(repr=False)
    in_update: int = field(repr=False)

    @property
    def in_backward(self) -> int:
        """Return the bytes of all kinds, in backward."""
        return sum(self.kinds.values())

    @property
    def total(self) -> int:
        """Return the bytes at the worst moment."""
        return max(self.in_backward, self.at_loss, self.in_update)

    @property
    def state(self) -> int:
        """Return the bytes of parameters, gradients, optimizer state and master copies."""
        return sum(self.kinds[kind] for kind in STATE)
