"""Microbatch splitting: which leaves of a step's arguments are cut, along which axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import leaves_of


def split_argument(name: str, value: Any, microbatches: int, axis: int = 0) -> list[Any]:
    """The slices of one argument, one per microbatch.

    Tensors, also inside lists, tuples, dictionaries and sets, are cut along ``axis``; objects with
    ``smp_slice(num_mb, mb, axis)`` cut themselves; everything else, 0-dimensional tensors too, goes whole to every
    microbatch.

    Raises:
        SMPUserError: (a ``ValueError``) a tensor whose size along ``axis`` is not a multiple of ``microbatches``.
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
        return type(value)(
            *(_slice(f"{name}.{f}", v, count, index, axis) for f, v in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(_slice(f"{name}[{i}]", v, count, index, axis) for i, v in enumerate(value))
    if isinstance(value, set | frozenset):
        return type(value)(_slice(f"{name}{{}}", v, count, index, axis) for v in value)
    if isinstance(value, Mapping):
        sliced = {key: _slice(f"{name}[{key!r}]", v, count, index, axis) for key, v in value.items()}
        return sliced if type(value) is dict else _rebuilt(value, sliced)
    return value


def _slice_tensor(name: str, tensor: torch.Tensor, count: int, index: int, axis: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    if not -tensor.dim() <= axis < tensor.dim():
        raise SMPUserError(
            f"argument {name!r} has shape {list(tensor.shape)}, so it has no axis {axis} to split into microbatches; "
            "name its batch axis in input_split_axes, or name the argument in non_split_inputs"
        )
    size = tensor.shape[axis]
    if size % count:
        raise SMPUserError(
            f"argument {name!r} has {size} samples along axis {axis} (shape {list(tensor.shape)}), which cannot be "
            f"divided into {count} microbatches of equal size; use a batch of "
            f"{size // count * count or count} or {(size // count + 1) * count} samples (a data loader's drop_last=True "
            "drops a short last batch), or change microbatches"
        )
    return tensor.narrow(axis, index * (size // count), size // count)


def _rebuilt(original: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    """A mapping of the same type, for the types that allow it (OrderedDict, Transformers' BatchEncoding, …)."""
    try:
        return type(original)(content)  # type: ignore[call-arg]
    except TypeError:
        return content


def batch_samples(values: list[Any], axes: list[int]) -> int:
    """Samples in a batch: the size of the first tensor found along its batch axis, or 0 without tensors."""
    for value, axis in zip(values, axes, strict=True):
        for leaf in leaves_of(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                return int(leaf.shape[axis]) if -leaf.dim() <= axis < leaf.dim() else 0
    return 0


def shapes_in(*values: Any) -> tuple[Any, ...]:
    """Shapes of the tensors, and flags and words, in arguments: steps with equal ones take an equal course as a rule."""
    found: list[Any] = []
    for leaf in leaves_of(list(values)):
        if isinstance(leaf, torch.Tensor):
            found.append(tuple(leaf.shape))
        elif isinstance(leaf, bool | str | None):
            found.append(leaf)
    return tuple(found)
