"""Inputs and outputs of the microbatches of a step: arguments that are split, outputs that are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPAttributeError, SMPTypeError, SMPUserError
from smp_runtime.tensors.nested import leaves_of


def split_argument(name: str, value: Any, microbatches: int, axis: int = 0) -> list[Any]:
    """Return the slices of one argument, one per microbatch.

    Tensors, also inside lists, tuples, dictionaries and sets, are cut along ``axis``. Objects with
    ``smp_slice(num_mb, mb, axis)`` cut themselves. Everything else, 0-dimensional tensors too, goes whole to every
    microbatch.

    Raises:
        SMPUserError: (a ``ValueError``) the size of a tensor along ``axis`` is not a multiple of ``microbatches``.
    """
    if microbatches == 1 and not hasattr(value, "smp_slice"):
        return [value]
    return [_slice(name, value, microbatches, index, axis) for index in range(microbatches)]


def _slice(name: str, value: Any, count: int, index: int, axis: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _slice_tensor(name, value, count, index, axis)
    if hasattr(value, "smp_slice"):
        return value.smp_slice(count, index, axis)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # named tuple
        fields = zip(value._fields, value, strict=True)
        return type(value)(*[_slice(f"{name}.{field}", part, count, index, axis) for field, part in fields])
    if isinstance(value, list | tuple):
        return type(value)([_slice(f"{name}[{i}]", part, count, index, axis) for i, part in enumerate(value)])
    if isinstance(value, set | frozenset):
        return type(value)([_slice(f"{name}{{}}", part, count, index, axis) for part in value])
    if isinstance(value, Mapping):
        sliced = {key: _slice(f"{name}[{key!r}]", part, count, index, axis) for key, part in value.items()}
        return sliced if type(value) is dict else _rebuilt(value, sliced)
    return value


def _slice_tensor(name: str, tensor: torch.Tensor, count: int, index: int, axis: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    if not -tensor.dim() <= axis < tensor.dim():
        raise SMPUserError(
            f"argument {name!r} has shape {list(tensor.shape)}, so it has no axis {axis} to split into microbatches; "
            "name its batch axis in input_split_axes, or name the argument in non_split_inputs",
            code="SMP302",
        )
    size = tensor.shape[axis]
    if size % count:
        more = (size // count + 1) * count
        enough = f"{more - count} or {more}" if size > count else f"{more} or more"
        raise SMPUserError(
            f"argument {name!r} has {size} samples along axis {axis} (shape {list(tensor.shape)}), which cannot be "
            f"divided into {count} microbatches of equal size; use a batch of {enough} samples (a data loader's drop_last=True "
            "drops a short last batch), or change microbatches",
            code="SMP302",
        )
    return tensor.narrow(axis, index * (size // count), size // count)


def batch_samples(values: list[Any], axes: list[int]) -> int:
    """Return the samples in a batch: the size of its first tensor along the batch axis, or 0 without tensors."""
    for value, axis in zip(values, axes, strict=True):
        for leaf in leaves_of(value):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                continue
            has_axis = -leaf.dim() <= axis < leaf.dim()
            return int(leaf.shape[axis]) if has_axis else 0
    return 0


def shapes_in(*values: Any) -> tuple[Any, ...]:
    """Return the shapes of the tensors, and flags and strings, in arguments.

    Steps with equal ones normally take an equal course.
    """
    found: list[Any] = []
    for leaf in leaves_of(list(values)):
        if isinstance(leaf, torch.Tensor):
            found.append(tuple(leaf.shape))
        elif isinstance(leaf, bool | str | None):
            found.append(leaf)
    return tuple(found)


#: Error text for code that uses a :class:`StepOutput` as a tensor.
_IS_SEVERAL = (
    "holds one tensor for each microbatch; call .reduce_mean() on it first (or .reduce_sum(), .concat(), .stack()), "
    "as in float(loss.reduce_mean())"
)


class StepOutput:
    """All versions of a tensor that a step returned, one per microbatch.

    Args:
        outputs: the tensors, in microbatch order; an attribute, too.

    Example:
        >>> loss = train_step(model, inputs, targets)
        >>> print(f"loss {float(loss.reduce_mean()):.3f}")  # the mean over the microbatches
        loss ...
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = outputs

    def reduce_mean(self) -> torch.Tensor:
        """Return the mean over microbatches, of the shape of one output; whole numbers are averaged in float32."""
        stacked = self.stack()
        return (stacked if stacked.is_floating_point() or stacked.is_complex() else stacked.float()).mean(0)

    def reduce_sum(self) -> torch.Tensor:
        """Return the sum over microbatches, of the shape of one output."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """Return the outputs joined along their batch axis: ``[microbatches * batch, …]``; scalars become a vector."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs, dim=0)

    def stack(self) -> torch.Tensor:
        """Return the outputs along a new first axis: ``[microbatches, …]``."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return the same outputs without their graph."""
        return StepOutput([output.detach() for output in self.outputs])

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an error; for names of tensor attributes, it names the method to call first."""
            hint = f"; it {_IS_SEVERAL}" if hasattr(torch.Tensor, name) else ""
            if name == "backward":
                hint = (
                    "; its gradients are computed where the loss is: call model.backward(loss), of smp.DistributedModel, in the "
                    "function with @smp.step"
                )
            raise SMPAttributeError(f"'StepOutput' object has no attribute {name!r}{hint}", code="SMP302")

    def __float__(self) -> float:
        raise SMPTypeError(f"a StepOutput is no number: it {_IS_SEVERAL}", code="SMP302")

    def __format__(self, spec: str) -> str:
        if spec:
            raise SMPTypeError(f"a StepOutput cannot be formatted with {spec!r}: it {_IS_SEVERAL}", code="SMP302")
        return repr(self)

    def __repr__(self) -> str:
        first = self.outputs[0]
        return f"StepOutput({len(self.outputs)} × {first.dtype} {list(first.shape)})"


def merge_outputs(returned: list[Any], *, detach: bool) -> Any:
    """Return the result for the step's caller: the structure with a :class:`StepOutput` in place of every tensor.

    Leaves that are not tensors become a list with one entry per microbatch. The result is None if the function
    returned nothing.
    """
    if all(value is None for value in returned):
        return None
    return _merge(returned, detach)


def _merge(values: list[Any], detach: bool) -> Any:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        outputs = [value.detach() for value in values] if detach else list(values)
        return StepOutput(outputs)
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, list | tuple):
        return _merge_sequences(values, detach)
    if isinstance(first, Mapping):
        return _merge_mappings(values, detach)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return _merge_dataclasses(values, detach)
    return values


def _merge_sequences(values: list[Any], detach: bool) -> Any:
    first = values[0]
    if any(len(value) != len(first) for value in values):
        return values
    merged = [_merge(list(parts), detach) for parts in zip(*values, strict=True)]
    is_named_tuple = isinstance(first, tuple) and hasattr(first, "_fields")
    return type(first)(*merged) if is_named_tuple else type(first)(merged)


def _merge_mappings(values: list[Any], detach: bool) -> Any:
    first = values[0]
    if any(value.keys() != first.keys() for value in values):
        return values
    merged = {}
    for key in first:
        merged[key] = _merge([value[key] for value in values], detach)
    if not dataclasses.is_dataclass(first):
        return _rebuilt(first, merged)
    make: Any = type(first)
    return make(**merged)  # Transformers' ``ModelOutput``, a mapping too, takes keywords


def _merge_dataclasses(values: list[Any], detach: bool) -> Any:
    first = values[0]
    merged = {}
    for field in dataclasses.fields(first):
        if field.init:
            merged[field.name] = _merge([getattr(value, field.name) for value in values], detach)
    return type(first)(**merged)


def _rebuilt(original: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """Return a mapping of the same type, for the types that allow it (OrderedDict, Transformers' BatchEncoding, …)."""
    try:
        return type(original)(content)  # type: ignore[call-arg]
    except TypeError:
        return content


#: Attribute of a tensor that counts samples or tokens of one microbatch on average.
_COUNTS = "_smp_counts_of_all"


def mark_count(value: Any, *, of_all: bool) -> Any:
    """Mark a step's argument, if it is a tensor, as an average count of samples or tokens in a microbatch.

    Code that gives the step another batch must give it another count.

    Args:
        of_all: whether it is of all replicas' batches together, and so the same on all of them.
    """
    if isinstance(value, torch.Tensor):
        setattr(value, _COUNTS, of_all)
    return value


def counts_of_all(value: Any) -> bool | None:
    """Return whether a count is of all replicas' batches; None if the value is not a count."""
    return getattr(value, _COUNTS, None)
