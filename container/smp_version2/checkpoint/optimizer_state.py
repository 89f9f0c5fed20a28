"""The state of FSDP's optimizer for the shards of one group of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from smp_config.errors import kind_of
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_version2.checkpoint.state_dict_loader import load

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint import Metadata, StorageReader

    from smp_version2.checkpoint.filesystem import DistributedFileSystemReader

#: Places of a moment's path: ``optimizer``, ``state``, name of the parameter, name of the moment.
_NAME = 2
#: The last place of the path of a group's parameters, which are those of all parts of a checkpoint of shared experts.
_NAMES = "params"


def load_sharded_optimizer_state(
    model_state_dict: dict[str, Any], optimizer_key: str, storage_reader: StorageReader, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return the state of FSDP's optimizer for this rank's shards; all ranks of the group call it.

    PyTorch's own function shards over all ranks of the job, which is wrong if several groups have a copy each.

    Args:
        model_state_dict: the sharded state of the model, whose tensors show how moments are sharded.
        optimizer_key: key of the optimizer's state in the checkpoint.
        storage_reader: reads the checkpoint.
        group: the ranks that share one copy.

    Raises:
        SMPUserError: the state of the model is no dictionary.
        CheckpointError: the checkpoint has no state under this key.
    """
    if not isinstance(model_state_dict, dict):
        raise SMPUserError(
            f"the state of the model is {kind_of(model_state_dict)}; pass model.state_dict()", code="SMP402"
        )
    metadata = storage_reader.read_metadata()
    paths = {key: path for key, path in metadata.planner_data.items() if path[0] == optimizer_key}
    if not paths:
        raise CheckpointError(
            f"the checkpoint has nothing under {optimizer_key!r}; pass the key under which the state was saved"
        )
    flat = {key: _make_target(key, path, metadata, model_state_dict) for key, path in paths.items()}
    load(flat, storage_reader=storage_reader, process_group=group)
    for key, path in paths.items() if getattr(storage_reader, "parts", ()) else ():
        if path[-1] == _NAMES:
            flat[key] = cast("DistributedFileSystemReader", storage_reader).read_names(key)
    nested: dict[Any, Any] = {}
    for key, path in paths.items():
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = flat[key]
    made: dict[str, Any] = _with_lists(nested)
    return made


def _make_target(key: str, path: tuple[Any, ...], metadata: Metadata, model_state_dict: dict[str, Any]) -> Any:
    """Return what a value is loaded into."""
    saved: Any = metadata.state_dict_metadata[key]
    if not hasattr(saved, "size"):
        return None  # no tensor: the value is replaced
    parameter = None
    if len(path) > _NAME:
        parameter = model_state_dict.get(path[_NAME])
    if isinstance(parameter, torch.Tensor) and parameter.size() == saved.size:
        return torch.zeros_like(parameter, dtype=saved.properties.dtype)
    return torch.zeros(saved.size, dtype=saved.properties.dtype)


def _with_lists(value: Any) -> Any:
    """Return nested dictionaries with lists in place of those whose keys are positions."""
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(each) for key, each in value.items()}
    has_positions = bool(made) and all(isinstance(key, int) for key in made)
    if has_positions:
        return [made[position] for position in sorted(made)]
    return made
