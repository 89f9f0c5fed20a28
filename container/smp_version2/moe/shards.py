"""FSDP of experts: over the ranks with the same experts, while everything else is averaged over all ranks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import name_without_wrappers
from smp_version2.moe.experts import SharedExperts, find_experts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from smp_runtime.job.ranks import Ranks

#: Arguments of a unit around experts that it does not share with the unit around it.
_OF_OUTER_UNIT = ("module", "auto_wrap_policy", "ignored_modules", "ignored_states", "process_group", "device_mesh")


def find_unsharded(module: nn.Module) -> list[SharedExperts]:
    """Return the experts inside a module that no unit of FSDP has yet."""
    return [experts for experts in find_experts(module) if not experts.is_sharded]


def leave_out(given: dict[str, Any], experts: list[SharedExperts]) -> dict[str, Any]:
    """Return arguments of FSDP for the modules around experts, which it must leave alone.

    Raises:
        SMPUserError: the flat parameters of units would not keep the script's.
    """
    if not given.get("use_orig_params"):
        raise SMPUserError(
            "FullyShardedDataParallel got use_orig_params=False, and the experts of this model are shared out; norms and "
            "checkpoints have to tell their parameters from others: pass use_orig_params=True",
            code="SMP303",
        )
    modules = list(given.get("ignored_modules") or ())
    states = list(given.get("ignored_states") or ())
    # FSDP's ``ignored_states`` holds either parameters or modules.
    if states and isinstance(states[0], torch.nn.Parameter):
        for each in experts:
            states += each.parameters()
        return {**given, "ignored_states": states}
    return _ignoring_modules(given, [*modules, *states, *experts])


def _ignoring_modules(given: dict[str, Any], modules: list[Any]) -> dict[str, Any]:
    """Return arguments of FSDP that name ignored modules, and no ignored states: FSDP refuses both together."""
    changed = {**given, "ignored_modules": modules}
    changed.pop("ignored_states", None)
    return changed


def leave_out_again(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a unit that PyTorch makes inside of another one, which must leave the experts in its module alone, too.

    PyTorch passes the parameters that the outer unit ignores. But a unit replaces those on the meta device by others with values,
    which it does not ignore: it would average experts with other experts of other ranks.
    """
    experts = find_unsharded(given["module"])
    of_experts: set[nn.Parameter] = set()
    for each in experts:
        of_experts.update(each.parameters())
    if not any(parameter.is_meta for parameter in of_experts):
        return given
    ignored = set(given.get("ignored_states") or ())
    others = set(given["module"].parameters()) - of_experts
    if ignored.isdisjoint(others):
        return _ignoring_modules(given, experts)
    # The script ignores some parameters, so the experts' must be listed beside them. Give them values first: FSDP would
    # replace those on the meta device, and the list would name parameters that are no longer the module's.
    for each in experts:
        for part in each.modules():
            given["param_init_fn"](part)
        ignored.update(each.parameters())
    return {**given, "ignored_states": ignored}


def require_all_ranks(given: dict[str, Any], ranks: Ranks, who: str = "FullyShardedDataParallel") -> None:
    """Raise an error if a script's own groups do not average over all ranks.

    Args:
        who: got them, as the subject of the message.
    """
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if mesh is not None:
        found = mesh.size()
    else:
        found = 1
        for each in group if isinstance(group, tuple) else (group,):
            found *= dist.get_world_size(each)
    wanted = ranks.size(Group.RDP)
    if found != wanted:
        raise SMPUserError(
            f"{who} got groups of {found} ranks, and {wanted} ranks have what is no expert: leave "
            "process_group, device_mesh and mesh out, or pass groups of all of them",
            code="SMP303",
        )


def wrap(
    root: nn.Module,
    experts: list[SharedExperts],
    given: dict[str, Any],
    groups: dict[str, Any],
    make: Callable[..., nn.Module],
) -> None:
    """Put a unit around each of a model's experts.

    Args:
        root: contains them.
        given: arguments of the unit around them.
        groups: arguments that name the groups.
        make: makes a unit.
    """
    kept = {key: value for key, value in given.items() if key not in _OF_OUTER_UNIT}
    wanted = set(experts)
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child in wanted:
                setattr(parent, name, make(child, **{**kept, **groups}))


def note_wrapped(unit: FullyShardedDataParallel) -> None:
    """Note that a unit averages the gradients of its experts, and let it put those of all ranks into full state dicts."""
    experts: Any = unit.module
    experts.is_sharded = True
    unit.register_state_dict_post_hook(functools.partial(_put_all, experts=experts))


def install_function(mesh: DeviceMesh, ranks: Ranks) -> Callable[[], None]:
    """Let ``fully_shard`` shard experts over the ranks that have the same ones; return the function that ends it.

    Scripts hold PyTorch's function already, so the one inside its decorator is replaced. If a release has no place for it, experts
    that no unit shards refuse their first pass.

    Args:
        mesh: of those ranks.
    """
    cell = find_cell()
    if ranks.size(Group.EP) == 1 or cell is None:
        return lambda: None
    inner = cell.cell_contents

    @functools.wraps(inner)
    def shard(module: Any, **given: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        outermost = module if isinstance(module, (list, tuple)) else [module]
        experts = []
        for root in outermost:
            experts += find_unsharded(root)
        if experts and given.get("mesh") is not None:
            require_all_ranks({"device_mesh": given["mesh"]}, ranks, "fully_shard")
        over_own_ranks = {**given, "mesh": mesh}
        for each in experts:
            each.is_sharded = True
            if each not in outermost:
                fully_shard(each, **over_own_ranks)
        # A unit of experts alone: no other ranks have its parameters.
        if set(experts) >= set(outermost):
            return inner(module, **over_own_ranks)
        return inner(module, **given)

    cell.cell_contents = shard

    def end() -> None:
        cell.cell_contents = inner

    return end


def find_cell() -> Any:
    """Return the place of the function inside ``fully_shard``'s decorator; None if a release has no such place."""
    inner = inspect.unwrap(fully_shard)
    cells = getattr(fully_shard, "__closure__", None) or ()
    for cell in cells:
        if inspect.unwrap(cell.cell_contents) is inner:
            return cell
    return None


def _put_all(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any, experts: SharedExperts) -> None:
    """Add the experts of other ranks; the ranks that share them out have values or not together."""
    settings = FullyShardedDataParallel.get_state_dict_type(module)
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return
    group, device = experts.group, next(iter(experts.parameters())).device
    for key in [key for key in state_dict if key.startswith(prefix)]:
        value = state_dict[key]
        name = name_without_wrappers(key.removeprefix(prefix))
        parts = [torch.empty_like(value, device=device) for _ in range(group.size)]
        dist.all_gather(parts, value.detach().to(device).contiguous(), group=group.process_group)
        names = [experts.whole_names(name, rank) for rank in range(group.size)]
        if len(set(names)) == 1:  # one parameter of many experts
            state_dict[key] = torch.cat(parts).to(value.device)
            continue
        start = key.removesuffix(name) if key.endswith(name) else prefix
        for each, part in zip(names, parts, strict=True):
            state_dict[start + each] = part.to(value.device)
