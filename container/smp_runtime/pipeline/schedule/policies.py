"""The order of a pipeline's tasks under each schedule; a new schedule is one class here and a table entry below.

The planner follows a policy when it makes an order. A rank follows it if no order is planned yet. Traits of
a schedule that planning without a runtime must also know are in :mod:`smp_config.schedules`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from smp_config.schedules import DEFAULT_SCHEDULE, TRAITS
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.schedule.actions import TaskKind


class Policy:
    """The base policy: microbatches follow each other freely, at most ``active`` in flight, backward passes first.

    Subclasses override parts of it.
    """

    #: The schedule that defines the policy's traits.
    schedule = DEFAULT_SCHEDULE

    @property
    def splits_backward(self) -> bool:
        """Return whether backward passes leave gradients of weights for later."""
        return TRAITS[self.schedule].splits_backward

    def wave(self, microbatch: int, active: int) -> int | None:
        """Return the wave that a microbatch belongs to, or None if there are no waves.

        On every rank, all forward passes of a wave come before its first backward pass, and no wave begins before
        the one before it is finished. Waves are numbered from 0, in the order of their microbatches. None has more
        than ``active`` microbatches, since it could not reach its first backward pass.
        """
        return None

    def urgency(self, phase: TaskKind, microbatch: int) -> tuple[Any, ...]:
        """Return a sort key: if no order is planned, the runnable task with the smallest key goes first."""
        return phase is not TaskKind.BACKWARD, microbatch

    def admits(self, microbatch: int, in_flight: Collection[int], active: int) -> bool:
        """Return whether a microbatch may begin while others are in flight, which means begun and not finished."""
        wave = self.wave(microbatch, active)
        return len(in_flight) < active and all(self.wave(other, active) == wave for other in in_flight)

    def backward_waits_for(self, microbatch: int, count: int, active: int) -> Sequence[int]:
        """Return those of ``count`` microbatches that must end their forward pass before this one's backward pass begins."""
        wave = self.wave(microbatch, active)
        return [] if wave is None else [other for other in range(count) if self.wave(other, active) == wave]


class Interleaved(Policy):
    """Backward first: 1F1B, or close to it on a graph that is not a chain (PipeDream-Flush; Narayanan et al., 2021)."""


class ZeroBubble(Policy):
    """Backward first, and gradients of weights when a stage would idle (ZB-H1 on a chain; Qi et al., 2023).

    A microbatch is in flight at a stage until its gradients of weights are there, so no stage holds more than with
    :class:`Interleaved`.
    """

    schedule = "zero_bubble"


class Simple(Policy):
    """All forwards, then all backwards (GPipe; Huang et al., 2019), in waves of as many microbatches as may be active."""

    schedule = "simple"

    def wave(self, microbatch: int, active: int) -> int | None:
        """Return the wave; each has ``active`` consecutive microbatches."""
        return microbatch // active

    def urgency(self, phase: TaskKind, microbatch: int) -> tuple[Any, ...]:
        """Return a sort key that puts forward first."""
        return phase is TaskKind.BACKWARD, microbatch


class OnlyForward(Policy):
    """Steps that are only forward, planned like interleaved ones."""

    schedule = "_only_forward"


#: By the names that the configuration accepts.
POLICIES: dict[str, Policy] = {
    policy.schedule: policy for policy in (Interleaved(), ZeroBubble(), Simple(), OnlyForward())
}


def policy_named(name: str) -> Policy:
    """Return the policy of a configured schedule.

    Raises:
        SMPUserError: no policy has this name.
    """
    if name not in POLICIES:
        raise SMPUserError(f"pipeline is {name!r}. It is one of {', '.join(map(repr, POLICIES))}.", code="SMP305")
    return POLICIES[name]
