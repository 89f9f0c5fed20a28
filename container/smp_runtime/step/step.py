"""``@smp.step``: a function that runs once per microbatch, with gradients reduced once at its end."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from smp_config import Group
from smp_records.rank_record import BETWEEN, REDUCTION, current_record
from smp_runtime.comm.devices import in_order_with_script, keep_for_script
from smp_runtime.errors import SMPTypeError, SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.pipeline.transport.messages import StepKind
from smp_runtime.step.first_stage_inputs import Arguments, FirstStageInputs, probe
from smp_runtime.step.last_microbatch import LastMicrobatch
from smp_runtime.step.microbatches import StepOutput, batch_samples, merge_outputs, shapes_in, split_argument
from smp_runtime.tensors.determinism import explain_operations
from smp_runtime.tensors.nested import clone_inference_tensors, leaves_of

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedModel
    from smp_runtime.pipeline.execution.rank_pipeline import Pipeline

#: How many calls of a step are looked at, to see whether the ranks of a pipeline have read the same batch.
_PROBED_CALLS = 2


class StepFunction:
    """A step-decorated function.

    Args:
        function: runs for each microbatch.
        non_split_inputs: names of arguments that go whole to every microbatch.
        input_split_axes: batch axis of arguments by name, if it is not 0.

    Raises:
        SMPUserError: a name that the function has no argument for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Sequence[str] = (),
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        self._function = function
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes or {})
        self._detach = detach_outputs
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._probes = _PROBED_CALLS
        self._signature = inspect.signature(function)
        self._check_names()
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        # A step may be a method: its instance is an argument that is never split.
        return self if instance is None else functools.partial(self._call_of, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run every microbatch; see :func:`step` for the splitting and the result."""
        return self._call((), *args, **kwargs)

    def _call_of(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._call((instance,) if self._takes(instance, args, kwargs) else (), *args, **kwargs)

    def _takes(self, instance: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the function is a method that takes ``instance``.

        A plain function may also stand in a class body and be called on an instance.
        """
        first = next(iter(self._signature.parameters.values()), None)
        if first is not None and (first.name == "self" or first.kind is inspect.Parameter.VAR_POSITIONAL):
            return True
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError:  # it fits with the instance, or fails as in plain Python
            return True
        return False

    def _call(self, bound: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        session = sessions.current_session()
        for begin in session.before_step:
            begin()
        notes = current_record()
        with session.ranks.control.doing(f"the step {self._name}"):
            notes.begin_step()
            result = self._step(session, bound, *args, **kwargs)
            notes.enter(BETWEEN)
        for heard in session.after_step:
            heard(result)
        return result

    def _call_with(self, bound: tuple[Any, ...], slices: Sequence[Any], names: Sequence[str]) -> functools.partial[Any]:
        """Return a microbatch's call of the function; the last slices are its arguments by name."""
        positional = len(slices) - len(names)
        by_name = dict(zip(names, slices[positional:], strict=True))
        return functools.partial(self._function, *bound, *slices[:positional], **by_name)

    def _step(self, session: Session, bound: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        if session.ranks.step.microbatch is not None:
            raise SMPUserError(
                f"the step {self._function.__name__!r} was called inside another step; call it outside, or take the "
                "decorator off the inner function",
                code="SMP302",
            )
        ranks = session.ranks
        count = ranks.cfg.microbatches
        own = args, kwargs
        if ranks.size(Group.PP) > 1:
            pipeline = _pipeline_of(session.models)
            inputs = ranks.keep(FirstStageInputs, functools.partial(FirstStageInputs, ranks))
            args, kwargs = inputs.of_step(own, self._name, pipeline.root_rank if pipeline is not None else None)
        names = self._argument_names(len(bound) + len(args))[len(bound) :]
        axes = [self._axes.get(name, 0) for name in (*names, *kwargs)]
        values = [*args, *kwargs.values()]
        for change in session.arguments:
            whole = [name in self._whole for name in (*names, *kwargs)]
            values = change(values, [None if w else axis for w, axis in zip(whole, axes, strict=True)])
        split = [
            [value] * count if name in self._whole else split_argument(name, value, count, axis)
            for name, value, axis in zip((*names, *kwargs), values, axes, strict=True)
        ]
        microbatches = [
            self._call_with(bound, [of_argument[index] for of_argument in split], list(kwargs))
            for index in range(count)
        ]
        if session.ranks.size(Group.PP) > 1 and torch.is_inference_mode_enabled():
            microbatches = [_with_plain_tensors(microbatch) for microbatch in microbatches]
        session.progress.step_begins()
        models = session.models
        for model in models:
            model.partition(microbatches[0])
        for model in models:
            model.begin_step()
        try:
            returned = [ranks.step.leave(result) for result in self._run(session, models, microbatches, own)]
        except BaseException:  # also Ctrl-C: the next step must not find gradients and windows of this one
            for model in models:
                model.abandon_step()
            raise
        current_record().enter(REDUCTION)
        trained = [model.finish_step() for model in models]
        merged = merge_outputs(returned, detach=self._detach)
        if any(trained):
            first = microbatches[0]
            ranks.keep(LastMicrobatch, LastMicrobatch).note(self, first, shapes_in(first.args, first.keywords))
            replicas = session.ranks.size(Group.BATCH_RDP if session.ranks.cfg.prescaled_batch else Group.BATCH_DP)
            session.progress.note_samples(batch_samples(values, axes) * replicas)
            session.progress.note_loss(first_scalar(merged))
        session.ranks.step.count += 1
        return merged

    def _run(
        self,
        session: Session,
        models: Sequence[TrainedModel],
        microbatches: Sequence[functools.partial[Any]],
        own: Arguments,
    ) -> list[Any]:
        """Run the microbatches one after the other, or through the model's pipeline, and return their results.

        Args:
            own: this rank's arguments, which a pipeline compares with the other stages'.
        """
        pipeline = _pipeline_of(models)
        if pipeline is not None:
            first = microbatches[0]
            course = (id(self), torch.is_grad_enabled(), tuple(model.training for model in models))
            kind = StepKind(course, shapes_in(first.args, first.keywords))
            looked_at = probe_of(own) if self._probes > 0 else None
            self._probes -= 1
            call = StepCall(self._name, (*course[1:2], *course[2]), shapes_in(*own), looked_at)
            flags = [model.module.training for model in models]
            with in_order_with_script(session.ranks.device):
                results = pipeline.run_step(kind, microbatches, call)
            keep_for_script(results, session.ranks.device)
            for model, flag in zip(models, flags, strict=True):
                if model.module.training != flag:  # switched in the step, which only one stage has run
                    model.training = model.module.training
            return results
        returned = []
        try:
            # Backward on the calling thread, as in a pipeline: recomputation finds there what forward has left.
            with explain_operations(), torch.autograd.set_multithreading_enabled(False):
                for index, microbatch in enumerate(microbatches):
                    session.ranks.step.microbatch = index
                    returned.append(microbatch())
        finally:
            session.ranks.step.microbatch = None
        return returned

    def _argument_names(self, count: int) -> list[str]:
        """Return the parameter name of each positional argument; those of ``*args`` share one name."""
        names: list[str] = []
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                names += [parameter.name] * (count - len(names))
            elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
        if count > len(names):
            raise SMPTypeError(
                f"{self._function.__name__}() takes {len(names)} positional arguments but {count} were given",
                code="SMP302",
            )
        return names[:count]

    def _check_names(self) -> None:
        parameters = self._signature.parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            return
        for given, names in (("non_split_inputs", self._whole), ("input_split_axes", self._axes)):
            for name in names:
                if name not in parameters:
                    raise SMPUserError(
                        f"{given} names {name!r}, but {self._function.__name__}() has the arguments "
                        f"{', '.join(parameters)}; use one of these",
                        code="SMP302",
                    )


@overload
def step(function: Callable[..., Any], /) -> StepFunction: ...


@overload
def step(
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    non_split_inputs: Sequence[str] | Callable[..., Any] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> StepFunction | Callable[[Callable[..., Any]], StepFunction]:
    """Decorate one forward and backward pass (or one forward pass, for evaluation).

    Tensor arguments, also inside lists, tuples, dictionaries and sets, and objects with
    ``smp_slice(num_mb, mb, axis)`` are split along axis 0 into ``microbatches`` parts. The function runs once for
    each part. Tensors in its result become :class:`StepOutput`; other leaves become a list with one entry per
    microbatch. Gradients are reduced over the data parallel ranks once, when the last microbatch is done.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole; or the function, for
            ``@smp.step`` alone.
        input_split_axes: batch axis by argument name, if it is not 0.
        detach_outputs: False keeps the graph of returned tensors alive.

    Returns:
        A function with the same arguments, which every rank calls; or a decorator, if settings were given.

    Raises:
        SMPUserError: the decorated object cannot be called, or a setting has a wrong type.

    Example:
        >>> @smp.step
        ... def train_step(model, inputs, targets):
        ...     loss = cross_entropy(model(inputs), targets)
        ...     model.backward(loss)
        ...     return loss
        >>> loss = train_step(model, inputs, targets).reduce_mean()
        >>> @smp.step(non_split_inputs=["mask"], input_split_axes={"inputs": 1})
        ... def evaluate(model, inputs, mask):
        ...     return model(inputs.transpose(0, 1) * mask)
    """
    if callable(non_split_inputs):
        return StepFunction(non_split_inputs, (), input_split_axes, detach_outputs)
    if isinstance(non_split_inputs, str):
        raise SMPUserError(
            f"non_split_inputs is {non_split_inputs!r}, a word; it lists names of arguments: use [{non_split_inputs!r}]",
            code="SMP302",
        )
    whole = tuple(non_split_inputs or ())
    return lambda wrapped: StepFunction(wrapped, whole, input_split_axes, detach_outputs)


def _with_plain_tensors(microbatch: functools.partial[Any]) -> functools.partial[Any]:
    """Return the microbatch with plain tensors in place of those of inference mode.

    Tensors of inference mode do not record whether they were changed, which a pipeline checks. The pipeline's
    threads run without gradients then, which gives the same results.
    """
    with torch.inference_mode(False):
        args, kwargs = clone_inference_tensors((microbatch.args, microbatch.keywords))
    return functools.partial(microbatch.func, *args, **kwargs)


def first_scalar(merged: Any) -> list[torch.Tensor]:
    """Return the outputs of the first floating point scalar that a step returned: by convention its loss."""
    if isinstance(merged, StepOutput):
        first = merged.outputs[0]
        is_loss = first.numel() == 1 and first.is_floating_point()
        return merged.outputs if is_loss else []
    children: Iterable[Any] = ()
    if isinstance(merged, Mapping):
        children = merged.values()
    elif isinstance(merged, list | tuple):
        children = merged
    for child in children:
        found = first_scalar(child)
        if found:
            return found
    return []


class StepCall(NamedTuple):
    """One call of a step function."""

    function: str  # its name
    modes: tuple[bool, ...]  # whether gradients are recorded, and each model's training flag
    shapes: Hashable  # of its arguments
    probe: float | None  # a sum over the first tensor's first elements; None if not computed

    def check(self, root: StepCall, rank: int, root_rank: int) -> str:
        """Compare this rank's call with the root stage's.

        Returns:
            A warning if the batches differ, which is harmless only if it is intended; empty otherwise.

        Raises:
            SMPUserError: the ranks run different functions, or in different modes.
        """
        if (self.function, self.modes) != (root.function, root.modes):
            raise SMPUserError(
                f"rank {rank} called the step {self.function} ({_described(self.modes)}), but rank {root_rank} of the same "
                f"pipeline called {root.function} ({_described(root.modes)}); every rank of a pipeline runs the same steps in the "
                "same order: branch on smp.dp_rank() or on values that all of them have, not on smp.rank()",
                code="SMP302",
            )
        what = ""
        if self.shapes != root.shapes:
            what = "of other shapes or with other settings"
        elif self.probe != root.probe and not _are_both_nan(self.probe, root.probe):
            what = "with other values"
        return what and (
            f"rank {rank} called the step {self.function} with a batch {what} than rank {root_rank} of the same pipeline; that of "
            "the pipeline's first rank (smp.pp_rank() == 0) is used. Placeholders on the others do no harm, but data that they "
            "read would be lost: give the sampler num_replicas=smp.dp_size() and rank=smp.dp_rank()"
        )


def probe_of(values: Any) -> float | None:
    """Return a number that normally differs for different batches, from the first tensor in arguments of any nesting."""
    first = next((leaf for leaf in leaves_of(list(values)) if isinstance(leaf, torch.Tensor)), None)
    return None if first is None else probe(first)


def _pipeline_of(models: Sequence[TrainedModel]) -> Pipeline | None:
    """Return the pipeline that runs a step's models; None if none is partitioned."""
    return next((model.pipeline for model in models if model.pipeline is not None), None)


def _are_both_nan(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return math.isnan(one) and math.isnan(other)


def _described(modes: tuple[bool, ...]) -> str:
    gradients, *training = modes
    with_gradients = "with" if gradients else "without"
    models = ", ".join("training" if flag else "evaluation" for flag in training)
    return f"{with_gradients} gradients, {models or 'no'} mode"
