"""The module server: runs the modules of this stage for the others, forward and backward, as tasks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from smp_records.rank_record import BACKWARD, current_record
from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.execution.output_metadata_cache import (
    MOST_KINDS,
    OutputMetadata,
    describe_difference_of,
    describe_tensors,
    outcome_of,
)
from smp_runtime.pipeline.execution.stage_context import StageContext, in_modes
from smp_runtime.pipeline.execution.task import Task
from smp_runtime.pipeline.schedule.actions import Event, TaskKind
from smp_runtime.pipeline.transport.messages import BackwardCall, ForwardCall, Reply, TensorSlot
from smp_runtime.pipeline.transport.packing import SINGLE_TENSOR, Packed, is_plain_result, pack, unpack
from smp_runtime.tensors.remote_tensor import Path, RemoteTensor, TensorMetadata
from smp_runtime.tensors.torch_private import DisableTorchFunction, call_with_hooks, run_backward

logger = logging.getLogger("smp")


@dataclass
class SavedGraph:
    """The data that a forward pass leaves for its backward pass."""

    outputs: list[torch.Tensor]  # tensors of the result, in the graph
    made_here: list[bool]  # whether the elements of each are this stage's, not those of a call inside
    entry: CallInputs  # receives the gradients of the arguments
    edges: tuple[GradientEdge, ...]  # of the graph, at the arguments that require gradients


@dataclass(eq=False)
class CallInputs:
    """The arguments of a call that require gradients."""

    tensors: list[torch.Tensor] = field(default_factory=list)  # the arguments, as the module gets them
    gradients: list[torch.Tensor | None] = field(default_factory=list)  # what backward found for each, or None


class Arguments(NamedTuple):
    """The tensors among a call's arguments."""

    tensors: list[torch.Tensor]  # as the module gets them
    versions: list[int]  # of each, before the module runs
    entry: CallInputs  # this and the edges: as in :class:`SavedGraph`
    edges: tuple[GradientEdge, ...]
    has_handles: bool  # whether some have no elements here until the module uses them


class Made(NamedTuple):
    """The tensors that a task has produced: results of a forward pass, or gradients."""

    slots: list[TensorSlot | None]  # their names; None for a gradient that there is not
    tensors: list[torch.Tensor]  # themselves
    made_here: list[bool]  # whether the elements of each are this stage's, not those of a call inside


class _Enter(torch.autograd.Function):
    """The point where a caller's tensors enter this stage's graph; their gradients come out here."""

    @staticmethod
    def forward(ctx: Any, entry: CallInputs, anchor: torch.Tensor) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(entry.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.entry.gradients = list(gradients)
        return None, None


class ModuleServer:
    """A server that runs this stage's modules for the requests of other stages.

    Args:
        begins: called by a task that begins, with its microbatch.
        runs_forward: returns the context in which modules run forward.
    """

    def __init__(
        self,
        context: StageContext,
        begins: Callable[[int], None],
        runs_forward: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._context = context
        self._begins = begins
        self._runs_forward = runs_forward
        #: Forward passes that still need a backward pass, by microbatch and path.
        self.graphs: dict[int, dict[Path, SavedGraph]] = {}
        #: Most microbatches with a graph at once.
        self.most_in_flight = 0
        #: Module path of every call of the step, for messages.
        self._labels: dict[tuple[int, Path], str] = {}
        #: Forward passes of the step that have left a graph, as events ``("f", microbatch, path)``.
        self._ran: set[Event] = set()
        #: Modules that were seen to change an argument in place.
        self._warned: set[str] = set()
        self._expected: dict[bytes, OutputMetadata] = {}
        #: By the digest of such a result: metadata of its tensors, if the call has made each of them itself, and nothing else
        #: is in it. Most results are like that, and take less time to compare.
        self._own: dict[bytes, tuple[TensorMetadata | None, ...]] = {}

    # -- requests, on the receiver's thread ------------------------------------------------------------------------

    def accept_group(self, caller: int, calls: Sequence[ForwardCall | BackwardCall], group: int) -> None:
        """Accept the requests of a group of the step's program; their tensors come separately."""
        tasks = []
        for call in calls:
            if isinstance(call, ForwardCall):
                task = self._forward_task(caller, call)
            else:
                task = self._backward_task(caller, call)
            task.group = group
            tasks.append(task)
        # In one go: otherwise the task that runs would wait for the lock once for each of them.
        self._add(tasks)

    def accept_call(self, caller: int, call: ForwardCall, tensors: Sequence[torch.Tensor]) -> None:
        """Accept a request to run a module."""
        self._context.values.put_all(call.inline, tensors)
        self._add([self._forward_task(caller, call)])

    def accept_backward(self, caller: int, back: BackwardCall, tensors: Sequence[torch.Tensor]) -> None:
        """Accept a request to run a module's backward pass."""
        self._context.values.put_all(back.inline, tensors)
        self._add([self._backward_task(caller, back)])

    def _forward_task(self, caller: int, call: ForwardCall) -> Task:
        label = str(call.module)
        self._labels[call.microbatch, call.path] = label
        random = self._context.random_state(call.microbatch, label, call.nth)
        task = Task(
            TaskKind.FORWARD,
            call.microbatch,
            call.path,
            label,
            lambda task: self._forward(task, call),
            random,
            caller=caller,
        )
        self._direct("F", task, call.goes)
        self._needs("F", task, call.slots)
        return task

    def _backward_task(self, caller: int, back: BackwardCall) -> Task:
        task = Task(
            TaskKind.BACKWARD,
            back.microbatch,
            back.path,
            self._labels.get((back.microbatch, back.path), ""),
            lambda task: self._backward(task, back),
            self._context.random_state(back.microbatch, "backward", 0),
            caller=caller,
        )
        task.in_model_backward = back.in_model_backward
        self._direct("B", task, back.goes)
        # A caller that used an argument which the module only hands on can be here before the forward pass has run.
        self._needs("B", task, back.slots, ("f", back.microbatch, back.path))
        return task

    def release(self, microbatch: int) -> None:
        """Release the remaining graphs of a finished microbatch; no stage has requested their backward pass."""
        self.graphs.pop(microbatch, None)

    def clear(self) -> None:
        """Clear the state at the end of the step."""
        self.graphs.clear()
        self._labels.clear()
        self._ran.clear()

    def _needs(self, kind: str, task: Task, slots: Sequence[TensorSlot | None], *more: Event) -> None:
        """Set what a task waits for: that its request counts, and its tensors."""
        names = [slot.name for slot in slots if slot is not None and slot.comes]
        task.needs = tuple(dict.fromkeys([("q", kind, task.microbatch, task.path), *names, *more]))
        task.known.update(task.needs)

    def _add(self, tasks: Sequence[Task]) -> None:
        scheduler = self._context.scheduler
        with self._context.lock:
            if scheduler.is_aborted:
                return
            for task in tasks:
                scheduler.add(task, task.needs, functools.partial(self._is_there, task.needs[0]))
            scheduler.poke()

    def _is_there(self, request: Event, event: Event) -> bool:
        return event == request or event in self._ran or self._context.is_there(event)

    def _direct(self, kind: str, task: Task, goes: Sequence[tuple[int, int]]) -> None:
        """Send what the task makes to the stages that need it: to its caller when it ends, to others at once."""
        for index, stage in goes:
            if stage == task.caller:
                task.home.add(index)
            else:
                self._context.values.deliver((kind, task.microbatch, task.path, index), stage)

    # -- tasks, on a worker's thread -------------------------------------------------------------------------------

    def _forward(self, task: Task, call: ForwardCall) -> None:
        context = self._context
        self._begins(call.microbatch)
        module = context.called(call.module)
        context.switches.apply(task.label, call.training)
        with in_modes(call.modes):
            # Modes that intercept the module's operations need not see the work around it.
            with DisableTorchFunction():
                given = self._arguments(call)
                args, kwargs = unpack(call.head, given.tensors, module_of=context.modules.__getitem__)
                before = pack((args, kwargs), modules=context.paths) if call.mutable else None
            with self._runs_forward():
                result = call_with_hooks(module, *args, **kwargs)
            with DisableTorchFunction():
                made = None if before is not None else self._expected_tensor(call, given, result)
                is_expected = made is not None
                head = b""
                if made is None:
                    changed = None if before is None or self._is_same(before, (args, kwargs)) else (args, kwargs)
                    packed = pack((result, changed), modules=context.paths)
                    head, made = packed.head, self._outputs(call, given, packed.tensors)
                # First, because other stages wait for the results. If a check below fails, it ends the step.
                self._make(task, made)
                self._warn_if_written(task, given, made.tensors)
        if call.modes.grad:
            self._keep_graph(task, SavedGraph(made.tensors, made.made_here, given.entry, given.edges))
        if not is_expected:
            self._tell_result(task, call, head, made.slots, given)

    def _expected_tensor(self, call: ForwardCall, given: Arguments, result: Any) -> Made | None:
        """Return a result that is one tensor, made here, as the caller has assumed; None for any other result."""
        if call.expected is None or given.has_handles or not is_plain_result(result):
            return None
        expected = self._own.get(call.expected)
        if expected is None or expected != (meta := TensorMetadata.of(result),):
            return None
        if any(result is each for each in given.tensors):
            return None
        slot = TensorSlot(("F", call.microbatch, call.path, 0), self._context.stage, meta, False)
        return Made([slot], [result], [True])

    def _arguments(self, call: ForwardCall) -> Arguments:
        """Return the tensors of a call; those that require gradients enter this stage's graph."""
        values = self._context.values
        tensors: list[torch.Tensor] = []
        enters: list[int] = []
        has_handles = False
        for index, slot in enumerate(call.slots):
            tensors.append(values.get(slot.name).detach() if slot.comes else self._handle(slot))
            has_handles = has_handles or not slot.comes
            if call.modes.grad and slot.meta.requires_grad:
                enters.append(index)
        entry = CallInputs()
        edges: tuple[GradientEdge, ...] = ()
        if enters:
            entry.tensors = [tensors[index] for index in enters]
            entered = _Enter.apply(entry, self._context.anchor)
            for index, tensor in zip(enters, entered, strict=True):
                tensors[index] = tensor
            entry.tensors = []
            # Taken now: a module may change an argument in place.
            node = entered[0].grad_fn
            edges = tuple([GradientEdge(node, number) for number in range(len(enters))])
        return Arguments(tensors, [tensor._version for tensor in tensors], entry, edges, has_handles)

    def _is_same(self, before: Packed, arguments: Any) -> bool:
        """Return whether a module has left its arguments unchanged, apart from the elements of their tensors."""
        after = pack(arguments, modules=self._context.paths)
        return after.head == before.head and all(a is b for a, b in zip(after.tensors, before.tensors, strict=True))

    def _outputs(self, call: ForwardCall, given: Arguments, results: Sequence[torch.Tensor]) -> Made:
        """Return the tensors of a result: each is an unchanged argument, a value of an inner call, or made here."""
        position = {id(tensor): index for index, tensor in enumerate(given.tensors)}
        for index, tensor in enumerate(given.tensors):  # including the tensor that a handle fetched when it was used
            if isinstance(tensor, RemoteTensor) and tensor.fetched is not None and tensor.unchanged() is tensor:
                position[id(tensor.fetched)] = index
        outputs = [t.unchanged() if isinstance(t, RemoteTensor) else t for t in results]
        slots: list[TensorSlot | None] = []
        made_here = []
        for index, output in enumerate(outputs):
            argument = position.get(id(output))
            meta = TensorMetadata.of(output)
            made_here.append(False)
            if argument is not None and output._version == given.versions[argument]:
                slots.append(call.slots[argument]._replace(meta=meta, comes=False))
            elif isinstance(output, RemoteTensor):
                slots.append(TensorSlot(output.value_name, output.owner, meta, False))
            else:
                made_here[-1] = True
                slots.append(TensorSlot(("F", call.microbatch, call.path, index), self._context.stage, meta, False))
        return Made(slots, outputs, made_here)

    def _keep_graph(self, task: Task, graph: SavedGraph) -> None:
        """Keep the graph of a forward pass that has run; a request for its backward pass may already be on its way."""
        scheduler = self._context.scheduler
        with self._context.lock:
            ran = ("f", task.microbatch, task.path)
            self.graphs.setdefault(task.microbatch, {})[task.path] = graph
            self._ran.add(ran)
            scheduler.give(task, ran)
            scheduler.arrived(ran)
            self.most_in_flight = max(self.most_in_flight, len(self.graphs))

    def _tell_result(
        self, task: Task, call: ForwardCall, head: bytes, slots: Sequence[TensorSlot | None], given: Arguments
    ) -> None:
        """Compare the result with the one that the caller has assumed, or send a reply if the caller waits.

        Raises:
            SMPUserError: the caller has assumed another result.
        """
        outcome = outcome_of(head, slots, call.path, [slot.name for slot in call.slots])
        if call.expected is not None and not self._is_as_expected(outcome, call.expected):
            raise SMPUserError(
                f"module {task.label!r} returned {self._compared(slots, head, call.expected)} as from calls with arguments "
                "of the same shapes before, and its caller went on with that; a result whose shape, structure or numbers depend "
                'on values must be waited for: set "fast_mode": False in the parameters, or return such values as tensors of one '
                "shape",
                code="SMP306",
            )
        if call.wants_reply:
            touched = tuple(
                slot.comes or (isinstance(t, RemoteTensor) and t.touched)
                for slot, t in zip(call.slots, given.tensors, strict=True)
            )
            self._remember(outcome)
            self._reply(task, head, slots, touched)

    def _backward(self, task: Task, back: BackwardCall) -> None:
        self._begins(back.microbatch)
        current_record().enter(BACKWARD, back.microbatch)
        graph = self._take_graph(back)
        if graph is None:
            raise SMPUserError(
                "backward went through a module of another stage a second time, but its graph was freed after the first; "
                "call model.backward once per forward pass (retain_graph is not supported)",
                code="SMP306",
            )
        gradients = self._run_backward(graph, back)
        with DisableTorchFunction():
            made = self._gradients(back, gradients)
            self._make(task, made)
        if back.expected is not None and self._are_expected(made, back.expected):
            return
        outcome = outcome_of(b"", made.slots, back.path, [slot.name for slot in back.slots if slot is not None])
        if back.expected is not None and not self._is_as_expected(outcome, back.expected):
            raise SMPUserError(
                f"the backward pass of {task.label!r} gave gradients {self._compared(made.slots, b'', back.expected)} as passes "
                'of the same shape before, and its caller went on with those; set "fast_mode": False in the parameters',
                code="SMP306",
            )
        if back.wants_reply:
            self._remember(outcome)
            self._reply(task, b"", made.slots, ())

    def _take_graph(self, back: BackwardCall) -> SavedGraph | None:
        with self._context.lock:
            graphs = self.graphs.get(back.microbatch, {})
            graph = graphs.pop(back.path, None)
            if not graphs:
                self.graphs.pop(back.microbatch, None)
            return graph

    def _run_backward(self, graph: SavedGraph, back: BackwardCall) -> Sequence[torch.Tensor | None]:
        """Run a graph, and return the gradients of the arguments that require them.

        The result is empty if no path leads to such an argument.
        """
        values = self._context.values
        outputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for output, slot in zip(graph.outputs, back.slots, strict=True):
            if slot is not None and output.requires_grad:
                outputs.append(output)
                gradients.append(values.take(slot.name) if slot.comes else self._handle(slot))
        if outputs and back.accumulates:
            run_backward(
                tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
            return graph.entry.gradients
        if outputs and graph.edges:
            return run_backward(
                *(tuple(outputs), tuple(gradients), False, False, graph.edges),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return ()

    def _gradients(self, back: BackwardCall, gradients: Sequence[torch.Tensor | None]) -> Made:
        """Return the gradients of a call's arguments: each is made here, a value of an inner call, or None."""
        slots: list[TensorSlot | None] = []
        found: list[torch.Tensor] = []
        made_here = []
        for index, gradient in enumerate(gradients):
            made_here.append(gradient is not None and not isinstance(gradient, RemoteTensor))
            found.append(torch.empty(0, device="cpu") if gradient is None else gradient)
            if gradient is None:
                slots.append(None)
            elif isinstance(gradient, RemoteTensor):
                slots.append(TensorSlot(gradient.value_name, gradient.owner, TensorMetadata.of(gradient), False))
            else:
                name = ("B", back.microbatch, back.path, index)
                slots.append(TensorSlot(name, self._context.stage, TensorMetadata.of(gradient), False))
        return Made(slots, found, made_here)

    def _are_expected(self, made: Made, expected: bytes) -> bool:
        """Return whether all gradients were made here, and are those that the caller has assumed."""
        for slot, made_here in zip(made.slots, made.made_here, strict=True):
            if slot is not None and not made_here:
                return False
        return self._own.get(expected) == tuple([None if slot is None else slot.meta for slot in made.slots])

    def _is_as_expected(self, outcome: OutputMetadata, expected: bytes) -> bool:
        """Return whether a result is the one that the caller has assumed; each digest is computed only once."""
        if self._expected.get(expected) == outcome:
            return True
        if outcome.digest != expected:
            return False
        self._remember(outcome)
        return True

    def _remember(self, outcome: OutputMetadata) -> None:
        if len(self._expected) >= MOST_KINDS:
            self._expected.clear()
            self._own.clear()
        digest = outcome.digest
        self._expected[digest] = outcome
        if (metas := outcome.of_own_tensors(SINGLE_TENSOR)) is not None:
            self._own[digest] = metas

    def _compared(self, slots: Sequence[TensorSlot | None], head: bytes, expected: bytes) -> str:
        if (before := self._expected.get(expected)) is None:
            return f"{describe_tensors([None if slot is None else slot.meta for slot in slots])} and not the same"
        return describe_difference_of(before, slots, head)

    def _warn_if_written(self, task: Task, given: Arguments, outputs: Sequence[torch.Tensor]) -> None:
        """Log a warning, once per module, if a module changes an argument in place; its caller does not see the change."""
        for number, (tensor, version) in enumerate(zip(given.tensors, given.versions, strict=True)):
            now = tensor.unchanged() if isinstance(tensor, RemoteTensor) else tensor
            is_written = now is not tensor or now._version != version
            if is_written and not any(now is output for output in outputs):
                if task.label not in self._warned:
                    self._warned.add(task.label)
                    logger.warning(
                        "module %r changes tensor %d of its arguments, of shape %s, in place, but is on another pipeline stage "
                        "than its caller, who does not see the change; if it uses that tensor afterwards, pass a copy and "
                        "return the changed one, or keep both on one stage with smp.set_partition",
                        task.label,
                        number,
                        list(now.shape),
                    )
                return

    def _make(self, task: Task, made: Made) -> None:
        """Keep a result, and pack the parts that the caller itself uses, to be sent when the task ends."""
        for index, (slot, tensor) in enumerate(zip(made.slots, made.tensors, strict=True)):
            if slot is None or not made.made_here[index]:
                continue
            # Other stages get the elements alone: graphs do not leave a process, and gradients are messages of their own.
            value = tensor.detach()
            self._context.values.put(slot.name, value, made_by=task)
            if index in task.home:
                task.parcel[slot.name] = value

    def _reply(self, task: Task, head: bytes, slots: Sequence[TensorSlot | None], touched: tuple[bool, ...]) -> None:
        kind = str(task.kind)
        with self._context.lock:
            self._context.scheduler.give(task, ("r", kind, task.microbatch, task.path))
        reply = Reply(kind, task.microbatch, task.path, head, tuple(slots), touched)
        self._context.send(task.caller, reply, [])

    def _handle(self, slot: TensorSlot) -> RemoteTensor:
        return RemoteTensor(self._context.values, slot.name, slot.owner, slot.meta, self._context.device)
