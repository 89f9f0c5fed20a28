"""Loading of sharded state, for any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from smp_config.errors import kind_of
from smp_runtime.checkpoint.files.atomic_file import UNREADABLE
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_version2.checkpoint.agreement import MissingKeysError, agree, describe_failures
from smp_version2.checkpoint.filesystem import DistributedFileSystemReader
from smp_version2.checkpoint.local_shards import LocalShard
from smp_version2.checkpoint.state_dict_utils import read_stateful
from smp_version2.eight_bits import state as eight_bit_state

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlanner, Metadata, StorageReader

#: Keys that a message names.
_SHOWN = 5
#: The file of a local checkpoint of the original library.
OF_THE_ORIGINAL = ".local.metadata"


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Load a checkpoint into a state dict; all ranks of the group call it. The number of ranks may differ from that of the save.

    Tensors are loaded in place, other values are replaced in ``state_dict``.

    Args:
        state_dict: what to load, with the keys of the save; it may have fewer.
        checkpoint_id: folder, or ``s3://bucket/key``; it may be left out if ``storage_reader`` has one.
        storage_reader: None for a :class:`DistributedFileSystemReader`.
        planner: None for PyTorch's.
        process_group: the ranks that share the state; None for all ranks.
        check_keys_matched: raise an error for keys that the checkpoint does not have. Otherwise they are left as they are.
        coordinator_rank: kept for scripts; the first rank of the group plans.
        s3_region: region of the bucket; None for that of the environment.
        s3client_config: settings of the client.

    Raises:
        SMPUserError: neither ``checkpoint_id`` nor ``storage_reader``, or a state that is no dictionary.
        MissingKeysError: the checkpoint lacks keys. Nothing has been loaded.
        CheckpointError: there is no complete checkpoint, or one of local shards of another degree or another rank.
    """
    if not isinstance(state_dict, dict):
        raise SMPUserError(f"the state to load is {kind_of(state_dict)}; pass a dictionary", code="SMP402")
    reader = _choose_reader(checkpoint_id, storage_reader, s3_region, s3client_config)
    problem: Exception | None = None
    has_scales = False
    try:
        metadata = read_metadata(reader)
        _check(state_dict, metadata, check_keys_matched)
        has_scales = eight_bit_state.KEY in metadata.state_dict_metadata and eight_bit_state.KEY not in state_dict
    except CheckpointError as error:
        problem = error
    if dist.is_initialized():
        agree(problem, process_group)
    elif problem is not None:
        raise problem
    names = [group["params"] for group in _named_groups(state_dict)]
    try:
        if has_scales:  # they are no part of what the script loads
            state_dict[eight_bit_state.KEY] = ""
        checkpoint.load(
            state_dict,
            storage_reader=reader,
            planner=choose_planner(planner, check_keys_matched),
            process_group=process_group,
        )
        if getattr(reader, "parts", ()):  # of other expert parallel degrees: a part has the names of its own experts
            for group, own in zip(_named_groups(state_dict), names, strict=True):
                group["params"] = own
    except CheckpointException as error:
        where = getattr(reader, "checkpoint_id", checkpoint_id)
        raise describe_failures(f"the checkpoint {where} was not loaded", error.failures, process_group) from error
    finally:
        scales = state_dict.pop(eight_bit_state.KEY, "") if has_scales else ""
    if scales:
        eight_bit_state.go_on_with(scales)


def _choose_reader(
    checkpoint_id: str | os.PathLike[str] | None, reader: StorageReader | None, region: str | None, config: Any
) -> StorageReader:
    if reader is None:
        if not checkpoint_id:
            raise SMPUserError(
                "there is nothing to load; pass checkpoint_id, a folder or s3://bucket/key, or a storage_reader",
                code="SMP402",
            )
        return DistributedFileSystemReader(checkpoint_id, s3_region=region, s3client_config=config)
    if checkpoint_id:
        reader.reset(checkpoint_id)
    return reader


def choose_planner(planner: LoadPlanner | None, check_keys_matched: bool) -> LoadPlanner:
    """Return PyTorch's planner in the form that also loads ranks without a part of some tensor, or one of the script's."""
    if planner is None:
        planner = DefaultLoadPlanner(allow_partial_load=not check_keys_matched)
    if type(planner) is DefaultLoadPlanner:
        # It would drop the keys of such tensors, find them in the checkpoint, and take that for one of before PyTorch 2.4.
        planner.flatten_sharded_tensors = False
    return planner


def read_metadata(reader: StorageReader) -> Metadata:
    """Return what describes a checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint, or one of the original library.
    """
    where = getattr(reader, "checkpoint_id", "")
    try:
        return reader.read_metadata()
    except CheckpointError:
        raise
    except FileNotFoundError:
        if os.path.exists(os.path.join(where, OF_THE_ORIGINAL)):
            raise refusal_of_the_original(where) from None
        raise CheckpointError(
            f"there is no complete checkpoint in {where}: it has no .metadata, which is written last; name a checkpoint "
            "whose save has ended"
        ) from None
    except UNREADABLE as error:
        raise CheckpointError(f"the checkpoint {where} cannot be read: {error}") from error


def refusal_of_the_original(folder: str | os.PathLike[str]) -> CheckpointError:
    """Return the error for a local checkpoint of the original library (``tp0_ep0_fsdp0``), whose parts have a form of its own."""
    return CheckpointError(
        f"{folder} is a local checkpoint of the original library (it has {OF_THE_ORIGINAL}), in a form that only it reads; load it "
        "there, save a full state dict, and convert that or load it by from_pretrained"
    )


def _check(state_dict: Mapping[str, Any], metadata: Metadata, check_keys_matched: bool) -> None:
    """Raise an error for a checkpoint that does not fit, before anything is loaded."""
    values = _flatten(state_dict)
    wanted, found = set(values), set(metadata.state_dict_metadata)
    shards = set(filter(None, map(LocalShard.of_key, wanted)))
    saved = set(filter(None, map(LocalShard.of_key, found)))
    # Values that are no tensors are the same in every part.
    has_tensors = any(isinstance(value, torch.Tensor) for value in values.values())
    if shards != saved and (shards or has_tensors):
        raise CheckpointError(
            f"the checkpoint has {_describe(saved)}, and this rank loads {_describe(shards)}; local shards are loaded with the "
            "degrees of the save: set them, or save with SHARDED_STATE_DICT, which loads at any degree"
        )
    missing = sorted(wanted - found)
    if missing and check_keys_matched:
        raise MissingKeysError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} keys: {', '.join(missing[:_SHOWN])}"
            f"{', …' if len(missing) > _SHOWN else ''}; load only keys that it has, or pass check_keys_matched=False"
        )


def _describe(shards: set[LocalShard]) -> str:
    return " and ".join(sorted(map(str, shards))) or "no local shards"


def _flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by their keys as PyTorch flattens them."""
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(read_stateful(state_dict), None, False)
    return dict(planner.state_dict)


def _named_groups(state: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of optimizer states in a state dict, which hold names of parameters."""
    if not isinstance(state, dict):
        return []
    found: list[dict[str, Any]] = []
    for key, value in state.items():
        if key == "param_groups" and isinstance(value, list):
            found += [group for group in value if isinstance(group, dict) and "params" in group]
        else:
            found += _named_groups(value)
    return found
