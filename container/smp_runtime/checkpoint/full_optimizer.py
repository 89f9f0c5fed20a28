"""An optimizer's state as one process has it, of parameters that tensor parallel ranks split; and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.registry import ParameterRecord
from smp_runtime.session import Session
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.initialisation import TensorSlice
from smp_runtime.tensor_parallel.placement import gather_whole, part_of


def record_of(session: Session, parameter: nn.Parameter) -> ParameterRecord | None:
    """The record of a parameter in whichever wrapped model has it."""
    for model in session.models:
        try:
            return model.registry.record_of(parameter)
        except SMPUserError:
            continue
    return None


@torch.no_grad()
def whole_tensor(session: Session, parameter: nn.Parameter, value: Any) -> Any:
    """A value of a parameter's state whole; the ranks of a tensor parallel group call it for the same ones together."""
    record = record_of(session, parameter)
    if session.size(Group.TP) == 1 or record is None or not isinstance(value, torch.Tensor):
        return value
    axis, bounds = record.placement.tensor_axis, record.placement.tensor_slice
    if axis is None or bounds is None or value.shape != parameter.shape or value.dim() == 0:
        return value
    longest = -(-record.shape[axis] // session.size(Group.TP))
    return gather_whole(value, TensorSlice(record.shape, axis, *bounds, longest), TensorGroup.of(session))


def whole_values(
    session: Session, parameters: Sequence[nn.Parameter], state: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """The state of an optimizer, by the numbers of its parameters, with split tensors whole."""
    return {
        number: {key: whole_tensor(session, parameters[number], values[key]) for key in sorted(values)}
        for number, values in sorted(state.items())
    }


def own_parts(session: Session, parameters: Sequence[nn.Parameter], state: Mapping[str, Any]) -> dict[str, Any]:
    """A full state with this rank's parts of split tensors; values that are parts already stay."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(dict.fromkeys(numbers), parameters, strict=False))

    def part(number: int, value: Any) -> Any:
        record = record_of(session, of[number]) if number in of else None
        return part_of(record, value) if record is not None and isinstance(value, torch.Tensor) else value

    parts = {n: {key: part(n, value) for key, value in values.items()} for n, values in state["state"].items()}
    return {**state, "state": parts}


def names_by_index(session: Session) -> list[dict[int, str]]:
    """For each tensor parallel rank, the name of every parameter of the optimizer by its number; the same on all of them."""
    optimizer = session.optimizer
    if optimizer is None:
        raise SMPUserError("there is no wrapped optimizer; wrap it in smp.DistributedOptimizer first")
    found: dict[int, str] = {}
    for group in optimizer.original_groups():
        for parameter in group:
            record = record_of(session, parameter)
            if record is not None:
                found.setdefault(id(parameter), record.name)
    return [dict(enumerate(found.values())) for _ in range(session.size(Group.TP))]
