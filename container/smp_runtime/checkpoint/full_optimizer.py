"""An optimizer's state as one process has it, of parameters that tensor parallel ranks split; and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_runtime.checkpoint.files.reader import map_file
from smp_runtime.errors import CheckpointError
from smp_runtime.optim.gathered_state import (
    HALF_KEY,
)
from smp_runtime.tensors.nested import unshared

if TYPE_CHECKING:
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer


def read_full_state(file: Path, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """A file of an optimizer's full state, its tensors still on the disk, after comparing it with ``optimizer``.

    Raises:
        CheckpointError: it is damaged, or of other parameter groups.
    """
    state = map_file(file)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise CheckpointError(
            f"{file} holds no state of an optimizer, but a {type(state).__name__} without 'state' and 'param_groups'; save "
            "optimizer.state_dict(), or pass load_optimizer=False"
        )
    there = [len(group["params"]) for group in groups]
    here = [len(parameters) for parameters in optimizer.original_groups()]
    if here != there:
        raise CheckpointError(
            f"the optimizer state in {file} has {len(there)} groups with {there} parameters, but the optimizer has {here}; "
            "build it from the same parameter groups as when it was saved, or pass load_optimizer=False"
        )
    return dict(state)


def load_full_state(model: DistributedModel, optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`read_full_state` gave, after the weights: what belongs to parameters as soon as these have a place.

    Settings of groups and the loss scale are loaded now, so that what the script sets afterwards stays.
    """
    if model.partitioned:
        optimizer.load_state_dict(state)
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(unshared({key: value for key, value in saved.items() if key != "params"}))
    half = dict(state.get(HALF_KEY) or {})
    optimizer.load_loss_scale(half.pop("loss_scaler", None))

    def load() -> None:
        if model.precision.is_half and not optimizer.updates(model):
            raise CheckpointError(
                "the state of a resumed optimizer, with the float32 weights, cannot be loaded: the model was partitioned, and the "
                "optimizer has none of its parameters; create it from model.parameters() of the wrapped model"
            )
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": saved["params"]}
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True)
        ]
        optimizer.load_state_dict({**state, "param_groups": groups, **({HALF_KEY: half} if half else {})})

    model.load_when_partitioned(load)
