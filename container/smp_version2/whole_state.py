"""Full state dicts of FSDP hold whole parameters, also of those that tensor parallelism has split."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType

from smp_runtime.tensor_parallel.group import TensorGroup, gather_whole
from smp_runtime.tensors.torch_private import name_without_wrappers
from smp_version2.moe.experts import find_experts
from smp_version2.split_parameters import find_slices
from smp_version2.state import state

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.parameters.registry import TensorSlice

#: Attribute of a configuration that leaves split parameters as this rank has them.
_LEFT_SPLIT = "_smp_left_split"
#: The function behind all functions of FSDP that gather an optimizer's state.
_GATHER = "_optim_state_dict_impl"


def install(device: torch.device) -> Callable[[], None]:
    """Let ``FullStateDictConfig`` take ``translate_on_save``; return the function that ends it.

    Args:
        device: of the parameters. On a CPU nothing is offloaded: FSDP would free or overwrite the memory that it goes on using.
    """
    ends = [_translate_on_save(device), _gather_moments(device)]

    def end() -> None:
        for restore in ends:
            restore()

    return end


def _translate_on_save(device: torch.device) -> Callable[[], None]:
    original = FullStateDictConfig.__init__
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def initialize(self: FullStateDictConfig, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        translates = given.pop("translate_on_save", True)
        if device.type == "cpu":
            given["offload_to_cpu"] = False
        original(self, **given)
        if not translates:
            object.__setattr__(self, _LEFT_SPLIT, True)

    FullStateDictConfig.__init__ = initialize  # type: ignore[method-assign]

    def end() -> None:
        FullStateDictConfig.__init__ = original  # type: ignore[method-assign]

    return end


def _gather_moments(device: torch.device) -> Callable[[], None]:
    """Let state of optimizers be right where PyTorch's is not; return the function that ends it.

    On a CPU it gathers each kind of moment into the same memory, and copies none that is on the CPU already: ``exp_avg`` would
    get the values of ``exp_avg_sq``. Of units without shards, each rank would give a part of the moments in sharded state, and
    has all of them: where one copy saves, the others' parts would be missing.
    """
    original = getattr(FullyShardedDataParallel, _GATHER)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def gather(*args: Any, **kwargs: Any) -> dict[str, Any]:
        __tracebackhide__ = True  # reports name the caller
        given = signature.bind(*args, **kwargs).arguments
        if device.type == "cpu":
            given["cpu_offload"] = False
        if not given.get("full_state_dict", True) and _has_no_shards(given["model"]):
            given |= {"full_state_dict": True, "rank0_only": False}
        found: dict[str, Any] = original(**given)
        return found

    setattr(FullyShardedDataParallel, _GATHER, staticmethod(gather))

    def end() -> None:
        setattr(FullyShardedDataParallel, _GATHER, staticmethod(original))

    return end


def _has_no_shards(model: nn.Module) -> bool:
    """Return whether each rank has the whole of all units of FSDP in a model."""
    units = FullyShardedDataParallel.fsdp_modules(model)
    return bool(units) and all(unit.sharding_strategy is ShardingStrategy.NO_SHARD for unit in units)


def register(unit: FullyShardedDataParallel) -> None:
    """Let a unit put whole parameters into full state dicts."""
    slices = _find_slices(unit)
    if slices:
        unit.register_state_dict_post_hook(functools.partial(_put_whole, slices=slices))


def _find_slices(unit: nn.Module) -> dict[str, TensorSlice]:
    """Return the places of the unit's split parameters by their names in it, without those of nested units."""
    nested = _modules_of_nested_units(unit)
    split = find_slices(unit)
    found = {}
    for path, module in unit.named_modules():
        if id(module) in nested:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in split:
                found[name_without_wrappers(f"{path}.{name}")] = split[parameter]
    return found


def _modules_of_nested_units(unit: nn.Module) -> set[int]:
    """Return the modules inside of nested units, by ``id``."""
    experts = set(find_experts(unit))
    wrapped = getattr(unit, "module", None)
    nested: set[int] = set()
    for child in unit.modules():
        is_unit = child is not unit and isinstance(child, FullyShardedDataParallel)
        # Shared experts get their unit only when the outermost one has been made.
        will_be_unit = child in experts and child is not wrapped
        if is_unit or will_be_unit:
            nested.update(map(id, child.modules()))
    return nested


def _put_whole(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any, slices: dict[str, TensorSlice]
) -> None:
    """Gather split parameters over the tensor parallel ranks; those of one group have values or not together."""
    settings = FullyShardedDataParallel.get_state_dict_type(module)
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return
    if getattr(settings.state_dict_config, _LEFT_SPLIT, False):
        return
    group = TensorGroup.of(state.joined)
    for name, where in slices.items():
        key = prefix + name  # the wrappers outside of this unit take their part of the prefix away later
        value = state_dict.get(key)
        if isinstance(value, torch.Tensor):
            state_dict[key] = gather_whole(value, where, group)
