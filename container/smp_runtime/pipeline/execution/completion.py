"""Completion of tasks: one is done when its code and its requests have ended, and its caller is then notified.

A request is done when its code has ended and every request that it has posted itself is done. So the step
function's task is done last, and with it the microbatch. All stages may forget the microbatch's values
then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from smp_runtime.pipeline.execution.task import Task
from smp_runtime.pipeline.schedule.actions import Event, TaskKind
from smp_runtime.pipeline.transport.messages import AllDone, Done, ProgramLeft, Release, ValueMessage

if TYPE_CHECKING:
    import torch

    from smp_runtime.pipeline.execution.messenger import Messenger
    from smp_runtime.pipeline.execution.module_server import ModuleServer
    from smp_runtime.pipeline.execution.running_step import Microbatches
    from smp_runtime.pipeline.execution.stage_context import StageContext


class Completion:
    """The bookkeeping of a rank's tasks up to their end; guarded by the pipeline's lock.

    Args:
        begins: called by a task that begins on a worker's thread, with its microbatch.
    """

    def __init__(
        self,
        context: StageContext,
        messenger: Messenger,
        server: ModuleServer,
        microbatches: Microbatches,
        begins: Callable[[int], None],
    ) -> None:
        self._context = context
        self._messenger = messenger
        self._server = server
        self._microbatches = microbatches
        self._begins = begins

    def code_ended(self, task: Task) -> Callable[[], None] | None:
        """Handle the end of a task's code, and return what to call after the baton is handed on, or None.

        The caller holds the lock. The returned function sends the task's values to its caller.
        """
        for call in task.ended:
            call()
        task.ended = []
        self._context.scheduler.arrived(_code_of(task))
        if task.parent is not None:
            task.parent.open -= 1
            self._complete(task.parent)
            return None
        if task.caller is None:
            self._complete(task)
            return None
        if not task.open:
            self._complete(task)
        messenger = self._messenger
        if not task.parcel:
            if task.kind is TaskKind.BACKWARD and task.caller in messenger.untold:
                messenger.transport.nudge(task.caller)
            return None
        # Stamped now, with the news of this moment, and sent without the lock: big values take their time.
        stamped = messenger.stamp(task.caller, ValueMessage(tuple(task.parcel)))
        tensors, task.parcel = list(task.parcel.values()), {}
        return functools.partial(messenger.transport.send, task.caller, stamped, tensors)

    def weights_left(self, parent: Task) -> None:
        """Add a task for the weight gradients that ``parent`` has postponed; ``parent`` is not done before this new task.

        The caller holds the lock.
        """
        left = parent.weight_gradients.take()
        parent.open += 1
        parent.leavings += 1

        def work(task: Task) -> None:
            self._begins(task.microbatch)
            left.run()

        # No call has a number below 0.
        task = Task(TaskKind.WEIGHTS, parent.microbatch, (*parent.path, -parent.leavings), parent.label, work)
        task.parent = parent
        task.in_model_backward = True
        ready = ("w", task.microbatch, task.path)
        self._context.scheduler.give(parent, ready)
        # With ``in_turn`` there must be no choice, so the task also waits until the parent's code has ended. Otherwise
        # its position would depend on how long the parent waits for others. ``needs`` and so the plans omit this wait.
        held = _code_of(parent)
        self._context.scheduler.add(task, (ready, held), lambda event: event != held or not self._context.in_turn)
        task.needs = (ready,)

    def request_done(self, done: Done) -> None:
        """Handle the message of another stage that a request of this stage is done."""
        context = self._context
        with context.lock:
            task = context.done(done.kind, done.microbatch, done.path)
            if task is None:
                return
            task.open -= 1
            self._complete(task)
            context.scheduler.poke()
            if task.kind is TaskKind.BACKWARD or not context.scheduler.is_running:
                self._messenger.tell_now()

    def all_done(self, stage: int, done: AllDone) -> None:
        """Handle another stage's message that all its calls of a microbatch are done."""
        for kind, path in self._context.root_program.keys_of(stage, done.microbatch):
            self.request_done(Done(kind, done.microbatch, path))

    def values_came(self, root: int, value: ValueMessage, tensors: Sequence[torch.Tensor]) -> None:
        """Handle values; the first one of a group of the step's program is also the request for the group's calls."""
        context = self._context
        context.values.put_all(value.names, tensors)
        if value.group is None:
            return
        for microbatch in value.finished:
            self.microbatch_done(microbatch)
        with context.lock:
            calls = context.program.begin_group(value.group, value.finished)
        if calls:
            self._server.accept_group(root, calls, value.group)

    def program_left(self, root: int, left: ProgramLeft) -> None:
        """Handle that the root stage has left the step's program: it waits for each call from now on."""
        with self._context.lock:
            for done in self._context.program.leave():
                self._messenger.tell_later(root, done)
            self._messenger.tell_now()

    def microbatch_done(self, microbatch: int) -> None:
        """Handle the root stage's message that a microbatch is finished."""
        with self._context.lock:
            self._release(microbatch)

    def _complete(self, task: Task) -> None:
        """Report a task as done if its code and all its requests have ended; the caller holds the lock."""
        if not task.code_done or task.open:
            return
        context, microbatches = self._context, self._microbatches
        if task.caller is not None:
            done = Done(str(task.kind), task.microbatch, task.path)
            for news in [done] if task.group is None else context.program.call_done(done):
                self._messenger.tell_later(task.caller, news)
            return
        if not context.root_program.microbatch_finished(task.microbatch):
            for stage in context.others:
                self._messenger.tell_later(stage, Release(task.microbatch))
        self._release(task.microbatch)
        microbatches.finished.add(task.microbatch)
        context.scheduler.poke()
        if microbatches.are_finished:
            context.changed.notify_all()

    def _release(self, microbatch: int) -> None:
        self._context.values.release(microbatch)
        self._context.attributes.release(microbatch)
        self._server.release(microbatch)


def _code_of(task: Task) -> Event:
    """Return the event for the end of a task's code."""
    return ("e", task.kind, task.microbatch, task.path)
