"""Calls of modules that another stage owns: forward sends arguments, backward sends gradients, both as handles."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from smp_runtime.errors import SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.execution.output_metadata_cache import (
    LearnedOutput,
    OutputMetadata,
    OutputMetadataCache,
    OutputPrediction,
    outcome_of,
)
from smp_runtime.pipeline.execution.stage_context import StageContext, current_modes
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.pipeline.transport.messages import BackwardCall, ForwardCall, GroupCall, Modes, Reply, TensorSlot
from smp_runtime.pipeline.transport.packing import Packed, pack, restore_into, unpack
from smp_runtime.tensors.remote_tensor import Name, Path, RemoteTensor, TensorMetadata
from smp_runtime.tensors.torch_private import DisableTorchFunction, backward_pass, will_run

if TYPE_CHECKING:
    from smp_runtime.pipeline.execution.task import Task


class RemoteCaller:
    """The maker of one rank's calls to modules of other stages."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._predictions = OutputMetadataCache()
        #: The node of the graph that backward reaches in every call, unless it computes gradients of given tensors only.
        self._accumulates = get_gradient_edge(context.anchor).node

    def call(self, module: str | GroupCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module at a path that another stage owns, or several; returns the result, with handles for tensors.

        Raises:
            SMPUserError: outside a step, or an argument that cannot travel.
        """
        context, label = self._context, str(module)
        task = context.scheduler.current
        if task is None:
            raise SMPUserError(
                f"module {label!r} lies on pipeline stage {context.stage_of_call(module)} and was called on stage "
                f"{context.stage} outside a step; call the model only inside a function decorated with smp.step",
                code="SMP306",
            )
        if backward_pass() != -1:
            raise SMPUserError(
                f"module {label!r} lies on pipeline stage {context.stage_of_call(module)} and was called again on stage "
                f"{context.stage} in backward, by a checkpointed region around it; checkpoint with "
                "smp.set_activation_checkpointing, which runs modules again on their own stage, or checkpoint only what lies on "
                "one stage",
                code="SMP306",
            )
        # Nothing of what follows is the script's: modes that take its operations need not hear of it, and handles answer quicker.
        with DisableTorchFunction():
            return self._post(task, module, label, args, kwargs)

    def _post(
        self, task: Task, module: str | GroupCall, label: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = self._context
        packed = pack((args, kwargs), modules=context.paths)
        tensors = [t.unchanged() if isinstance(t, RemoteTensor) else t for t in packed.tensors]
        modes = current_modes()
        metas = tuple(TensorMetadata.of(tensor) for tensor in tensors)
        training = context.switches.of_call(label)
        # What requires gradients is part of all that is learned.
        prediction = self._predictions.of((label, packed.head, metas, modes, training, context.switches.requires))
        call = RemoteCall(context, task, module, prediction, packed, tensors, metas, modes, training, self._accumulates)
        if modes.grad:
            inputs = [tensor for tensor, meta in zip(tensors, metas, strict=True) if meta.requires_grad]
            outputs: Sequence[torch.Tensor] = _Remote.apply(call, context.anchor, *inputs)
        else:
            outputs = call.forward()
        result, changed = unpack(call.outcome.head, outputs, module_of=context.modules.__getitem__)
        if changed is not None:
            restore_into((args, kwargs), changed)
        return result


class RemoteCall:
    """One call of one microbatch."""

    #: Metadata of the call's result.
    outcome: OutputMetadata

    def __init__(
        self,
        context: StageContext,
        task: Task,
        module: str | GroupCall,
        prediction: OutputPrediction,
        packed: Packed,
        tensors: list[torch.Tensor],
        metas: Sequence[TensorMetadata],
        modes: Modes,
        training: bytes,
        accumulates: Any,
    ) -> None:
        self._context = context
        self._module = module
        self._stage = context.stage_of_call(module)
        self._microbatch = task.microbatch
        self._path: Path = (*task.path, task.calls)
        task.calls += 1
        label = str(module)
        self._nth = task.called.get(label, 0)
        task.called[label] = self._nth + 1
        self._task = task
        self._prediction = prediction
        self._packed = packed
        self._tensors: list[torch.Tensor] | None = tensors
        self._metas = metas
        self._modes = modes
        self._training = training
        self._accumulates = accumulates
        #: Of the arguments that require gradients: whether the caller has a handle, not the tensor.
        given = zip(tensors, metas, strict=True) if modes.grad else ()
        self._by_handle = [isinstance(tensor, RemoteTensor) for tensor, meta in given if meta.requires_grad]

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[torch.Tensor, ...]:
        """Post the request; returns the tensors of the result."""
        context, task, prediction = self._context, self._task, self._prediction
        slots, inline = self._argument_slots()
        self._came = tuple(slot.comes for slot in slots)
        known = prediction.forward.get(self._came) or prediction.forward.setdefault(self._came, LearnedOutput())
        waits = not (known.is_known and context.predicts)
        expected = None if waits else known.digest
        context.opens(task, "F", self._path)
        goes = known.ways if known.is_known else ()
        message = ForwardCall(
            self._microbatch,
            self._path,
            self._module,
            self._packed.head,
            self._packed.mutable,
            tuple(slots),
            self._modes,
            self._training,
            self._nth,
            waits,
            expected,
            goes,
            tuple(inline),
        )
        self._request(task, message, inline)
        self._tensors = None
        self.outcome, results, reply = self._results(task, "F", known, waits, slots)
        if reply is not None:
            prediction.learn_touched(reply)
        self._announce(results, goes, "F")
        return tuple(self._handles_of(task, results, known).values())

    def _request(self, task: Task, message: ForwardCall | BackwardCall, inline: Mapping[Name, torch.Tensor]) -> None:
        if task.kind is TaskKind.STEP:
            self._context.root_program.post((task.microbatch, task.part), self._stage, message, inline)
        else:  # of a module that calls others: no program has these
            self._context.send(self._stage, message, list(inline.values()))

    def _results(
        self, task: Task, kind: str, learned: LearnedOutput, waits: bool, given: Sequence[TensorSlot | None]
    ) -> tuple[OutputMetadata, list[TensorSlot | None], Reply | None]:
        """Return the results of a request, from its reply or as learned from earlier requests.

        Args:
            kind: of the request, "F" or "B".
            learned: from such requests.
            waits: whether a reply comes.
            given: the tensors of the request; a result that is one of them is named as such.
        """
        context = self._context
        arguments = [(slot.name, slot.owner) for slot in given if slot is not None]
        reply = context.wait_for_reply(task, kind, self._path) if waits else None
        if reply is not None:
            outcome = outcome_of(reply.head, reply.slots, self._path, [name for name, _ in arguments])
            context.learned += learned.observe(outcome)
            results = list(reply.slots)
        elif learned.outcome is not None:
            outcome = learned.outcome
            results = self._slots_of(outcome, arguments)
        else:
            raise AssertionError("a known result without its outcome")
        if context.in_turn:  # a reply proves only that the result exists; the request may have more work to do
            context.wait_until_done(task, kind, self._path)
        return outcome, results, reply

    def _argument_slots(self) -> tuple[list[TensorSlot], dict[Name, torch.Tensor]]:
        """Return the slots of the arguments, and the tensors to send with the request, by name."""
        context, values = self._context, self._context.values
        touched = self._prediction.touched
        slots: list[TensorSlot] = []
        inline: dict[Name, torch.Tensor] = {}
        for index, tensor in enumerate(self._tensors or ()):
            comes = touched is not None and touched[index]
            meta = self._metas[index]
            if isinstance(tensor, RemoteTensor):
                slots.append(TensorSlot(tensor.value_name, tensor.owner, meta, comes or tensor.owner == self._stage))
                if comes:
                    self._direct(tensor)
                continue
            name, is_there = values.hand(tensor, ("A", self._microbatch, self._path, index), self._stage, comes)
            if not values.has(name):
                values.put(name, tensor.detach(), made_by=self._task)
            slots.append(TensorSlot(name, context.stage, meta, comes or is_there))
            if comes and not is_there:
                inline[name] = tensor.detach()
        return slots, inline

    def _slots_of(self, outcome: OutputMetadata, arguments: Sequence[tuple[Name, int]]) -> list[TensorSlot | None]:
        return [
            None if template is None else template.slot(self._microbatch, self._path, arguments)
            for template in outcome.templates
        ]

    def _announce(self, results: Sequence[TensorSlot | None], goes: Iterable[tuple[int, int]], kind: str) -> None:
        """Record that values made by the called stage go to the stages that needed them before, without a request.

        If the caller has waited, it may have got another result than before, with fewer tensors.
        """
        for index, stage in goes:
            slot = results[index] if index < len(results) else None
            if slot is not None and slot.name[:3] == (kind, self._microbatch, self._path):
                self._context.values.announce(slot.name, stage)

    def _direct(self, handle: RemoteTensor) -> None:
        """Have the elements of a handle sent to the called stage, which needs them."""
        if handle.owner != self._stage:
            if handle.needed is not None:
                handle.needed(self._stage)
            self._context.values.direct(handle.value_name, handle.owner, self._stage)

    def _handles_of(
        self, task: Task, slots: Sequence[TensorSlot | None], known: LearnedOutput
    ) -> dict[int, RemoteTensor]:
        """Return handles for the tensors of a result, by position.

        The handles record which stages need their elements in ``known``.
        """
        context = self._context
        handles = {}
        for index, slot in enumerate(slots):
            if slot is not None:
                handles[index] = handle = RemoteTensor(context.values, slot.name, slot.owner, slot.meta, context.device)
                handle.needed = functools.partial(known.is_needed, index)

        def learn_home() -> None:
            for index, handle in handles.items():
                if handle.touched:
                    known.is_needed(index, context.stage)

        task.ended.append(learn_home)
        return handles

    @property
    def differentiable(self) -> list[bool]:
        """Return for each output whether it requires gradients."""
        templates = self.outcome.templates
        return [template is not None and template.meta.requires_grad for template in templates]

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Post the backward pass; returns the gradients of the arguments that require them."""
        context = self._context
        task = context.scheduler.current
        if task is None:
            raise SMPUserError(
                f"backward reached module {str(self._module)!r} of pipeline stage {self._stage} outside its step; call "
                "model.backward(loss) inside the function decorated with smp.step",
                code="SMP306",
            )
        if torch.is_grad_enabled():
            raise SMPUserError(
                f"module {str(self._module)!r} lies on pipeline stage {self._stage}, and backward went through it with "
                f"create_graph=True on stage {context.stage}, but no graph of a backward pass leads from stage to stage; keep what "
                "is differentiated twice on one stage (smp.set_partition), or leave create_graph out",
                code="SMP306",
            )
        # False for torch.autograd.grad and backward(inputs=...).
        accumulates: bool = will_run(self._accumulates)
        slots, inline = self._gradient_slots(task, gradients)
        # A gradient's name depends on which tensors were passed as elements and which by name.
        course = (self._came, accumulates, tuple(None if slot is None else slot.comes for slot in slots))
        learned = self._prediction.backward.get(course) or self._prediction.backward.setdefault(course, LearnedOutput())
        waits = not (learned.is_known and context.predicts)
        here = {(index, context.stage) for index, by_handle in enumerate(self._by_handle) if not by_handle}
        goes = tuple(sorted(here | learned.goes if learned.is_known else here))
        context.opens(task, "B", self._path)
        message = BackwardCall(
            self._microbatch,
            self._path,
            tuple(slots),
            task.in_model_backward,
            accumulates,
            waits,
            None if waits else learned.digest,
            goes,
            tuple(inline),
        )
        self._request(task, message, inline)
        _, results, _ = self._results(task, "B", learned, waits, slots)
        self._announce(results, goes, "B")
        handles = self._handles_of(task, results, learned)
        returned: list[torch.Tensor | None] = []
        for index, (slot, by_handle) in enumerate(zip(results, self._by_handle, strict=True)):
            if slot is None or by_handle:
                returned.append(handles.get(index))
            else:
                returned.append(context.values.fetch(slot.name, slot.owner).detach())
        return returned

    def _gradient_slots(
        self, task: Task, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[TensorSlot | None], dict[Name, torch.Tensor]]:
        """Return the slots of the outputs' gradients, and the gradients to send with the request, by name."""
        context = self._context
        slots: list[TensorSlot | None] = []
        inline: dict[Name, torch.Tensor] = {}
        for index, gradient in enumerate(gradients):
            if gradient is None:
                slots.append(None)
                continue
            meta = TensorMetadata.of(gradient)
            template = self.outcome.templates[index]
            made_there = template is not None and template.kind == "F" and template.suffix == ()
            if isinstance(gradient, RemoteTensor):
                comes = made_there or gradient.owner == self._stage
                slots.append(TensorSlot(gradient.value_name, gradient.owner, meta, comes))
                if comes:
                    self._direct(gradient)
                continue
            name: Name = ("G", self._microbatch, self._path, index)
            context.scheduler.give(task, name)  # not kept: it goes to one stage, which uses it once
            slots.append(TensorSlot(name, context.stage, meta, True))
            inline[name] = gradient.detach()
        return slots, inline


class _Remote(torch.autograd.Function):
    """The place of a remote call in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: RemoteCall, anchor: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward()
        fixed = [o for o, differentiable in zip(outputs, call.differentiable, strict=True) if not differentiable]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None, None, *([None] * (len(ctx.needs_input_grad) - 2)))
        with DisableTorchFunction():
            return (None, None, *ctx.call.backward(gradients))


class RemoteEntry:
    """A stand-in for a module's call on the stages that do not own it."""

    is_elsewhere = True

    def __init__(self, caller: RemoteCaller, path: str) -> None:
        self._caller = caller
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`RemoteCaller.call`."""
        return self._caller.call(self._path, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _NotHere(self._path)

    def __reduce__(self) -> Any:
        return _NotHere, (self._path,)


class _NotHere:
    """The remainder of a remote module in a copy of the model."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SMPRuntimeError(
            f"this is a copy of module {self._path!r}, whose parameters are on another pipeline stage; only the original can "
            "be called"
        )
