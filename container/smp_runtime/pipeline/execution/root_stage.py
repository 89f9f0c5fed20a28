"""The root stage's side of a step: it runs a task for each microbatch, and announces the step's end."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.pipeline.execution.failures import STEP_FUNCTION
from smp_runtime.pipeline.execution.plan_store import MOST_DIVERGENCES
from smp_runtime.pipeline.execution.stage_context import StageContext, current_modes, in_modes, keeps_otherwise
from smp_runtime.pipeline.execution.task import Task
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.pipeline.transport.messages import Begin, End, StepAnnouncement, StepKind
from smp_runtime.pipeline.transport.packing import pack, unpack
from smp_runtime.tensors.remote_tensor import RemoteTensor

if TYPE_CHECKING:
    from smp_runtime.pipeline.execution.plan_store import PlanStore
    from smp_runtime.pipeline.execution.running_step import RunningStep

logger = logging.getLogger("smp")


#: Whether microbatches without a planned order may have to run one after the other. Not in a rehearsal that only compares calls.
takes_turns = True


class RootStage:
    """The root stage, which runs the step function.

    Args:
        begins: called on a worker's thread with the microbatch of a task that begins there, None when it ends.
        share: returns the values of all pipelines that must run in one order, the deciding one's first; None:
            its own.
    """

    def __init__(
        self,
        context: StageContext,
        running_step: RunningStep,
        plans: PlanStore,
        begins: Callable[[int | None], None],
        share: Callable[[Any], list[Any]] | None,
    ) -> None:
        self._context = context
        self._running_step = running_step
        self._plans = plans
        self._microbatches = running_step.microbatches
        self._others = context.others
        self._begins = begins
        self._share = share
        self._has_warned = False

    def run(self, kind: StepKind | None, functions: Sequence[Callable[[], Any]], call: StepAnnouncement) -> list[Any]:
        """Run one step; returns what each microbatch's function returned."""
        context, running_step = self._context, self._running_step
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        modes = current_modes()
        if not self._has_warned and keeps_otherwise():
            self._has_warned = True
            logger.warning(
                "the step runs inside torch.autograd.graph.saved_tensors_hooks (or save_on_cpu), but with pipeline parallelism "
                "modules run on other threads and ranks, which keep tensors as usual; use the hooks inside the modules, or "
                "smp.set_activation_checkpointing with offload_activations"
            )
        running_step.enter(call)
        if kind is not None:  # layers that are frozen, or in another mode, take another course
            kind = kind._replace(course=(kind.course, context.switches.digest))
        plan = self._plans.of(kind)
        # Without a planned order, microbatches run one after the other if their order matters
        # or if pipelines must agree on it.
        order_counts = self._share is not None or self._plans.order_counts(kind)
        is_serial = takes_turns and not plan.replays and order_counts
        program = context.root_program
        program.begin(kind, is_planned=plan.replays)
        if plan.divergences >= MOST_DIVERGENCES:
            program.explain("the work of such a step follows no planned order")
        begin = Begin(seed, kind, plan.replays, None, plan.is_recorded, is_serial, context.switches.requires, call)
        running_step.begin(begin._replace(order=plan.order_of(context.stage)))
        with context.lock:
            for number, function in enumerate(functions):
                task = Task(
                    TaskKind.STEP,
                    number,
                    (),
                    STEP_FUNCTION,
                    functools.partial(self._work, function=function, modes=modes),
                    context.random_state(number, "", 0),
                    contextvars.copy_context(),
                )
                self._microbatches.tasks[number] = task
            for task in self._microbatches.tasks.values():
                context.scheduler.add(task, (), context.is_there)
            context.scheduler.poke()
        # Sent while the first microbatch already runs. Stages keep earlier messages of the step until ``Begin`` arrives.
        for stage in self._others:
            context.send(stage, begin._replace(order=plan.order_of(stage), program=program.for_stage(stage)), [])
        running_step.wait(lambda: self._microbatches.are_finished, "the microbatches to finish", lambda: self._others)
        running_step.check_children()
        program.finish()
        results = [self._microbatches.results[number] for number in range(len(functions))]
        packed = pack(results, modules=context.paths)
        wants = kind is not None and self._wants_record(kind)
        training = context.switches.settle()
        for stage in self._others:
            context.send(stage, End(packed.head, wants, training), [tensor.detach() for tensor in packed.tensors])
        if wants and kind is not None:
            silent = self._others_without_record
            running_step.wait(lambda: not silent(), "the other stages' records", silent)
            self._plans.learn(kind, [running_step.own_record(), *running_step.records.values()])
        return results

    def _wants_record(self, kind: StepKind) -> bool:
        diverged = self._running_step.has_diverged()
        if self._share is not None and self._share != self._running_step.meet:
            diverged = any(self._share(diverged))
        return self._plans.wants_record(kind, diverged)

    def _work(self, task: Task, function: Callable[[], Any], modes: Any) -> None:
        """Run one microbatch, on a worker's thread."""
        self._begins(task.microbatch)
        try:
            with in_modes(modes):
                returned = function()
                self._context.root_program.step_function_ended(task.microbatch)
                self._context.switches.step_function_ended(task.microbatch)
                packed = pack(returned, modules=self._context.paths)
                if any(isinstance(tensor, RemoteTensor) for tensor in packed.tensors):
                    plain = [
                        tensor.plain() if isinstance(tensor, RemoteTensor) else tensor for tensor in packed.tensors
                    ]
                    returned = unpack(packed.head, plain, module_of=self._context.modules.__getitem__)
            self._microbatches.results[task.microbatch] = returned
        finally:
            self._begins(None)
        with self._context.lock:
            self._forward_ended(task.microbatch)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run the block as the backward pass that the script begins with ``model.backward``."""
        task = self._context.scheduler.current
        if task is None:
            raise AssertionError("model.backward has checked that a task runs")
        ended = self._enter_backward(task)
        watch = self._context.watch
        if watch is not None:
            watch.turn(task, TaskKind.BACKWARD, ended)
        task.in_model_backward = True
        try:
            yield
        finally:
            task.in_model_backward = False
            if watch is not None:
                watch.turn(task, TaskKind.STEP)

    def _enter_backward(self, task: Task) -> bool:
        """Begin the backward pass of a task's script; it may have to wait for forward passes of other microbatches.

        Returns:
            Whether this has ended the task's segment, so that another one has just begun.
        """
        if task.kind is not TaskKind.STEP or task.phase is TaskKind.BACKWARD:
            return False
        scheduler = self._context.scheduler
        with self._context.lock:
            task.phase = TaskKind.BACKWARD
            self._forward_ended(task.microbatch)
            # A planned order lets it begin at the right moment by itself.
            events = self._microbatches.before_backward(task.microbatch) if scheduler.order is None else []
        scheduler.wait(task, events, self._microbatches.has_happened)
        task.needs = ()  # not part of the record: the order that is planned from it keeps to the policy in its own way
        return True

    def _forward_ended(self, microbatch: int) -> None:
        """Allow the backward passes that have waited for this forward pass; the caller holds the lock.

        They begin when this task gives up the baton.
        """
        self._context.scheduler.arrived(self._microbatches.forward_ended(microbatch))

    def _others_without_record(self) -> list[int]:
        return [stage for stage in self._others if stage not in self._running_step.records]
