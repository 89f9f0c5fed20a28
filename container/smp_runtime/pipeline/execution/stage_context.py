"""The shared parts of a rank's pipeline: its place, its values, its tasks, and the connection to the other stages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.attributes import weight_versions
from smp_runtime.microbatch_state.flags import ModuleFlags, TaskState
from smp_runtime.pipeline.execution.value_store import ValueStore
from smp_runtime.pipeline.program.root_program import RootProgram
from smp_runtime.pipeline.program.stage_program import StageProgram
from smp_runtime.pipeline.transport.messages import GroupCall, Modes, Reply
from smp_runtime.tensors.random_state import RandomState, task_seed
from smp_runtime.tensors.torch_private import default_device, saved_tensor_hooks

if TYPE_CHECKING:
    from smp_runtime.microbatch_state.attributes import Attributes
    from smp_runtime.pipeline.execution.task import Task, TaskWatch
    from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler
    from smp_runtime.tensors.remote_tensor import Path


@dataclass
class StageContext:
    """The shared state of one rank's pipeline."""

    ranks: Sequence[int]  # global ranks of the pipeline group; a stage is a position in it
    stage: int
    device: torch.device
    lock: threading.RLock  # guards everything here, the tasks and the values
    send: Callable[..., None]  # message and tensors to a stage; the message gets the number of the step
    release: Callable[..., None]  # queues the news that a microbatch is finished for a stage
    modules: Mapping[str, nn.Module]  # by path
    stage_of: Callable[[str], int]  # stage of every module by path; that of ``""`` is the root stage
    scheduler: TaskScheduler
    attributes: Attributes  # of this stage's modules
    replica: int = 0  # data parallel rank, part of every task's seed
    predicts: bool = True  # whether calls return without waiting if their result is known in advance
    #: Whether in this step a request is done before its caller goes on. Pipelines without a planned order agree only if
    #: there is never a choice: otherwise each one's next task would depend on the messages that have arrived there.
    in_turn: bool = False
    has_programs: bool = False  # whether planned steps get programs
    watch: TaskWatch | None = None
    make_group: Callable[[GroupCall], nn.Module] | None = None  # makes a module of those that a :class:`GroupCall` runs
    seed: int = 0  # of the step
    replies: dict[Any, Reply] = field(default_factory=dict)  # to calls without a result known in advance
    #: Requests that are not done, with the task that posted each.
    opened: dict[tuple[str, int, Path], Task] = field(default_factory=dict)
    learned: int = 0  # results that were not known in advance, in this step
    #: Notified, with the lock held, when something changes that the script's own thread may wait for.
    changed: threading.Condition = field(init=False)
    paths: dict[int, str] = field(init=False)  # path by module identity
    others: list[int] = field(init=False)
    values: ValueStore = field(init=False)
    anchor: torch.Tensor = field(init=False)
    switches: ModuleFlags = field(init=False)  # the flags of all modules and parameters
    program: StageProgram = field(init=False)  # this stage's calls in the programs of steps
    root_program: RootProgram = field(init=False)  # the programs of steps, on the root stage

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.paths = {id(module): path for path, module in self.modules.items()}
        self.others = [stage for stage in range(len(self.ranks)) if stage != self.stage]
        self.program = StageProgram()
        self.values = ValueStore(self.lock, self.stage, self.scheduler, self.send, self.program.finished_in)
        is_on = self.has_programs and self.predicts and self.stage == self.stage_of("")
        self.root_program = RootProgram(self.lock, self.send, self.release, self.others, is_on=is_on)
        # Requires a gradient, so that a call's result does too, even if no argument does.
        self.anchor = torch.zeros((), requires_grad=True, device="cpu")
        self._groups: dict[str, tuple[GroupCall, nn.Module]] = {}
        self.switches = ModuleFlags(self.modules, self._stage_of_label, self.stage, self._labelled)

    # -- modules that calls run --------------------------------------------------------------------------------------

    def called(self, module: str | GroupCall) -> nn.Module:
        """Return the module that a call runs; the module of a :class:`GroupCall` is kept under its label."""
        if isinstance(module, str):
            return self.modules[module]
        label = str(module)
        if label not in self._groups:
            if self.make_group is None:
                raise AssertionError("a call of several modules, but nothing that puts them together")
            self._groups[label] = module, self.make_group(module)
        return self._groups[label][1]

    def stage_of_call(self, module: str | GroupCall) -> int:
        """Return the stage that runs a call."""
        return self.stage_of(module if isinstance(module, str) else module.members[0])

    def _labelled(self, label: str) -> nn.Module:
        return self._groups[label][1] if label in self._groups else self.modules[label]

    def _stage_of_label(self, label: str) -> int:
        return self.stage_of_call(self._groups[label][0] if label in self._groups else label)

    # -- tasks -------------------------------------------------------------------------------------------------------

    def is_there(self, event: Any) -> bool:
        """Return whether a value, or a reply ``("r", …)``, is available, so that a task need not wait for it."""
        return event in self.replies or self.values.has(event)

    def random_state(self, microbatch: int, module: str, nth: int) -> RandomState:
        """Return a task's initial random state, with the flags of the modules that it runs."""
        seed = task_seed(self.seed, self.replica, microbatch, module, nth)
        return TaskState(seed, self.device, self.switches, module)

    def tensor_versions(self) -> list[tuple[int, ...]]:
        """Return versions that differ after a module of this stage has changed a buffer or a parameter.

        Both a change in place and a replacement count.
        """
        found: list[tuple[int, ...]] = []
        for path, module in self.modules.items():
            if self.stage_of(path) == self.stage:
                found += [(id(buffer), buffer._version) for buffer in module.buffers(recurse=False)]
                found += weight_versions(module).values()
        return found

    def children(self) -> dict[str, dict[str, nn.Module | None]]:
        """Return the direct submodules of every module, by path."""
        return {path: dict(module._modules) for path, module in self.modules.items()}

    def check_children(self, before: Mapping[str, dict[str, nn.Module | None]]) -> None:
        """Check that a step has not replaced modules that another stage runs, because that stage does not see it.

        Raises:
            SMPUserError: it did.
        """
        unseen = [
            path
            for path, children in before.items()
            if self.stage_of(path) != self.stage and dict(self.modules[path]._modules) != children
        ]
        if unseen:
            shown = ", ".join(map(repr, unseen[:3]))
            raise SMPUserError(
                f"the step replaced modules in {shown} on stage {self.stage}, but other stages run these and do not see it: some "
                "models switch to other modules for batches of other shapes, or make some anew in every call; let them switch "
                "before smp.DistributedModel, on every rank, or replace modules only in the forward of the module that has them",
                code="SMP306",
            )

    def opens(self, task: Task, kind: str, path: Path) -> None:
        """Record that a task posts a request; the task is not done before the request is."""
        with self.lock:
            task.open += 1
            self.opened[kind, task.microbatch, path] = task
            self.scheduler.give(task, ("q", kind, task.microbatch, path))

    def replied(self, reply: Reply) -> None:
        """Handle a reply, on the receiver's thread."""
        event = ("r", reply.kind, reply.microbatch, reply.path)
        with self.lock:
            self.replies[event] = reply
            self.scheduler.arrived(event)
            self.scheduler.poke()

    def wait_for_reply(self, task: Task, kind: str, path: Path) -> Reply:
        """Block until the reply to a posted request has come, and return it."""
        event = ("r", kind, task.microbatch, path)
        self.scheduler.wait(task, (event,), self.is_there)
        with self.lock:
            return self.replies.pop(event)

    def wait_until_done(self, task: Task, kind: str, path: Path) -> None:
        """Block until a posted request and all its own requests are done, although its result is known."""
        self.scheduler.wait(
            task,
            (("d", kind, task.microbatch, path),),
            lambda event: event[1:] not in self.opened,
            goes_on=True,
        )

    def done(self, kind: str, microbatch: int, path: Path) -> Task | None:
        """Record that a request is done, and return the task that has posted it, if any; the caller holds the lock."""
        task = self.opened.pop((kind, microbatch, path), None)
        self.scheduler.arrived(("d", kind, microbatch, path))
        return task


def current_modes() -> Modes:
    """Return the calling thread's modes."""
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            autocast += ((kind, torch.is_autocast_cache_enabled(), torch.get_autocast_dtype(kind)),)
    return Modes(torch.is_grad_enabled(), autocast, default_device())


_NOTHING = contextlib.nullcontext()


def in_modes(modes: Modes) -> contextlib.AbstractContextManager[None]:
    """Run the block with the modes of another thread."""
    # As a rule they are this thread's already.
    return _NOTHING if modes == current_modes() else _entered(modes)


def keeps_otherwise() -> bool:
    """Return whether hooks of the calling thread change how autograd saves tensors for backward.

    Other threads do not see such hooks.
    """
    return saved_tensor_hooks() is not None


@contextlib.contextmanager
def _entered(modes: Modes) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, caches, dtype in modes.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
        if modes.device is not None:
            # Without an index: it means the thread's current device, on which this rank computes.
            stack.enter_context(torch.device(modes.device))
        yield
