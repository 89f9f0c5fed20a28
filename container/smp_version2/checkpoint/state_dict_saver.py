"""Saving of sharded state: now, or in the background."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session
from smp_version2.checkpoint.agreement import describe_failures, list_ranks, require_one_place, save_once
from smp_version2.checkpoint.async_utils import DEFAULT_ASYNC_REQUEST_QUEUE, AsyncCallsQueue
from smp_version2.checkpoint.filesystem import DistributedFileSystemWriter
from smp_version2.checkpoint.state_dict_utils import read_stateful
from smp_version2.eight_bits import state as eight_bit_state
from smp_version2.state import state

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint import SavePlanner, StorageWriter


class PyTorchDistSaveShardedStrategy:
    """The way in which ``async_save`` writes: by ``torch.distributed.checkpoint``. There is no other one."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Save the state of all ranks of a group; all of them call it, and training goes on when the checkpoint is whole.

    Args:
        state_dict: tensors of FSDP's sharded state dicts, plain tensors and other values. Ranks write what they have.
        checkpoint_id: folder, or ``s3://bucket/key``; it may be left out if ``storage_writer`` has one.
        storage_writer: None for a :class:`DistributedFileSystemWriter`.
        planner: None for PyTorch's.
        process_group: the ranks with one copy of the state; None for all ranks. If nothing shards the state, the first of its ranks
            writes, and others need not call.
        coordinator_rank: kept for scripts. The first rank of the group writes the metadata, and any other choice is logged.
        wait_error_handling: kept for scripts; all ranks always learn of an error.
        force_check_all_plans: kept for scripts; plans are always made and checked.
        s3_region: region of the bucket; None for that of the environment.
        s3client_config: an object whose ``part_size`` is the number of bytes of one part of an upload.

    Raises:
        SMPUserError: neither ``checkpoint_id`` nor ``storage_writer``, or a state that is no dictionary.
        CheckpointError: a rank could not write, or ranks of the group have named different places.
    """
    _check(state_dict, process_group, coordinator_rank)
    writer = _choose_writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    values = read_stateful(state_dict) | eight_bit_state.values_to_save()
    alone = _save_once(values, writer, planner, process_group)
    if alone is not None:
        alone()
        return
    _write(values, writer, planner, process_group)


def async_save(  # noqa: PLR0913 - the documented signature
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    queue: AsyncCallsQueue = DEFAULT_ASYNC_REQUEST_QUEUE,
    sharded_strategy: Any = PyTorchDistSaveShardedStrategy,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> int:
    """Copy the state to host memory, and save it in the background; see :func:`save` for the other arguments.

    A second call waits until the save before it is whole. An error of a save is raised by the next call of
    :func:`maybe_finalize_async_calls`, ``async_save`` or ``tsm.shutdown`` on all ranks of the group, and fails the job.

    Args:
        queue: holds saves that are under way.
        sharded_strategy: :class:`PyTorchDistSaveShardedStrategy`, the only one.

    Returns:
        The number of the save, which :func:`maybe_finalize_async_calls` returns when it has ended.

    Raises:
        NotInitializedError: before ``tsm.init``.
        SMPUserError: another strategy, or as for :func:`save`.
        CheckpointError: the save before this one failed.
    """
    _ = state.joined
    kind = sharded_strategy if isinstance(sharded_strategy, type) else type(sharded_strategy)
    if not issubclass(kind, PyTorchDistSaveShardedStrategy):
        raise SMPUserError(
            f"async_save got sharded_strategy={kind.__name__}; leave it out, or pass PyTorchDistSaveShardedStrategy",
            code="SMP402",
        )
    _check(state_dict, process_group, coordinator_rank)
    queue.maybe_finalize_async_calls(blocking=True)
    writer = _choose_writer(checkpoint_id, storage_writer, s3_region, s3client_config)
    stager: Any = writer if hasattr(writer, "stage") else BlockingAsyncStager()
    copied = stager.stage(read_stateful(state_dict) | eight_bit_state.values_to_save())
    work = _save_once(copied, writer, planner, process_group)
    if work is None:
        work = functools.partial(_write, copied, writer, planner, queue.group_of(process_group))
    return queue.begin(work, str(getattr(writer, "checkpoint_id", checkpoint_id)))


def maybe_finalize_async_calls(
    blocking: bool = True, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
) -> list[int]:
    """Return the numbers of saves of the default queue that have ended, and raise their errors.

    See :meth:`AsyncCallsQueue.maybe_finalize_async_calls`.
    """
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking, process_group, skip_sync)


def _check(state_dict: Mapping[str, Any], group: dist.ProcessGroup | None, coordinator_rank: int) -> None:
    if not isinstance(state_dict, Mapping):
        raise SMPUserError(f"the state to save is {kind_of(state_dict)}; pass a dictionary", code="SMP402")
    first = list_ranks(group)[0]
    if coordinator_rank not in (0, first):  # 0 is the default, and also the place in the group
        session.say_once(
            f"coordinator_rank={coordinator_rank} has no effect: the first rank of the group, {first}, writes the metadata"
        )


def _choose_writer(
    checkpoint_id: str | os.PathLike[str] | None, writer: StorageWriter | None, region: str | None, config: Any
) -> StorageWriter:
    if writer is None:
        if not checkpoint_id:
            raise SMPUserError(
                "there is no place to save to; pass checkpoint_id, a folder or s3://bucket/key, or a storage_writer",
                code="SMP402",
            )
        return DistributedFileSystemWriter(checkpoint_id, s3_region=region, s3client_config=config)
    if checkpoint_id:
        writer.reset(checkpoint_id)
    return writer


def _save_once(
    state_dict: dict[str, Any], writer: StorageWriter, planner: SavePlanner | None, group: dist.ProcessGroup | None
) -> Callable[[], None] | None:
    """Return the function that saves if one rank writes for all of a group; see :func:`.agreement.save_once`."""
    write = functools.partial(_write, state_dict, writer, planner, None, alone=True)
    return save_once(state_dict, group, str(getattr(writer, "checkpoint_id", None)), write)


def _write(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner | None,
    group: dist.ProcessGroup | None,
    *,
    alone: bool = False,
) -> None:
    where = getattr(writer, "checkpoint_id", None)
    if not alone:
        require_one_place(str(where), group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            checkpoint.save(state_dict, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:
        raise describe_failures(f"the checkpoint {where} was not saved", error.failures, group) from error
