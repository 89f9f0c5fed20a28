"""The step that a rank is in: what is known of it from entering to leaving, and the wait for it to get somewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

import torch

from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError, SMPUserError
from smp_runtime.module_state.attributes import Attributes
from smp_runtime.pipeline.execution.failures import STEP_FUNCTION, Alarm
from smp_runtime.pipeline.execution.microbatches import Microbatches
from smp_runtime.pipeline.execution.plan_store import PlanStore
from smp_runtime.pipeline.execution.stage_context import StageContext
from smp_runtime.pipeline.execution.step_admission import StepAdmission
from smp_runtime.pipeline.execution.watch import Watch
from smp_runtime.pipeline.transport.messages import Begin, End, Record
from smp_runtime.pipeline.transport.step_call import StepCall
from smp_runtime.tensors.random_state import seed_other_generators, task_seed

logger = logging.getLogger("smp")

#: Most seconds without progress, though a task could run, before a replayed order is given up.
STALL_SECONDS = 10.0


class RunningStep:
    """The step that a rank is in.

    Args:
        context: of the rank's pipeline.
        ranks: global ranks of all stages.
        admission: opened and closed with the step.
        alarm: reset when a step is entered; what it heard ends the wait.
        plans: the orders of the kinds of steps.
        microbatches: of the root stage.
        attributes: of this stage's modules.
        changed: told when something changes that the script's own thread may wait for.
        leave_order: called, with the lock held, when the planned order does not fit.
        active: most microbatches in flight.
        forward_first: whether forward passes go before backward passes.
        watch: of the timeline, if there is one.

    Attributes:
        begun: how the step begins, once that is known.
        end: how it ends, and the tensors of its outputs, once the root stage has told.
        records: of the other stages, on the root stage.
        diverged: whether the step has left its planned order.
    """

    def __init__(
        self,
        context: StageContext,
        ranks: Sequence[int],
        gate: StepAdmission,
        alarm: Alarm,
        plans: PlanStore,
        microbatches: Microbatches,
        attributes: Attributes,
        changed: threading.Condition,
        leave_order: Callable[[str], None],
        *,
        active: int,
        forward_first: bool,
        watch: Watch | None,
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._admission = gate
        self._alarm = alarm
        self._plans = plans
        self._microbatches = microbatches
        self._attributes = attributes
        self._changed = changed
        self._leave_order = leave_order
        self._active = active
        self._forward_first = forward_first
        self._watch = watch
        #: Seconds of the longest step so far that needed no order or kept to it.
        self._longest_step = 0.0
        self._entered = 0.0
        self._has_warned = self._has_warned_of_batches = False
        self._call: StepCall | None = None
        self._buffers: list[tuple[int, int]] = []
        self.begun: Begin | None = None
        self.end: tuple[End, list[torch.Tensor]] | None = None
        self.records: dict[int, Record] = {}
        self.diverged = False

    def enter(self, call: StepCall) -> None:
        """This rank enters a step.

        Args:
            call: how its script has called it.

        Raises:
            StageError: no step can run any more.
        """
        with self._context.lock:
            self._alarm.reset()
            self._entered = time.perf_counter()
            self.begun = self.end = None
            self._call = call
            self.records = {}
            self.diverged = False
            self._microbatches.clear()
            self._context.learned = 0
            self._context.switches.enter()
            self._admission.enter()

    def begin(self, begin: Begin) -> None:
        """It is known how the step begins."""
        context = self._context
        with context.lock:
            self.begun = begin
            context.switches.check(begin.requires, context.stage_of(""))
            context.seed = begin.seed
            order = self._plans.order(begin)
            context.conductor.reset(order, forward_first=self._forward_first, records=begin.is_recorded)
            self._microbatches.active = 1 if begin.is_serial else self._active
            self._buffers = context.buffer_versions()
            self._attributes.begin(looks=begin.is_recorded, alone=begin.is_serial)
            if self._watch is not None:
                self._watch.begin_step(self._admission.step)
        self._compare(begin.call)
        seed_other_generators(task_seed(begin.seed, context.replica, -1, f"stage {context.stage}"))
        self._admission.begin()

    def _compare(self, root: StepCall) -> None:
        """Whether this rank's script has called the same step as the root stage's."""
        if self._call is None:
            return
        rank, root_rank = self._ranks[self._context.stage], self._ranks[self._context.stage_of("")]
        try:
            warning = self._call.check(root, rank, root_rank)
        except SMPUserError as error:
            self._alarm.raised(error, STEP_FUNCTION)
            return
        if warning and not self._has_warned_of_batches:
            self._has_warned_of_batches = True
            logger.warning(warning)

    def own_record(self) -> Record:
        """What this rank did in the step."""
        with self._context.lock:
            changed = self._context.buffer_versions() != self._buffers or self._attributes.carries
            if self._attributes.crosses and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "pipeline stage %d: modules hand on %s from one microbatch to the next and set it after a call of another "
                    "stage, or several times, so the microbatches run one after the other; keep what such a module calls on its "
                    "stage (smp.set_partition), or hand values on as arguments",
                    self._context.stage,
                    ", ".join(self._attributes.carried),
                )
            return Record(
                list(self._context.conductor.record), self._context.learned, changed, self._attributes.crosses
            )

    def went_well(self) -> None:
        """The step has reached its end."""
        if not self.diverged:
            self._longest_step = max(self._longest_step, time.perf_counter() - self._entered)

    def leave(self) -> None:
        """This rank leaves the step, and what was kept for it is forgotten."""
        self._admission.leave()
        if self._watch is not None:
            self._watch.end_step(failed=self._alarm.error is not None)
        self._attributes.end()
        self._context.switches.leave()
        self._context.values.clear()
        self._context.replies.clear()
        self._context.opened.clear()
        self._microbatches.clear()

    def wait(self, is_true: Callable[[], bool], what: str, of: Callable[[], Collection[int]]) -> None:
        """On the script's own thread: wait for the step to get somewhere, with an eye on failures and stalls.

        Args:
            what: is waited for, for messages.
            of: the stages without which it cannot come.
        """
        seconds = timeout_seconds()
        conductor = self._context.conductor
        # Work that the order holds back although nothing else happens for the time of some steps: it does not fit.
        stall = min(STALL_SECONDS, 1.0 + 3 * self._longest_step)
        with self._changed:
            while not is_true():
                if self._alarm.error is not None:
                    raise self._alarm.error
                self._alarm.check_left(of())
                self._changed.wait(min(1.0, stall))
                quiet = time.perf_counter() - conductor.last_progress
                if conductor.order is not None and conductor.is_stalled and quiet > stall:
                    self._leave_order(f"nothing followed the planned order for {stall:.2g} s")
                    conductor.poke()
                if quiet > seconds and not conductor.is_running:
                    waiting = ", ".join(str(task) for task in conductor.waiting_tasks()) or "none"
                    stage = self._context.stage
                    raise DeadlineError(
                        f"pipeline stage {stage} (rank {self._ranks[stage]}) waited {seconds:.0f} s for {what}; its "
                        f"waiting tasks: {waiting}; check that every rank runs the same steps, or raise SMP_TIMEOUT_SECONDS"
                    )
