"""Functions of ``torch.distributed.checkpoint`` with the arguments that scripts for version 2 pass them.

The original has a PyTorch of its own, whose functions take a process group and the global rank of a coordinator.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import optimizer

from smp_version2.checkpoint.agreement import list_ranks, save_once
from smp_version2.checkpoint.optimizer_state import load_sharded_optimizer_state
from smp_version2.checkpoint.state_dict_loader import choose_planner

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint import StorageReader

#: Attribute of functions that take the arguments already.
_DONE = "_smp_takes_groups"


def install() -> None:
    """Let PyTorch's functions take these arguments; calls without them are as before."""
    if hasattr(optimizer.load_sharded_optimizer_state_dict, _DONE):
        return
    load_optimizer = _take_group(optimizer.load_sharded_optimizer_state_dict)
    optimizer.load_sharded_optimizer_state_dict = checkpoint.load_sharded_optimizer_state_dict = load_optimizer
    checkpoint.save_state_dict = _write_once(_take_global_rank(checkpoint.save_state_dict))
    checkpoint.load_state_dict = _take_uneven_shards(_take_global_rank(checkpoint.load_state_dict))


def _take_group(original: Callable[..., dict[str, Any]]) -> Any:
    @functools.wraps(original)
    def load_sharded_optimizer_state_dict(
        model_state_dict: dict[str, Any],
        optimizer_key: str,
        storage_reader: StorageReader,
        planner: Any = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        __tracebackhide__ = True  # reports name the caller
        if process_group is None:
            return original(model_state_dict, optimizer_key, storage_reader, planner)
        return load_sharded_optimizer_state(model_state_dict, optimizer_key, storage_reader, process_group)

    setattr(load_sharded_optimizer_state_dict, _DONE, True)
    return load_sharded_optimizer_state_dict


def _take_global_rank(original: Callable[..., Any]) -> Any:
    """Let a function take the coordinator's global rank, where PyTorch's own reading of it is an error."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        given = signature.bind(*args, **kwargs).arguments
        group, rank = given.get("process_group"), given.get("coordinator_rank", 0)
        if group is not None and rank >= dist.get_world_size(group):
            ranks = list_ranks(group)
            if rank in ranks:
                given["coordinator_rank"] = ranks.index(rank)
        return original(**given)

    return call


def _write_once(original: Callable[..., Any]) -> Any:
    """Let one rank write if the ranks of the group are copies of each other; see ``save_once``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        place = str(getattr(given["storage_writer"], "path", ""))
        alone = given | {"process_group": None, "coordinator_rank": 0, "no_dist": True}
        save = save_once(given["state_dict"], given.get("process_group"), place, lambda: original(**alone))
        return original(**given) if save is None else save()

    return call


def _take_uneven_shards(original: Callable[..., Any]) -> Any:
    """Let a function load ranks that have no part of some tensor; see ``choose_planner``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        given = signature.bind(*args, **kwargs).arguments
        return original(**{**given, "planner": choose_planner(given.get("planner"), check_keys_matched=True)})

    return call
