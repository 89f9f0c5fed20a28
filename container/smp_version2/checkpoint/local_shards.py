"""This rank's own parts of parameters, saved and loaded without a word to other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor

from smp_runtime.errors import CheckpointError, SMPOperationError
from smp_runtime.tensors.torch_private import (
    JOINED_PARAMETER,
    before_loading,
    keeps_parameters,
    name_without_wrappers,
)
from smp_version2.state import state

_KEY = re.compile(r"(?:^|\.)smp_local_shard_(\d+)_of_(\d+)_tensor_(\d+)_of_(\d+)$")


@dataclass(frozen=True, order=True)
class LocalShard:
    """The part of the state that a rank has. Its key is in each local state dict, so that loading can tell parts apart."""

    rank: int
    degree: int
    tensor_rank: int
    tensor_degree: int

    @classmethod
    def of_model(cls, model: nn.Module) -> LocalShard:
        """Return this rank's part of a model that FSDP has wrapped."""
        group = _find_sharding_group(model)
        if group is None:
            return cls(0, 1, *_tensor_place())
        return cls(group.rank(), group.size(), *_tensor_place())

    @classmethod
    def of_key(cls, key: str) -> LocalShard | None:
        """Return the part that a flattened key names, or None for other keys."""
        found = _KEY.search(key)
        return cls(*map(int, found.groups())) if found else None

    @property
    def key(self) -> str:
        """Return the key of a local state dict that names this part."""
        return f"smp_local_shard_{self.rank}_of_{self.degree}_tensor_{self.tensor_rank}_of_{self.tensor_degree}"

    def __str__(self) -> str:
        tensor = f", tensor parallel rank {self.tensor_rank} of {self.tensor_degree}" if self.tensor_degree > 1 else ""
        return f"local shard {self.rank} of {self.degree}{tensor}"


def _find_sharding_group(model: nn.Module) -> Any:
    """Return the group over which FSDP, or ``fully_shard``, shards a model; None if every rank has it whole."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit.sharding_strategy is ShardingStrategy.NO_SHARD:
            continue
        if unit.process_group is not None:
            return unit.process_group
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                return parameter.device_mesh.get_group(dim)
    return None


def _tensor_place() -> tuple[int, int]:
    """Return the rank and the degree of tensor and expert parallelism together."""
    return state.ep_rank * state.tp_size + state.tp_rank, state.ep_size * state.tp_size


def read_local_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's parts of parameters and buffers; loading into them changes the model, as they share its memory.

    Raises:
        SMPOperationError: parameters are gathered at this moment.
    """
    made: dict[str, Any] = dict(_list_tensors(model))
    made[LocalShard.of_model(model).key] = 1
    return made


def load_local_state(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Copy this rank's parts into the model.

    Raises:
        CheckpointError: the parts are those of another rank, of another degree or of another model.
    """
    own = read_local_state(model)
    if own.keys() != state_dict.keys():
        differing = sorted(own.keys() ^ state_dict.keys())
        raise CheckpointError(
            f"the local state is not that of {LocalShard.of_model(model)} of this model: {len(differing)} keys differ, first "
            f"{differing[0]}; load what this rank has saved, with the same degrees"
        )
    for name, tensor in own.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        given = state_dict[name]
        if given.shape != tensor.shape:
            raise CheckpointError(
                f"the local part of {name} has shape {list(given.shape)}, and the model's has {list(tensor.shape)}"
            )
        tensor.copy_(given)


def accept_joined(unit: FullyShardedDataParallel) -> None:
    """Let a unit with ``use_orig_params`` load ``LOCAL_STATE_DICT`` of FSDP, which writes keys that it does not take back."""
    if keeps_parameters(unit) and unit.sharding_strategy is not ShardingStrategy.NO_SHARD:
        before_loading(unit, _take_joined)


def _take_joined(unit: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the parameter that FSDP joins a unit's in out of a local state dict, which has the parts in it, too.

    At other degrees and on other ranks PyTorch has refused the file before, as it has sharded tensors.
    """
    key = f"{prefix}{JOINED_PARAMETER}"  # as FSDP's own hook has left it
    settings = FullyShardedDataParallel.get_state_dict_type(unit)
    if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        state_dict.pop(key, None)


def _list_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    _require_sharded(model)
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name_without_wrappers(name), value.to_local() if isinstance(value, DTensor) else value
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        # State dicts of modules around FSDP's would gather parameters; their buffers are all taken.
        is_plain = not FullyShardedDataParallel.fsdp_modules(module)
        persistent = set(module.state_dict(keep_vars=True)) if is_plain else set(buffers)
        for name, buffer in buffers.items():
            if name in persistent:
                yield name_without_wrappers(f"{path}.{name}" if path else name), buffer.detach()


def _require_sharded(model: nn.Module) -> None:
    """Raise an error if a parameter is whole at this moment: the parts that FSDP leaves to parameters have one dimension."""
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        if unit.sharding_strategy is ShardingStrategy.NO_SHARD:
            continue
        for name, parameter in unit.named_parameters():
            if parameter.dim() > 1:
                raise SMPOperationError(
                    f"{name_without_wrappers(name)} is gathered at this moment, and its local part cannot be read; read the local "
                    "state after the backward pass, outside of FSDP.summon_full_params",
                    code="SMP402",
                )
