"""State dicts of this rank's own parts, of objects in a state, and of optimizers."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_version2.checkpoint.local_shards import load_local_state, read_local_state


class SMStateDictType(enum.Enum):
    """State dicts that FSDP does not have."""

    SM_LOCAL_STATE_DICT = "local"


@contextlib.contextmanager
def sm_state_dict_type(model: nn.Module, state_dict_type: SMStateDictType) -> Iterator[None]:
    """Let ``model.state_dict()`` return this rank's parts inside the block, and ``model.load_state_dict`` take them.

    No rank waits for another one. The parts share memory with the model: what is loaded into them is in the model. They can be
    loaded with the degrees of the save only.

    Args:
        model: as FSDP has wrapped it.
        state_dict_type: ``SMStateDictType.SM_LOCAL_STATE_DICT``.

    Raises:
        SMPUserError: no module, or another type.
    """
    if not isinstance(model, nn.Module):
        raise SMPUserError(
            f"sm_state_dict_type got {kind_of(model)}; pass the model that FSDP has wrapped", code="SMP402"
        )
    if state_dict_type is not SMStateDictType.SM_LOCAL_STATE_DICT:
        raise SMPUserError(
            f"sm_state_dict_type got {state_dict_type!r}; pass SMStateDictType.SM_LOCAL_STATE_DICT", code="SMP402"
        )
    replaced = {
        "state_dict": functools.partial(read_local_state, model),
        "load_state_dict": functools.partial(load_local_state, model),
    }
    former = {name: vars(model)[name] for name in replaced if name in vars(model)}
    vars(model).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(model)[name]
        vars(model).update(former)


def read_stateful(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the state dicts of objects that have one, as PyTorch saves and loads it."""
    made = {}
    for key, value in state_dict.items():
        is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
        made[key] = value.state_dict() if is_stateful else value
    return made


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Let an optimizer create its state, so that a checkpoint can be loaded into it; parameters keep their values.

    Args:
        optimizer: one that has not updated yet; others are left as they are.
        skip_empty_param: leave out parameters without elements on this rank. FSDP gives them no gradient, so a training has no
            state of them.
    """
    if optimizer.state:
        return
    parameters = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    gradients = [parameter.grad for parameter in parameters]
    # Only an update makes state. With gradients, rates and decays of 0 it changes no parameter, and moments are 0.
    try:
        for parameter in parameters:
            is_skipped = skip_empty_param and not parameter.numel()
            has_gradient = parameter.requires_grad and not is_skipped
            parameter.grad = torch.zeros_like(parameter) if has_gradient else None
        with _without_effect(optimizer):
            optimizer.step(closure=None)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    _reset_steps(optimizer)


@contextlib.contextmanager
def _without_effect(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set rates and weight decays to 0. A decay that is added to gradients would become a moment."""
    former = [
        (group, name, group[name])
        for group in optimizer.param_groups
        for name in ("lr", "weight_decay")
        if name in group
    ]
    try:
        for group, name, value in former:
            group[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0.0
        yield
    finally:
        for group, name, value in former:
            group[name] = value


def _reset_steps(optimizer: torch.optim.Optimizer) -> None:
    """Set the counters of updates in an optimizer's state to 0."""
    for state in optimizer.state.values():
        step: Any = state.get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            state["step"] = 0
