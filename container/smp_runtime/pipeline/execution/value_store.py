"""The tensors that this stage makes for others, and those that others made for it, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport.messages import Deliver, ValueMessage

if TYPE_CHECKING:
    import torch

    from smp_runtime.pipeline.execution.task import Task
    from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler
    from smp_runtime.tensors.remote_tensor import Name, Path


class ValueStore:
    """The values of a stage, kept until their microbatch is finished, and sent to each stage that wants them.

    Values are put by receiver threads and by the task that computes, and looked up by that task only. All
    mutable state is guarded by the pipeline's lock. A single dictionary lookup needs no lock: the value that a
    task asks for either stays (until its own microbatch is released), or is waited for with the lock. Values
    are sent without the lock, since large tensors take time.

    The scheduler is notified of each value that arrives.

    Args:
        finished_in: returns the finished microbatches that a value of a group of the step's program reports.
    """

    def __init__(
        self,
        lock: threading.RLock,
        stage: int,
        scheduler: TaskScheduler,
        send: Callable[[int, object, list[torch.Tensor]], None],
        finished_in: Callable[[int], tuple[int, ...]],
    ) -> None:
        self._lock = lock
        self._stage = stage
        self._scheduler = scheduler
        self._send = send
        self._finished_in = finished_in
        self._tensors: dict[Name, torch.Tensor] = {}
        self._versions: dict[Name, int] = {}
        self._names: dict[int, set[Name]] = {}
        self._wanted: dict[Name, set[int]] = {}
        #: Values and the stages that they go to: asked for, sent, or sent unasked.
        self._directed: dict[int, set[tuple[Name, int]]] = {}
        #: Plain tensors that were handed to other stages already, by identity: masks go to every layer.
        self._handed: dict[int, dict[int, tuple[torch.Tensor, int, Name, set[int]]]] = {}

    def has(self, name: object) -> bool:
        """Return whether a value, or anything else that a task may wait for by name, is here."""
        return name in self._tensors

    def get(self, name: Name) -> torch.Tensor:
        """Return a value that is here."""
        return self._tensors[name]

    def take(self, name: Name) -> torch.Tensor:
        """Return a value that is here; the gradient of an output is removed, since it is used only once."""
        return self._tensors.pop(name) if name[0] == "G" else self._tensors[name]

    def put(self, name: Name, tensor: torch.Tensor, *, made_by: Task | None = None) -> None:
        """Store a value that was made here or has arrived.

        It is sent to the stages that want it, and the tasks that wait for it are woken.
        """
        with self._lock:
            if self._scheduler.is_aborted:
                return
            self._tensors[name] = tensor
            self._versions[name] = tensor._version
            self._names.setdefault(name[1], set()).add(name)
            if made_by is not None:
                made_by.known.add(name)
                self._scheduler.give(made_by, name)
            stages = self._wanted.pop(name, ())
            self._scheduler.arrived(name)
            self._scheduler.poke()
        # Without the lock: sending tensors may wait for another stage, and the receivers here need the lock meanwhile.
        for stage in stages:
            self._send(stage, self._message(name, made_by), [tensor])

    def _message(self, name: Name, made_by: Task | None) -> ValueMessage:
        """Return the message with a value; that of a task of the step's program is a request for the rest of its group."""
        group = None if made_by is None else made_by.group
        if group is None:
            return ValueMessage((name,))
        return ValueMessage((name,), group, self._finished_in(group))

    def put_all(self, names: Sequence[Name], tensors: Sequence[torch.Tensor]) -> None:
        """Store the values that came with a message."""
        for name, tensor in zip(names, tensors, strict=True):
            self.put(name, tensor)

    def deliver(self, name: Name, stage: int) -> None:
        """Send a value of this stage to another one, as soon as it exists.

        Raises:
            SMPUserError: it was changed in place since it was handed on.
        """
        with self._lock:
            # Look up and register under one lock: otherwise the value could arrive in between and would never be sent.
            tensor = self._tensors.get(name)
            if tensor is None:
                self._wanted.setdefault(name, set()).add(stage)
        if tensor is None:
            return
        if tensor._version != self._versions[name]:
            raise SMPUserError(
                f"a tensor of shape {list(tensor.shape)} was changed in place after it was passed to a module of another pipeline "
                f"stage, and stage {stage} needs the elements as they were; change a copy of it (x = x + y instead of x += y)",
                code="SMP306",
            )
        self._send(stage, ValueMessage((name,)), [tensor])

    def direct(self, name: Name, owner: int, stage: int) -> None:
        """Have ``owner`` send a value to ``stage``, unless it does so already."""
        if owner == stage or not self.announce(name, stage):
            return
        if owner == self._stage:
            self.deliver(name, stage)
        else:
            self._send(owner, Deliver(name, stage), [])

    def announce(self, name: Name, stage: int) -> bool:
        """Record that a value will go to a stage without a request, and return whether that is new."""
        with self._lock:
            directed = self._directed.setdefault(name[1], set())
            before = len(directed)
            directed.add((name, stage))
            return len(directed) > before

    def fetch(self, name: Name, owner: int) -> torch.Tensor:
        """Return a value, after waiting for it if necessary; the calling task gives the baton back meanwhile.

        Raises:
            SMPRuntimeError: outside a step, if the value is gone.
        """
        task = self._scheduler.current
        if task is None:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise SMPRuntimeError(
                    f"a tensor of microbatch {name[1]} from pipeline stage {owner} was used after its microbatch had ended; "
                    "return it from the step function, which brings it to every rank"
                )
            return tensor
        if name not in task.known:
            if name not in self._tensors:
                self.direct(name, owner, self._stage)
            self._scheduler.wait(task, (name,), self.has)
            task.known.add(name)
        return self._tensors[name]

    def hand(self, tensor: torch.Tensor, name: Name, stage: int, comes: bool) -> tuple[Name, bool]:
        """Name a plain tensor that goes to ``stage``; with ``comes``, the caller sends it along.

        Returns:
            Its name (an older one if it was handed on before), and whether it is at ``stage`` already.
        """
        handed = self._handed.setdefault(name[1], {})
        known = handed.get(id(tensor))
        if known is None or known[0] is not tensor or known[1] != tensor._version:
            known = (tensor, tensor._version, name, set())
            handed[id(tensor)] = known
        is_there = stage in known[3]
        if comes:
            known[3].add(stage)
        return known[2], is_there

    def release(self, microbatch: int) -> None:
        """Forget the values of a finished microbatch."""
        with self._lock:
            for name in self._names.pop(microbatch, ()):
                self._tensors.pop(name, None)
                self._versions.pop(name, None)
            self._directed.pop(microbatch, None)
            self._handed.pop(microbatch, None)

    def clear(self) -> None:
        """Forget everything at the end of the step."""
        with self._lock:
            self._tensors.clear()
            self._versions.clear()
            self._names.clear()
            self._wanted.clear()
            self._directed.clear()
            self._handed.clear()

    @property
    def count(self) -> int:
        """Return the number of values that are kept now."""
        return len(self._tensors)


def child_of(path: Path, prefix: Path) -> Path | None:
    """Return the rest of ``path`` after ``prefix``, or None if it does not begin with it."""
    return path[len(prefix) :] if path[: len(prefix)] == prefix else None
