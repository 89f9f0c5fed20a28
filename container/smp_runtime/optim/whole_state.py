"""An optimizer's state whole, as in one process: put together from the ranks' shards and parts, and divided again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.parameters.registry import ParameterRecord, TensorSlice, part_of
from smp_runtime.tensor_parallel.group import TensorGroup, gather_whole
from smp_runtime.tensors.nested import copy_tensors
from smp_runtime.tensors.torch_private import tree_map

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
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
    """Return the ``state_dict`` that the optimizer would have in one process, in float32.

    Args:
        originals: the model's parameters, group by group, as the script gave them.
        optimizer_shards: the part of each parameter that this rank updates.
        gatherer: with sharded state; then every rank of the group calls this, and tensors are on the CPU.
        keep: False on a rank that only takes part in gathering; it gets no tensors.
    """
    numbers, groups = _numbered_groups(optimizer, originals)
    tensors: dict[str, dict[nn.Parameter, torch.Tensor]] = {}
    others: dict[str, dict[nn.Parameter, Any]] = {}
    frozen: dict[str, dict[nn.Parameter, Any]] = {}  # of what nothing shares out, such as Adagrad makes before any step
    for parameter in numbers:
        updated = _updated_tensor(parameter, optimizer_shards)
        if updated is None:
            continue
        for key, value in optimizer.state.get(updated, {}).items():
            shaped = is_elementwise(value, updated)
            if gatherer is not None and parameter not in optimizer_shards:
                here = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
                frozen.setdefault(key, {})[parameter] = here
            else:
                (tensors if shaped else others).setdefault(key, {})[parameter] = value
    if gatherer is not None:
        tensors = {
            key: gatherer.gather_whole(values, keep=keep) for key, values in _all_keys(tensors, gatherer).items()
        }
        others = {key: gatherer.gather_objects(values) for key, values in _all_keys(others, gatherer).items()}
    state: dict[int, dict[str, Any]] = {}
    for found in (tensors, others, frozen if keep else {}):
        for key, values in found.items():
            for parameter, value in values.items():
                state.setdefault(numbers[parameter], {})[key] = value
    return {"state": {number: state[number] for number in sorted(state)}, "param_groups": groups}


def _numbered_groups(
    optimizer: torch.optim.Optimizer, originals: Sequence[Sequence[nn.Parameter]]
) -> tuple[dict[nn.Parameter, int], list[dict[str, Any]]]:
    """Return the numbers of parameters in a ``state_dict``, in their order, and its groups."""
    numbers: dict[nn.Parameter, int] = {}
    groups = []
    for group, parameters in zip(optimizer.param_groups, originals, strict=True):
        for parameter in parameters:
            numbers.setdefault(parameter, len(numbers))
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [numbers[parameter] for parameter in parameters]})
    return numbers, groups


def _updated_tensor(
    parameter: nn.Parameter, optimizer_shards: Mapping[nn.Parameter, OptimizerShard | None]
) -> torch.Tensor | None:
    """Return the tensor that the optimizer updates for a parameter; None if another rank updates it."""
    if parameter not in optimizer_shards:
        return parameter
    shard = optimizer_shards[parameter]
    return None if shard is None else shard.optimized


def is_elementwise(value: Any, of: torch.Tensor) -> bool:
    """Return whether a value of an optimizer's state has one number for each updated element."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == of.shape and value.dim() > 0


def _all_keys(
    found: Mapping[str, Mapping[nn.Parameter, Any]], gatherer: SharedState
) -> dict[str, Mapping[nn.Parameter, Any]]:
    """Return the same keys in the same order on every rank; a rank that owns no part of a parameter knows none."""
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
        group.update(copy_tensors({key: value for key, value in settings.items() if key != "params"}))
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
        return copy_tensors(value)
    is_counter = value.shape != parameter.shape or value.dim() == 0
    if is_counter:
        # Optimizers keep it on the CPU unless their kernel reads it.
        return value.to(parameter.device, copy=True) if counters_on_device else value.clone()
    if shard is None:
        return value.to(device=parameter.device, copy=True)
    return shard.part_of(value).to(device=shard.optimized.device, copy=True)


#: Master weights and loss scale inside a state.
HALF_KEY = "fp16_states"
#: Names of a state's parameters, by group, in the order of their numbers.
NAMES_KEY = "smp_param_names"

#: Names and places of parameters.
Records = Mapping[nn.Parameter, ParameterRecord]


@torch.no_grad()
def whole_tensor(ranks: Ranks, record: ParameterRecord | None, value: Any) -> Any:
    """Return a value of a parameter's state whole; the ranks of a tensor parallel group call this together."""
    if ranks.size(Group.TP) == 1:
        return value
    if record is None or not isinstance(value, torch.Tensor):
        return value
    placement = record.placement
    axis, bounds = placement.tensor_axis, placement.tensor_slice
    if axis is None or bounds is None:
        return value
    if not is_elementwise(value, record.parameter):
        return value
    where = TensorSlice(record.shape, axis, bounds, placement.tensor_longest)
    return gather_whole(value, where, TensorGroup.of(ranks))


def whole_values(
    ranks: Ranks,
    records: Records,
    parameters: Sequence[nn.Parameter],
    state: Mapping[int, Mapping[str, Any]],
    *,
    to_first: bool = False,
) -> dict[int, dict[str, Any]]:
    """Return the state of an optimizer by parameter number, with split tensors whole.

    Args:
        to_first: only on the first rank of each tensor parallel group, on the CPU; the others get nothing.
    """
    whole: dict[int, dict[str, Any]] = {}
    for number, values in sorted(_of_all_parts(ranks, records, parameters, state).items()):
        for key in sorted(values):
            value = whole_tensor(ranks, records.get(parameters[number]), values[key])
            if not to_first:
                whole.setdefault(number, {})[key] = value
            elif ranks.rank_in(Group.TP) == 0:
                whole.setdefault(number, {})[key] = on_cpu(value)
    return whole


def _of_all_parts(
    ranks: Ranks, records: Records, parameters: Sequence[nn.Parameter], state: Mapping[int, Mapping[str, Any]]
) -> Mapping[int, Mapping[str, Any]]:
    """Return this rank's state with every value that any rank of its tensor parallel group has.

    A rank has no state for a parameter without elements here, such as another rank's expert.
    """
    if ranks.size(Group.TP) == 1:
        return state
    members = ranks.members(Group.TP)

    def is_split(number: int, value: Any) -> bool:
        record = records.get(parameters[number])
        return (
            record is not None
            and record.placement.tensor_axis is not None
            and is_elementwise(value, parameters[number])
        )

    mine: dict[tuple[int, str], torch.dtype | None] = {}
    for number, values in state.items():
        for key, value in values.items():
            mine[number, key] = value.dtype if is_split(number, value) else None
    everyone = ranks.control.allgather(mine, members)
    lacking = sorted(set().union(*everyone) - set.intersection(*(set(each) for each in everyone)))
    if not lacking:
        return state
    first = {each: next(rank for rank, found in enumerate(everyone) if each in found) for each in lacking}
    me = members.index(ranks.rank)
    whole = [each for each in lacking if everyone[first[each]][each] is None]
    told = {each: on_cpu(state[each[0]][each[1]]) for each in whole if first[each] == me}
    others = {each: value for part in ranks.control.allgather(told, members) for each, value in part.items()}
    found = {number: dict(values) for number, values in state.items()}
    for number, key in lacking:
        dtype = everyone[first[number, key]][number, key]
        if (number, key) not in mine:
            parameter = parameters[number]
            value = (
                others[number, key] if dtype is None else torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            )
            found.setdefault(number, {})[key] = value
    return found


def of_all_stages(ranks: Ranks, values: Mapping[Any, Any], *, to_first: bool) -> dict[Any, Any]:
    """Merge the values of all stages, on the CPU; every rank of a replica calls it.

    Args:
        to_first: only the first rank of the replica gets them; other tensor parallel ranks take no part.
    """
    if to_first and ranks.rank_in(Group.TP) != 0:
        return {}
    exchange = ranks.control.gather if to_first else ranks.control.allgather
    # On the CPU, so that the receiver does not unpickle tensors onto the sender's device.
    parts = exchange(tree_map(on_cpu, dict(values)), ranks.members(Group.PP))
    merged: dict[Any, Any] = {}
    for part in parts or []:  # None on ranks that only send
        merged.update(part)
    return merged


def on_cpu(leaf: Any) -> Any:
    """Return a tensor on the CPU, or anything else as it is."""
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def own_parts(records: Records, parameters: Sequence[nn.Parameter], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a full state with this rank's parts of split tensors; values that are parts already stay."""
    of: dict[int, nn.Parameter] = dict(zip(_numbers_in(state), parameters, strict=False))

    def part(number: int, value: Any) -> Any:
        record = records.get(of[number]) if number in of else None
        if record is None or not isinstance(value, torch.Tensor):
            return value
        return part_of(record, value)

    parts = {}
    for number, values in state["state"].items():
        parts[number] = {key: part(number, value) for key, value in values.items()}
    return {**state, "state": parts}


def _numbers_in(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of a state's parameters, in their order."""
    numbers: dict[int, None] = {}
    for group in state["param_groups"]:
        numbers.update(dict.fromkeys(group["params"]))
    return list(numbers)


def copy_state(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a state that shares no memory with ``state``.

    The tensors of ``state`` may lie in a mapped file or be parts of longer ones.

    Args:
        device: the optimizer copies tensors to it; tensors from another device are copied only then.
    """

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        is_counter = value.dim() == 0  # the optimizer does not copy it to the device
        if is_counter or value.device.type == device.type:
            return value.clone(memory_format=torch.contiguous_format)
        return value

    return {**state, "state": tree_map(copy, state["state"])}


def does_clash(value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a state value has as many dimensions as the parameter, but another shape."""
    if not isinstance(value, torch.Tensor) or value.numel() < 2 or value.dim() != len(shape):
        return False
    return tuple(value.shape) != shape


def refuse_other_parameters(records: Records, parameters: Sequence[nn.Parameter], state: Mapping[str, Any]) -> None:
    """Make sure that a state's numbers mean ``parameters``.

    Raises:
        CheckpointError: it is of parameters with other names or shapes.
    """
    what_else = (
        "the optimizer's state belongs to other parameters than the optimizer has ({}): tensor parallelism has put others in "
        "their place, here or where it was saved; load it with smp.resume_from_checkpoint from a full or partial checkpoint"
    )
    names = [name for group in state.get(NAMES_KEY, ()) for name in group]
    for name, parameter in zip(names, parameters, strict=False):
        if parameter in records and name not in records[parameter].names:
            raise CheckpointError(what_else.format(f"{name} in the place of {records[parameter].name}"))
    for number, parameter in zip(_numbers_in(state), parameters, strict=False):
        record = records.get(parameter)
        shapes = {tuple(parameter.shape)}
        if record is not None:
            shapes.add(tuple(record.shape))
        for key, value in state["state"].get(number, {}).items():
            if all(does_clash(value, shape) for shape in shapes):
                name = f"parameter {number}" if record is None else record.name
                raise CheckpointError(
                    what_else.format(f"{key} of {name} is {list(value.shape)}, not {list(max(shapes))}")
                )


def names_by_index(session: Session) -> list[dict[int, str]]:
    """Return, for each tensor parallel rank, the names of the optimizer's parameters by number.

    They are the same for all ranks.
    """
    optimizer = session.optimizer
    if optimizer is None:
        raise SMPUserError("there is no wrapped optimizer; wrap it in smp.DistributedOptimizer first", code="SMP304")
    parameters = dict.fromkeys(itertools.chain.from_iterable(optimizer.original_groups()))
    records = session.records
    names = [records[parameter].name for parameter in parameters if parameter in records]
    return [dict(enumerate(names)) for _ in range(session.ranks.size(Group.TP))]
