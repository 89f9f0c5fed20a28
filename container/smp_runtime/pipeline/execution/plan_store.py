"""Planned orders: the kinds of steps that have been recorded, and the order of their work on each stage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_runtime.pipeline.schedule.actions import Action, ScheduleError, Segment, nominal_durations, smooth
from smp_runtime.pipeline.schedule.planner import plan as make_plan
from smp_runtime.pipeline.schedule.simulation import simulate

if TYPE_CHECKING:
    from smp_runtime.pipeline.schedule.planner import SchedulePlan
    from smp_runtime.pipeline.schedule.policies import Policy
    from smp_runtime.pipeline.transport.messages import Begin, Record, StepKind

logger = logging.getLogger("smp")

#: Assumed seconds for a message. Plans need no better figure, because stages wait for late messages.
LATENCY = 0.0005
#: A kind of step that leaves its planned order so often in a row is not planned again.
MOST_DIVERGENCES = 3
#: Kinds that are remembered.
MOST_KINDS = 256
#: The first order comes from a warm-up step. After so many steps in it, a new plan uses their durations.
STEPS_BEFORE_REVIEW = 5
#: Another order must be so much better, for the durations that are known by then.
WORTH_CHANGING = 0.98


#: Called on the root stage with every planned order and its segments; a rehearsal listens.
at_plan: list[Callable[[SchedulePlan, Sequence[Segment]], None]] = []


@dataclass
class KindPlan:
    """The plan of one kind of step, and how steps have followed it."""

    orders: dict[int, tuple[Action, ...]] | None = None  # by stage; None before it is planned
    is_new: bool = False  # whether the other stages have not got it yet
    divergences: int = 0  # steps in a row that left the order
    replayed: int = 0  # steps in a row that followed it

    @property
    def replays(self) -> bool:
        """Return whether the next step follows an order."""
        return self.orders is not None

    @property
    def is_recorded(self) -> bool:
        """Return whether a plan is made from the next step, if that step does not leave its order."""
        return self.divergences < MOST_DIVERGENCES if self.orders is None else self.replayed + 1 == STEPS_BEFORE_REVIEW

    def order_of(self, stage: int) -> tuple[Action, ...] | None:
        """Return the order to send to a stage, or None if it already has it or no order exists."""
        if self.orders is None or not self.is_new:
            return None
        return self.orders.get(stage, ())


class PlanStore:
    """The plans of one pipeline; made on the root stage, kept by every stage.

    Args:
        active: most microbatches in flight.
        share: returns the orders of all pipelines that must agree; the first one's count.
        repeatable: whether orders depend only on the work of a step, so that another run has the same ones.
    """

    def __init__(
        self,
        policy: Policy,
        active: int,
        share: Callable[[Any], list[Any]] | None = None,
        *,
        repeatable: bool = False,
    ) -> None:
        self.is_repeatable = repeatable
        self._policy = policy
        self._active = active
        self._share = share
        self._plans: dict[Hashable, KindPlan] = {}
        self._orders: dict[Hashable, tuple[Action, ...]] = {}
        self._changes_buffers: dict[Hashable, bool] = {}

    @property
    def is_shared(self) -> bool:
        """Return whether other pipelines must run their work in the same order."""
        return self._share is not None

    def of(self, kind: StepKind | None) -> KindPlan:
        """Return the plan of a kind of step; only on the root stage.

        None is the kind of steps that differ from each other. They are never planned.
        """
        if kind is None:
            return KindPlan(divergences=MOST_DIVERGENCES)
        is_full = len(self._plans) >= MOST_KINDS
        if is_full and kind not in self._plans:
            self._plans.clear()
        return self._plans.setdefault(kind, KindPlan())

    def order(self, begin: Begin) -> Sequence[Action] | None:
        """Return the order of the step that begins, or None; on every stage."""
        if begin.order is not None:
            if len(self._orders) >= MOST_KINDS:
                self._orders.clear()
            self._orders[begin.kind] = begin.order
        if not begin.replays:
            return None
        return self._orders.get(begin.kind)

    def order_counts(self, kind: StepKind | None) -> bool:
        """Return whether modules change buffers or attributes in such a step, as running statistics do.

        If they do, the order of the microbatches matters, and only a planned order guarantees it. Before such a
        step has been seen, the result is True. Only for the root stage.
        """
        return kind is None or self._changes_buffers.get(kind.course, True)

    def wants_record(self, kind: Hashable, diverged: bool) -> bool:
        """Count a step at its end, and return whether to plan from the records of the stages; only on the root stage."""
        plan = self._plans[kind]
        is_recorded = plan.is_recorded
        plan.is_new = False
        if diverged:
            plan.divergences += 1
            plan.orders, plan.replayed = None, 0
            if plan.divergences == MOST_DIVERGENCES:
                logger.info(
                    "steps of one kind differ from each other; their work runs in the order in which it arrives from now on"
                )
            return False
        if plan.orders is not None:
            plan.divergences = 0
            plan.replayed += 1
        return is_recorded

    def learn(self, kind: StepKind, records: Sequence[Record]) -> None:
        """Plan from the records of a step; only on the root stage.

        No plan is made if calls in that step waited for results that are known by now, or if its microbatches must
        run one after the other.
        """
        changed = any(record.changed_buffers for record in records)
        former = self._changes_buffers.get(kind.course, False)
        self._changes_buffers[kind.course] = changed or former
        is_serial = any(record.is_serial for record in records)
        has_learned = any(record.learned for record in records)
        orders = None
        if is_serial:
            self._plans[kind].divergences = MOST_DIVERGENCES  # there is nothing to plan
        elif not has_learned:
            segments = list(itertools.chain.from_iterable(record.segments for record in records))
            orders = self._plan(segments, self._plans[kind].orders)
        # All pipelines share, also one that has planned nothing: the others wait for its answer.
        if self._share is not None:
            orders = self._share(orders)[0]
        if orders is not None:
            self._plans[kind].orders, self._plans[kind].is_new = orders, True

    def _plan(
        self, segments: Sequence[Segment], present: Mapping[int, tuple[Action, ...]] | None
    ) -> dict[int, tuple[Action, ...]] | None:
        try:
            smoothed = nominal_durations(segments) if self.is_repeatable else smooth(segments)
            made = make_plan(smoothed, policy=self._policy, active=self._active, latency=LATENCY)
            if present is not None:
                now = simulate(present, smoothed, active=self._active, latency=LATENCY).makespan
                if made.makespan > WORTH_CHANGING * now:
                    return None
        except ScheduleError as error:
            logger.warning("no order could be planned, work runs as it arrives: %s", error)
            return None
        for hear in at_plan:
            hear(made, smoothed)
        logger.debug("planned a step: %.1f ms, idle %s, %s", made.makespan * 1e3, made.idle, made.rule)
        return {stage: tuple(order) for stage, order in made.orders.items()}
