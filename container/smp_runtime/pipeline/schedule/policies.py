"""The order of a pipeline's tasks under each schedule. A new schedule is one class here, and its name in the table below.

The planner follows a policy when it makes an order; a rank follows it where no order is planned yet. What planning without a
runtime must know of a schedule too, its traits, stands in :mod:`smp_config.schedules`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from smp_config.schedules import DEFAULT_SCHEDULE, TRAITS
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.schedule.actions import TaskKind


class Policy:
    """Microbatches follow each other freely, at most ``active`` in flight, backward passes first; others override."""

    #: The schedule whose traits it has.
    schedule = DEFAULT_SCHEDULE

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes leave gradients of weights for later."""
        return TRAITS[self.schedule].splits_backward

    def wave(self, microbatch: int, active: int) -> int | None:
        """The wave that a microbatch belongs to, or None where there are no waves.

        On every rank, all forward passes of a wave come before its first backward pass, and no wave begins before the one
        before it is finished. Waves are numbered from 0, in the order of their microbatches, and none has more than
        ``active``, since it could not come to its first backward pass.
        """
        return None

    def urgency(self, phase: TaskKind, microbatch: int) -> tuple[Any, ...]:
        """Of the tasks that could run, the one with the least goes first, where no order is planned."""
        return phase is not TaskKind.BACKWARD, microbatch

    def admits(self, microbatch: int, in_flight: Collection[int], active: int) -> bool:
        """Whether a microbatch may begin while others are in flight: begun and not finished."""
        wave = self.wave(microbatch, active)
        return len(in_flight) < active and all(self.wave(other, active) == wave for other in in_flight)

    def backward_waits_for(self, microbatch: int, count: int, active: int) -> Sequence[int]:
        """Of ``count`` microbatches, those whose forward passes end before this one's backward pass begins."""
        wave = self.wave(microbatch, active)
        return [] if wave is None else [other for other in range(count) if self.wave(other, active) == wave]


class Interleaved(Policy):
    """Backward first: 1F1B, and what comes near it on a graph that is no chain (PipeDream-Flush; Narayanan et al., 2021)."""


class ZeroBubble(Policy):
    """Backward first, and gradients of weights where a stage would idle (ZB-H1 on a chain; Qi et al., 2023).

    A microbatch is in flight at a stage until its gradients of weights are there, so that no stage holds more than interleaved.
    """

    schedule = "zero_bubble"


class Simple(Policy):
    """All forwards, then all backwards (GPipe; Huang et al., 2019), in waves of as many microbatches as may be active."""

    schedule = "simple"

    def wave(self, microbatch: int, active: int) -> int | None:
        """So many microbatches one after the other as may be active."""
        return microbatch // active

    def urgency(self, phase: TaskKind, microbatch: int) -> tuple[Any, ...]:
        """Forward first."""
        return phase is TaskKind.BACKWARD, microbatch


class OnlyForward(Policy):
    """Steps that are only forward, planned like interleaved ones."""

    schedule = "_only_forward"


#: By the names that the configuration accepts.
POLICIES: dict[str, Policy] = {
    policy.schedule: policy for policy in (Interleaved(), ZeroBubble(), Simple(), OnlyForward())
}


def policy_named(name: str) -> Policy:
    """The policy of a configured schedule.

    Raises:
        SMPUserError: there is none of this name.
    """
    if name not in POLICIES:
        raise SMPUserError(f"pipeline is {name!r}. It is one of {', '.join(map(repr, POLICIES))}.")
    return POLICIES[name]
