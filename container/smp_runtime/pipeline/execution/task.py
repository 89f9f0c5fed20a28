"""A task: the work of one microbatch in one module call, on a thread that computes only while it holds the baton."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from smp_runtime.pipeline.schedule.actions import Action, Event, TaskKind
from smp_runtime.tensors.weight_gradients import WeightGradients

if TYPE_CHECKING:
    import torch

    from smp_runtime.tensors.random_state import RandomState


class Abandoned(BaseException):
    """An exception that ends a task of a failed step; not an ``Exception``, so that no module swallows it."""


class Task:
    """Work of one microbatch on this stage.

    Args:
        path: its call numbers.
        label: module path, for messages and pictures.
        random: the state of its random numbers; None leaves the generators alone.
        context: variables (``contextvars``) of the script, for the step function.
        caller: stage that has requested it; None for the step function.

    Attributes:
        part: number of the segment that runs or comes next.
        phase: which pass of the microbatch it belongs to; a step function changes it when it calls backward.
        calls: requests that it has posted.
        open: those that are not done.
    """

    def __init__(
        self,
        kind: TaskKind,
        microbatch: int,
        path: tuple[int, ...],
        label: str,
        work: Callable[[Task], None],
        random: RandomState | None = None,
        context: contextvars.Context | None = None,
        caller: int | None = None,
    ) -> None:
        self.kind = kind
        self.microbatch = microbatch
        self.path = path
        #: Its name among the tasks of a step.
        self.key = (kind, microbatch, path)
        self.label = label
        self.work = work
        self.random = random
        self.context = context
        self.caller = caller
        self.part = 0
        self.phase = TaskKind.BACKWARD if kind in (TaskKind.BACKWARD, TaskKind.WEIGHTS) else TaskKind.FORWARD
        self.calls = 0
        self.open = 0
        self.code_done = False
        self.missing: set[Event] = set()
        self.needs: tuple[Event, ...] = ()
        self.gives: list[tuple[Event, float]] = []
        self.began = 0.0
        #: Seconds of the running segment before its last pause.
        self.spent = 0.0
        self.has_thread = False
        #: Group of the step's program that it belongs to; None if it was requested.
        self.group: int | None = None
        #: Held while it is not the task's turn: a bare lock wakes a thread much faster than an event.
        self.turn = threading.Lock()
        self.turn.acquire()
        #: Values that the task has waited for or made, so that it does not wait for them again.
        self.known: set[Event] = set()
        #: How often this task has called each module.
        self.called: dict[str, int] = {}
        #: Which tensors of its result the caller needs, by position.
        self.home: set[int] = set()
        #: Values for the caller, sent when the task ends.
        self.parcel: dict[Any, torch.Tensor] = {}
        #: Gradients of weights that its backward passes leave for later.
        self.weight_gradients = WeightGradients()
        #: How often it has left some, as tasks of their own.
        self.leavings = 0
        #: The task that has left this one.
        self.parent: Task | None = None
        #: Called when the code of the task has ended.
        self.ended: list[Callable[[], None]] = []

    def run(self) -> None:
        """Do its work, with the variables of the script if it has some."""
        if self.context is not None:
            self.context.run(self.work, self)
        else:
            self.work(self)

    @property
    def action(self) -> Action:
        """Return the name of the segment that runs or comes next."""
        return Action(self.kind, self.microbatch, self.path, self.part)

    @property
    def in_model_backward(self) -> bool:
        """Return whether it runs under ``model.backward``, or was requested from there."""
        return self.weight_gradients.is_open

    @in_model_backward.setter
    def in_model_backward(self, value: bool) -> None:
        self.weight_gradients.is_open = value

    def __repr__(self) -> str:
        return f"{self.kind}{self.microbatch} {self.label}"


class Order:
    """A planned order being replayed.

    Attributes:
        actions: of this stage.
        parts: how many segments each task has in the recorded step.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = list(actions)
        self.position = 0
        self.parts: dict[tuple[TaskKind, int, tuple[int, ...]], int] = {}
        for action in self.actions:
            key = (action.kind, action.microbatch, action.path)
            self.parts[key] = max(self.parts.get(key, 0), action.part + 1)

    @property
    def next(self) -> Action | None:
        """Return the next action, or None at the end."""
        return self.actions[self.position] if self.position < len(self.actions) else None


class TaskWatch(Protocol):
    """An observer of the work of a rank's tasks; see :mod:`smp_runtime.pipeline.observe.recorder`."""

    def begin_step(self, number: int) -> None:
        """Handle the beginning of a step."""

    def end_step(self, failed: bool = False) -> None:
        """Handle the end or the failure of the step."""

    def segment_ended(self, task: Task, start: float, stop: float) -> None:
        """Handle a task's work from ``start`` to ``stop``, in seconds of ``time.perf_counter()``."""

    def turn(self, task: Task, kind: TaskKind, at_start: bool = False) -> None:
        """Handle that the rest of the running segment is of another kind."""

    def close(self) -> None:
        """Handle the end of the session."""
