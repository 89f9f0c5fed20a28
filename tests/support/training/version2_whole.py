"""Whole state of models that ``fully_shard`` has sharded, which PyTorch's functions return for this rank's parts only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state


def gather_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state of a model that ``fully_shard`` has sharded."""
    from smp_runtime.tensor_parallel.group import TensorGroup, gather_whole
    from smp_version2.state import state

    places, found = _places(model), {}
    for name, value in torch_state.get_model_state_dict(model).items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        where = places.get(name)
        found[name] = whole if where is None else gather_whole(whole, where, TensorGroup.of(state.joined))
    return _gather_experts(model, found)


def _gather_experts(model: nn.Module, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return state with the experts of all ranks."""
    from smp_version2.moe.experts import find_experts

    paths = {module: _clean(path) for path, module in model.named_modules()}
    for experts in find_experts(model):
        prefix, group = f"{paths[experts]}.", experts.group
        for name in [name for name in found if name.startswith(prefix)]:
            value = found.pop(name).contiguous()
            parts = [torch.empty_like(value) for _ in range(group.size)]
            dist.all_gather(parts, value, group=group.process_group)
            names = [prefix + experts.whole_names(name.removeprefix(prefix), rank) for rank in range(group.size)]
            found |= dict(zip(names, parts, strict=True)) if len(set(names)) > 1 else {name: torch.cat(parts)}
    return found


def _clean(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _places(model: nn.Module) -> dict[str, Any]:
    """Return the places of split parameters in the whole ones, by their names in state dicts."""
    from smp_version2.split_parameters import find_slices

    slices = find_slices(model)
    named = model.named_parameters(remove_duplicate=False)
    return {_clean(name): slices[parameter] for name, parameter in named if parameter in slices}


def load_whole(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    """Load whole state into a model that ``fully_shard`` has sharded."""
    from smp_version2.moe.experts import find_experts

    places = _places(model)
    cut = {name: places[name].cut(value) if name in places else value for name, value in given.items()}
    for path, experts in model.named_modules():
        if experts not in set(find_experts(model)):
            continue
        own = {f"{_clean(path)}.{_clean(name)}": value for name, value in experts.named_parameters()}
        for name in [name for name in cut if name.startswith(f"{_clean(path)}.")]:
            if name not in own:
                del cut[name]
            elif cut[name].shape != own[name].shape:
                cut[name] = cut[name][experts.here.start : experts.here.stop]
    options = torch_state.StateDictOptions(full_state_dict=True)
    torch_state.set_model_state_dict(model, cut, options=options)
