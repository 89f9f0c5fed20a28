"""The step that a rank is in: its state from entering to leaving, and the waits for its progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from smp_records.rank_record import current_record
from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError, SMPUserError
from smp_runtime.pipeline.agreement.departure import FIRST_LOOK, Departure, StageLinks
from smp_runtime.pipeline.execution.failures import STEP_FUNCTION, Alarm
from smp_runtime.pipeline.transport.messages import (
    Ask,
    Begin,
    Diverged,
    End,
    Record,
    StageProgress,
    StepAnnouncement,
    Turn,
)
from smp_runtime.tensors.random_state import seed_other_generators, task_seed

if TYPE_CHECKING:
    import torch

    from smp_runtime.pipeline.execution.messenger import Messenger
    from smp_runtime.pipeline.execution.plan_store import PlanStore
    from smp_runtime.pipeline.execution.stage_context import StageContext
    from smp_runtime.pipeline.execution.task import Task
    from smp_runtime.pipeline.schedule.actions import Event
    from smp_runtime.pipeline.schedule.policies import Policy

logger = logging.getLogger("smp")

#: Most seconds without progress, though a task could run, before a replayed order is given up.
STALL_SECONDS = 10.0


class Microbatches:
    """The microbatches of a step on the root stage: which may begin, which have ended their forward pass, which are done.

    Guarded by the pipeline's lock.

    Attributes:
        active: most microbatches in flight in this step.
        tasks: the step function's task for each microbatch.
        results: what it returned.
        finished: those that are done everywhere.
    """

    def __init__(self, policy: Policy, active: int) -> None:
        self.active = active
        self._policy = policy
        self.clear()

    def clear(self) -> None:
        """Clear the state at the end of the step."""
        self.tasks: dict[int, Task] = {}
        self.results: dict[int, Any] = {}
        self.finished: set[int] = set()
        self._through: set[Event] = set()  # with the forward pass

    @property
    def are_finished(self) -> bool:
        """Return whether all microbatches are done."""
        return len(self.finished) == len(self.tasks)

    def is_admitted(self, task: Task) -> bool:
        """Return whether one more microbatch may begin."""
        in_flight = [n for n, other in self.tasks.items() if other.has_thread and n not in self.finished]
        return self._policy.admits(task.microbatch, in_flight, self.active)

    def forward_ended(self, microbatch: int) -> Event:
        """Record the end of a microbatch's forward pass, and return the event for it."""
        self._through.add(event := ("forward ended", microbatch))
        return event

    def before_backward(self, microbatch: int) -> list[Event]:
        """Return the events that a microbatch's backward pass waits for if no order is planned."""
        return [
            ("forward ended", other)
            for other in self._policy.backward_waits_for(microbatch, len(self.tasks), self.active)
        ]

    def has_happened(self, event: Event) -> bool:
        """Return whether such an event has happened."""
        return event in self._through


class RunningStep:
    """The step that a rank is in.

    Args:
        meet: returns the values of the pipelines with ranks that meet this one's in collectives while modules run;
            None if there are none.

    Attributes:
        microbatches: of the step, on the root stage.
        begun: how the step begins, once that is known.
        end: how it ends, and the tensors of its outputs, once the root stage has announced it.
        records: of the other stages, on the root stage.
        diverged: whether the step has left its planned order.
    """

    def __init__(
        self,
        context: StageContext,
        messenger: Messenger,
        alarm: Alarm,
        plans: PlanStore,
        policy: Policy,
        active: int,
        meet: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self._context = context
        self._messenger = messenger
        self._alarm = alarm
        self._plans = plans
        self._active = active
        self.microbatches = Microbatches(policy, active)
        #: Seconds of the longest step so far that needed no order or kept to it.
        self._longest_step = 0.0
        self._entered = 0.0
        self._has_warned = self._has_warned_of_batches = self._has_warned_of_order = False
        self._call: StepAnnouncement | None = None
        self._buffers: list[tuple[int, ...]] = []
        #: Children of the modules at the beginning of the step; empty if the step replays a plan.
        self._children: dict[str, dict[str, Any]] = {}
        self.begun: Begin | None = None
        self.end: tuple[End, list[torch.Tensor]] | None = None
        self.records: dict[int, Record] = {}
        self.diverged = False
        self.meet = meet
        self._departure: Departure | None = None
        if meet is not None and context.stage == context.stage_of(""):
            self._departure = Departure(
                StageLinks(
                    context.changed,
                    context.stage,
                    context.others,
                    self._answer,
                    self.turned,
                    context.send,
                    lambda: self._check(context.others),
                    lambda: self.microbatches.are_finished,
                    meet,
                )
            )

    def enter(self, call: StepAnnouncement) -> None:
        """Enter a step on this rank, as its script has called it.

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
            self.microbatches.clear()
            self._context.learned = 0
            if self._departure is not None:
                self._departure.reset()
            self._context.switches.enter()
            self._messenger.enter()

    def begin(self, begin: Begin) -> None:
        """Begin the step, once the root stage's ``begin`` is known."""
        context = self._context
        with context.lock:
            self.begun = begin
            context.switches.check(begin.requires, context.stage_of(""))
            context.seed = begin.seed
            order = self._plans.order(begin)
            context.scheduler.reset(order, records=begin.is_recorded)
            context.program.begin(begin.program)
            self.microbatches.active = 1 if begin.is_serial else self._active
            context.in_turn = begin.is_serial and self._plans.is_shared
            self._buffers = context.tensor_versions()
            self._children = {} if begin.replays else context.children()
            context.attributes.begin(looks=begin.is_recorded, alone=begin.is_serial)
            if context.watch is not None:
                context.watch.begin_step(self._messenger.step)
        self._compare(begin.call)
        seed_other_generators(task_seed(begin.seed, context.replica, -1, f"stage {context.stage}"))
        self._messenger.begin()

    def _compare(self, root: StepAnnouncement) -> None:
        """Check that this rank's script has called the same step as the root stage's."""
        if self._call is None:
            return
        ranks = self._context.ranks
        rank, root_rank = ranks[self._context.stage], ranks[self._context.stage_of("")]
        try:
            warning = self._call.check(root, rank, root_rank)
        except SMPUserError as error:
            self._alarm.raised(error, STEP_FUNCTION)
            return
        if warning and not self._has_warned_of_batches:
            self._has_warned_of_batches = True
            logger.warning(warning)

    def check_children(self) -> None:
        """Check, after this rank's work is done, that it has not replaced modules that other stages have too.

        Raises:
            SMPUserError: it did.
        """
        self._context.check_children(self._children)

    def own_record(self) -> Record:
        """Return the record of this rank's work in the step."""
        with self._context.lock:
            attributes = self._context.attributes
            changed = self._context.tensor_versions() != self._buffers or attributes.carries
            if attributes.crosses and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "pipeline stage %d: modules hand on %s from one microbatch to the next and set it after a call of another "
                    "stage, or several times, or write into it while graphs of other microbatches may hold it, so the microbatches "
                    "run one after the other; keep what such a module calls on its stage (smp.set_partition), hand values on as "
                    "arguments, or write after the step",
                    self._context.stage,
                    ", ".join(attributes.carried),
                )
            return Record(list(self._context.scheduler.record), self._context.learned, changed, attributes.crosses)

    # -- messages of other stages ------------------------------------------------------------------------------------

    def ended(self, end: End, tensors: list[torch.Tensor]) -> None:
        """Handle the root stage's message that the step ends."""
        with self._context.lock:
            self.end = (end, tensors)
            self._context.changed.notify_all()

    def recorded(self, sender: int, record: Record) -> None:
        """Handle another stage's record of its work; on the root stage."""
        with self._context.lock:
            self.records[sender] = record
            self._context.changed.notify_all()

    def left_order(self) -> None:
        """Handle another stage's message that it has left the planned order."""
        with self._context.lock:
            self._follow_no_order()
            self._context.scheduler.poke()

    def asked(self, sender: int, ask: Ask) -> None:
        """Answer the root stage's question about this stage's progress."""
        with self._context.lock:
            answer = self._answer(ask)
        self._context.send(sender, answer, [])

    def answered(self, sender: int, answer: StageProgress) -> None:
        """Handle another stage's answer about its progress; on the root stage."""
        if self._departure is not None:
            self._departure.answered(sender, answer)

    def turned(self, turn: Turn) -> None:
        """Handle the root stage's command to run a task, or to follow the order up to a position."""
        with self._context.lock:
            if turn.task is None:
                self._context.scheduler.go_on_to(turn.limit)
            else:
                self._context.scheduler.grant(turn.task)

    def _answer(self, ask: Ask) -> StageProgress:
        """Return this rank's progress; the caller holds the lock."""
        scheduler, messenger = self._context.scheduler, self._messenger
        if ask.halts:
            self.diverged = True
            scheduler.halt()
        if not scheduler.is_running:
            messenger.tell_now()  # send news that other stages wait for, so that it counts as under way
        return StageProgress(
            ask.number,
            scheduler.position,
            scheduler.is_running,
            tuple(messenger.sent),
            tuple(messenger.handled),
            scheduler.most_urgent(),
        )

    def has_diverged(self) -> bool:
        """Return whether this pipeline or one that it meets has left the planned order.

        Only for the root stage, at the end of a step.
        """
        return self.diverged if self._departure is None else self._departure.at_end(self.diverged)

    # -- the planned order -------------------------------------------------------------------------------------------

    def leave_order(self, why: str) -> None:
        """Leave the planned order, and notify the other stages.

        Work goes on in the order in which it arrives. If other pipelines must agree, this rank halts instead. The
        caller holds the lock. It also pokes the scheduler afterwards, because the scheduler itself may call this
        while it decides who runs next.
        """
        context = self._context
        if context.scheduler.order is not None and not self.diverged:
            logger.debug("stage %d leaves the planned order: %s", context.stage, why)
            if self._plans.is_repeatable and not self._has_warned_of_order:
                self._has_warned_of_order = True
                logger.warning(
                    "deterministic: pipeline stage %d left the planned order of its step (%s), so gradients of microbatches were "
                    "added in the order in which they came, which may be another in the next run; let every step of one kind call "
                    "the same modules, or set microbatches to 1",
                    context.stage,
                    why,
                )
            self._follow_no_order()
            for stage in context.others:
                context.send(stage, Diverged(why), [])

    def _follow_no_order(self) -> None:
        self.diverged = True
        self._context.root_program.leave("a stage has left the planned order")
        if self.meet is not None:  # ranks of other pipelines must leave it at the same place
            self._context.scheduler.halt()
            self._context.changed.notify_all()
        else:
            self._context.scheduler.order = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def went_well(self) -> None:
        """Record that the step has reached its end without an error."""
        if not self.diverged:
            self._longest_step = max(self._longest_step, time.perf_counter() - self._entered)

    def leave(self) -> None:
        """Leave the step on this rank, and release everything that was kept for it."""
        context = self._context
        self._messenger.leave()
        if context.watch is not None:
            context.watch.end_step(failed=self._alarm.error is not None)
        context.attributes.end()
        context.switches.leave()
        context.values.clear()
        context.program.clear()
        context.replies.clear()
        context.opened.clear()
        self.microbatches.clear()

    def wait(self, is_true: Callable[[], bool], what: str, of: Callable[[], Collection[int]]) -> None:
        """Block the script's own thread until ``is_true`` returns True; watch for failures and stalls meanwhile.

        Args:
            what: the awaited thing, for messages.
            of: returns the stages without which it cannot come.
        """
        whom = tuple(self._context.ranks[other] for other in of())
        with current_record().waiting(f"the pipeline, {what},", whom):
            while not self._has_come(is_true, what, of):
                if self._departure is not None:  # without the lock, since the other pipelines take their time
                    self._departure.lead()

    def _has_come(self, is_true: Callable[[], bool], what: str, of: Callable[[], Collection[int]]) -> bool:
        """Wait; return False if this rank must lead the stages out of the planned order first."""
        seconds = timeout_seconds()
        scheduler = self._context.scheduler
        # Work that the order holds back although nothing else happens for the time of some steps: it does not fit.
        stall = min(STALL_SECONDS, 1.0 + 3 * self._longest_step)
        with self._context.changed:
            while not is_true():
                self._check(of())
                if self._departure is not None and self.diverged:
                    return False
                # Whoever makes ``is_true`` true notifies with the lock held; the wait has an end anyway, to look for stalls.
                self._context.changed.wait(min(1.0, stall) if self._departure is None else FIRST_LOOK)
                quiet = time.perf_counter() - scheduler.last_progress
                if self._is_stalled(quiet, stall):
                    self.leave_order(f"nothing followed the planned order for {quiet:.2g} s")
                    scheduler.poke()
                if quiet > seconds and not scheduler.is_running:
                    waiting = ", ".join(str(task) for task in scheduler.waiting_tasks()) or "none"
                    stage = self._context.stage
                    raise DeadlineError(
                        f"pipeline stage {stage} (rank {self._context.ranks[stage]}) waited {seconds:.0f} s for {what}; its "
                        f"waiting tasks: {waiting}; check that every rank runs the same steps, or raise SMP_TIMEOUT_SECONDS"
                    )
        return True

    def _is_stalled(self, quiet: float, stall: float) -> bool:
        """Return whether the planned order does not fit, after ``quiet`` seconds without progress on this rank.

        The caller holds the lock.
        """
        scheduler = self._context.scheduler
        follows_order = scheduler.order is not None and not self.diverged
        if not follows_order or scheduler.is_running:
            return False
        if self.meet is None:
            return scheduler.is_stalled and quiet > stall
        # If pipelines must agree, elapsed time proves nothing: the others would leave a pipeline that is only slow.
        return self._departure is not None and self._departure.is_stuck(quiet)

    def _check(self, stages: Collection[int]) -> None:
        if self._alarm.error is not None:
            raise self._alarm.error
        self._alarm.check_left(stages)
