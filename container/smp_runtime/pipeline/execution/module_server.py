"""The module server: runs the modules of this stage for the others, forward and backward, as tasks."""

from __future__ import annotations

import contextlib
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
from smp_runtime.pipeline.transport.packing import Packed, pack, unpack
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
        self.graphs: dict[tuple[int, Path], SavedGraph] = {}
        #: Most microbatches with a graph at once.
        self.most_in_flight = 0
        #: Module path of every call of the step, for messages.
        self._labels: dict[tuple[int, Path], str] = {}
        #: Forward passes of the step that have left a graph, as events ``("f", microbatch, path)``.
        self._ran: set[Event] = set()
        #: Modules that were seen to change an argument in place.
        self._warned: set[str] = set()
        self._expected: dict[bytes, OutputMetadata] = {}

    # -- requests, on the receiver's thread ------------------------------------------------------------------------

    def accept(self, caller: int, call: ForwardCall | BackwardCall, group: int) -> None:
        """Accept a request that the step's program has; its tensors come separately."""
        if isinstance(call, ForwardCall):
            self.accept_call(caller, call, (), group)
        else:
            self.accept_backward(caller, call, (), group)

    def accept_call(
        self, caller: int, call: ForwardCall, tensors: Sequence[torch.Tensor], group: int | None = None
    ) -> None:
        """Accept a request to run a module."""
        self._context.values.put_all(call.inline, tensors)
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
        task.group = group
        self._direct("F", task, call.goes)
        self._add("F", task, call.slots)

    def accept_backward(
        self, caller: int, back: BackwardCall, tensors: Sequence[torch.Tensor], group: int | None = None
    ) -> None:
        """Accept a request to run a module's backward pass."""
        self._context.values.put_all(back.inline, tensors)
        task = Task(
            TaskKind.BACKWARD,
            back.microbatch,
            back.path,
            self._labels.get((back.microbatch, back.path), ""),
            lambda task: self._backward(task, back),
            self._context.random_state(back.microbatch, "backward", 0),
            caller=caller,
        )
        task.group = group
        task.in_model_backward = back.in_model_backward
        self._direct("B", task, back.goes)
        # A caller that used an argument which the module only hands on can be here before the forward pass has run.
        self._add("B", task, back.slots, ("f", back.microbatch, back.path))

    def release(self, microbatch: int) -> None:
        """Release the remaining graphs of a finished microbatch; no stage has requested their backward pass."""
        for key in [key for key in self.graphs if key[0] == microbatch]:
            del self.graphs[key]

    def clear(self) -> None:
        """Clear the state at the end of the step."""
        self.graphs.clear()
        self._labels.clear()
        self._ran.clear()

    def _add(self, kind: str, task: Task, slots: Sequence[TensorSlot | None], *more: Event) -> None:
        context = self._context
        request = ("q", kind, task.microbatch, task.path)
        needs = [request, *(slot.name for slot in slots if slot is not None and slot.comes), *more]
        task.known.update(needs)
        with context.lock:
            if context.scheduler.is_aborted:
                return
            context.scheduler.add(
                task,
                dict.fromkeys(needs),
                lambda event: event == request or event in self._ran or context.is_there(event),
            )
            context.scheduler.poke()

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
                changed = None if before is None or self._is_same(before, (args, kwargs)) else (args, kwargs)
                packed = pack((result, changed), modules=context.paths)
                made = self._outputs(call, given, packed.tensors)
                # First, because other stages wait for the results. If a check below fails, it ends the step.
                self._make(task, made)
                self._warn_if_written(task, given, made.tensors)
        if call.modes.grad:
            self._keep_graph(task, SavedGraph(made.tensors, made.made_here, given.entry, given.edges))
        self._tell_result(task, call, packed.head, made.slots, given)

    def _arguments(self, call: ForwardCall) -> Arguments:
        """Return the tensors of a call; those that require gradients enter this stage's graph."""
        values = self._context.values
        tensors: list[torch.Tensor] = []
        enters: list[int] = []
        for index, slot in enumerate(call.slots):
            tensors.append(values.get(slot.name).detach() if slot.comes else self._handle(slot))
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
        return Arguments(tensors, [tensor._version for tensor in tensors], entry, edges)

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
            self.graphs[task.microbatch, task.path] = graph
            self._ran.add(ran)
            scheduler.give(task, ran)
            scheduler.arrived(ran)
            self.most_in_flight = max(self.most_in_flight, len({key[0] for key in self.graphs}))

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
        with self._context.lock:
            graph = self.graphs.pop((back.microbatch, back.path), None)
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
        self._expected[outcome.digest] = outcome

    def _compared(self, slots: Sequence[TensorSlot | None], head: bytes, expected: bytes) -> str:
        if (before := self._expected.get(expected)) is None:
            return f"{describe_tensors([None if slot is None else slot.meta for slot in slots])} and not the same"
        return describe_difference_of(before, slots, head)

    def _warn_if_written(self, task: Task, given: Arguments, outputs: Sequence[torch.Tensor]) -> None:
        """Log a warning, once per module, if a module changes an argument in place; its caller does not see the change."""
        returned = {id(output) for output in outputs}
        for number, (tensor, version) in enumerate(zip(given.tensors, given.versions, strict=True)):
            now = tensor.unchanged() if isinstance(tensor, RemoteTensor) else tensor
            if (now is not tensor or now._version != version) and id(now) not in returned:
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
                task.parcel[slot.name] = tensor.detach()

    def _reply(self, task: Task, head: bytes, slots: Sequence[TensorSlot | None], touched: tuple[bool, ...]) -> None:
        kind = str(task.kind)
        with self._context.lock:
            self._context.scheduler.give(task, ("r", kind, task.microbatch, task.path))
        reply = Reply(kind, task.microbatch, task.path, head, tuple(slots), touched)
        self._context.send(task.caller, reply, [])

    def _handle(self, slot: TensorSlot) -> RemoteTensor:
        return RemoteTensor(self._context.values, slot.name, slot.owner, slot.meta, self._context.device)
