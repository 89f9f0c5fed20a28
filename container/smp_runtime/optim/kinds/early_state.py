"""State that an optimizer makes in its constructor, for parameters without values or with later replacements."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.remote_stubs import RemoteStub


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state anew that the constructor made of tensors without values, or that a parameter lacks.

    Call it for an optimizer that has made state in its constructor. Parameters that have no values yet are left for later.

    Raises:
        SMPUserError: the optimizer cannot be constructed from its settings.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            has_values = not isinstance(parameter, RemoteStub) and not parameter.is_meta
            if has_values:
                _complete_one(optimizer, group, parameter)


def _complete_one(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Any) -> None:
    """Make the state of one parameter anew, or move it to the parameter's device."""
    state = optimizer.state.get(parameter)
    if not state or is_without_values(state):
        optimizer.state[parameter] = _constructed(optimizer, group, parameter)
        return
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_counter = value.dim() == 0  # optimizers keep it on the CPU
        has_shape = value.shape == parameter.shape
        if has_shape and not is_counter:
            state[key] = value.to(parameter.device)


def is_without_values(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state was computed on the meta device."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return any(tensor.is_meta for tensor in tensors)


def _constructed(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    takes_all = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in accepted.values())
    settings = {name: value for name, value in optimizer.defaults.items() if takes_all or name in accepted}
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    try:
        made: Any = kind([{**options, "params": [parameter]}], **settings)
    except Exception as error:  # a constructor of any library, with any kind of error
        raise SMPUserError(
            f"{kind.__name__} has made state in its constructor for a parameter of shape {list(parameter.shape)} that had no "
            f"values then, or that another one takes the place of, and it cannot be constructed again from its settings ({error}): "
            "create it from model.parameters() of the model that smp.DistributedModel returned, behind the first step if "
            "a pipeline creates its parameters late",
            code="SMP304",
        ) from error
    state: dict[str, Any] = made.state.get(parameter) or {}
    return state
