"""``StepOutput``: one returned tensor over all microbatches, and how returned structures become it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


class StepOutput:
    """All versions of a tensor that a step returned, one per microbatch.

    Attributes:
        outputs: the tensors, in microbatch order.
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = outputs

    def reduce_mean(self) -> torch.Tensor:
        """Mean over microbatches, of the shape of one output; whole numbers are averaged in float32."""
        stacked = self.stack()
        return (stacked if stacked.is_floating_point() or stacked.is_complex() else stacked.float()).mean(0)

    def reduce_sum(self) -> torch.Tensor:
        """Sum over microbatches, of the shape of one output."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """Outputs joined along their batch axis: ``[microbatches * batch, …]``; scalars become a vector."""
        if self.outputs[0].dim() == 0:
            return self.stack()
        return torch.cat(self.outputs, dim=0)

    def stack(self) -> torch.Tensor:
        """Outputs along a new first axis: ``[microbatches, …]``."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """The same outputs without their graph."""
        return StepOutput([output.detach() for output in self.outputs])

    def __repr__(self) -> str:
        first = self.outputs[0]
        return f"StepOutput({len(self.outputs)} × {first.dtype} {list(first.shape)})"


def merge_outputs(returned: list[Any], *, detach: bool) -> Any:
    """What the step's caller sees: the returned structure with every tensor replaced by a :class:`StepOutput`.

    Leaves that are not tensors become a list with one entry per microbatch. A function that returned nothing gives
    None.
    """
    if all(value is None for value in returned):
        return None
    return _merge(returned, detach)


def _merge(values: list[Any], detach: bool) -> Any:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        return StepOutput([value.detach() if detach else value for value in values])
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_merge(list(parts), detach) for parts in zip(*values, strict=True)))
    if isinstance(first, list | tuple):
        if any(len(value) != len(first) for value in values):
            return values
        return type(first)(_merge(list(parts), detach) for parts in zip(*values, strict=True))
    if isinstance(first, Mapping):  # Transformers' ModelOutput is one, whose constructor takes keywords
        if any(value.keys() != first.keys() for value in values):
            return values
        merged = {key: _merge([value[key] for value in values], detach) for key in first}
        return type(first)(**merged) if dataclasses.is_dataclass(first) else _of_type(first, merged)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first) if field.init]
        return type(first)(**{name: _merge([getattr(value, name) for value in values], detach) for name in fields})
    return values


def _of_type(original: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    try:
        return type(original)(content)  # type: ignore[call-arg]
    except TypeError:
        return content
