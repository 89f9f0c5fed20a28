"""An optimizer's state between two forms: whole, as in one process, and by the shards that ranks update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_runtime.errors import CheckpointError
from smp_runtime.tensors.nested import unshared

if TYPE_CHECKING:
    from smp_runtime.job.trained import SharedState
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


def whole_state(
    optimizer: torch.optim.Optimizer,
    originals: Sequence[Sequence[nn.Parameter]],
    optimizer_shards: Mapping[nn.Parameter, OptimizerShard | None],
    gatherer: SharedState | None,
    *,
    keep: bool = True,
) -> dict[str, Any]:
    """The ``state_dict`` that the optimizer would have in one process, in float32.

    Args:
        originals: the model's parameters, group by group, as the script gave them.
        optimizer_shards: what is updated of each parameter on this rank.
        gatherer: with sharded state; then every rank of the group calls this, and tensors are on the CPU.
        keep: False on a rank that only takes part in gathering; it gets no tensors.
    """
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, parameters in zip(optimizer.param_groups, originals, strict=True):
        for parameter in parameters:
            numbers.setdefault(parameter, len(numbers))
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [numbers[parameter] for parameter in parameters]})
    tensors: dict[str, dict[nn.Parameter, torch.Tensor]] = {}
    others: dict[str, dict[nn.Parameter, Any]] = {}
    for parameter in numbers:
        shard = optimizer_shards.get(parameter)
        updated = parameter if parameter not in optimizer_shards else shard.optimized if shard is not None else None
        for key, value in (optimizer.state.get(updated, {}) if updated is not None else {}).items():
            shaped = (
                isinstance(value, torch.Tensor)
                and updated is not None
                and value.shape == updated.shape
                and value.dim() > 0
            )
            (tensors if shaped else others).setdefault(key, {})[parameter] = value
    if gatherer is not None:
        tensors = {
            key: gatherer.gather_whole(values, keep=keep) for key, values in _all_keys(tensors, gatherer).items()
        }
        others = {key: gatherer.gather_objects(values) for key, values in _all_keys(others, gatherer).items()}
    state: dict[int, dict[str, Any]] = {}
    for found in (tensors, others):
        for key, values in found.items():
            for parameter, value in values.items():
                state.setdefault(numbers[parameter], {})[key] = value
    return {"state": {number: state[number] for number in sorted(state)}, "param_groups": groups}


def _all_keys(
    found: Mapping[str, Mapping[nn.Parameter, Any]], gatherer: SharedState
) -> dict[str, Mapping[nn.Parameter, Any]]:
    """The same keys in the same order on every rank: one that owns nothing of a parameter knows none."""
    names = sorted(set().union(*gatherer.gather_names(set(found))))
    return {name: found.get(name, {}) for name in names}


def load_state(
    optimizer: torch.optim.Optimizer,
    originals: Sequence[Sequence[nn.Parameter]],
    optimizer_shards: Mapping[nn.Parameter, OptimizerShard | None],
    state: Mapping[str, Any],
) -> None:
    """Load a whole state into an optimizer that updates shards.

    Raises:
        CheckpointError: it belongs to other parameters.
    """
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(parameters) for parameters in originals]:
        raise CheckpointError(
            f"the optimizer state has {len(saved)} groups with {[len(g['params']) for g in saved]} parameters, but the "
            f"optimizer has {[len(p) for p in originals]}; build it from the same parameter groups as when it was saved"
        )
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update(unshared({key: value for key, value in settings.items() if key != "params"}))
    optimizer.state.clear()
    for group, parameters, settings in zip(optimizer.param_groups, originals, saved, strict=True):
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter, number in zip(parameters, settings["params"], strict=True):
            if number not in state["state"]:
                continue
            shard = optimizer_shards.get(parameter)
            if parameter in optimizer_shards and shard is None:
                continue  # another rank's
            updated = parameter if shard is None else shard.optimized
            optimizer.state[updated] = {
                key: _of_shard(value, parameter, shard, on_device) for key, value in state["state"][number].items()
            }


def _of_shard(value: Any, parameter: nn.Parameter, shard: OptimizerShard | None, counters_on_device: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return unshared(value)
    if value.shape != parameter.shape or value.dim() == 0:
        # A counter, which optimizers keep on the CPU unless their kernel reads it.
        return value.to(parameter.device, copy=True) if counters_on_device else value.clone()
    if shard is None:
        return value.to(device=parameter.device, copy=True)
    return shard.part_of(value).to(device=shard.optimized.device, copy=True)
