"""What the job's parameters add to PyTorch's ``FullyShardedDataParallel``: groups, strategy, and arguments of version 2."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from smp_config import Group

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_config.version2.parameters import Version2Parameters
    from smp_runtime.job.ranks import Ranks


def install(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Give FSDP the groups and the strategy of the parameters, where a script gives none; return the function that ends it."""
    original = FullyShardedDataParallel.__init__
    names = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def initialize(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        finish = given.pop("post_param_init_fn", None)
        if given.get("process_group") is None and given.get("device_mesh") is None:
            given |= choose_groups(parameters, ranks, given.get("sharding_strategy"))
        if ranks.device.type == "cpu":  # FSDP refuses to choose it, and emulated GPUs are CPUs
            given["device_id"] = ranks.device
        original(self, **given)
        if finish is not None:
            finish(self)

    FullyShardedDataParallel.__init__ = initialize  # type: ignore[method-assign]

    def end() -> None:
        FullyShardedDataParallel.__init__ = original  # type: ignore[method-assign]

    return end


def choose_groups(parameters: Version2Parameters, ranks: Ranks, strategy: ShardingStrategy | None) -> dict[str, Any]:
    """Return the arguments of FSDP that follow from the degrees."""
    degree = parameters.shard_degree(ranks.topology.world_size)
    if degree == 0:
        return {}
    if degree == 1:
        return {"process_group": ranks.process_group(Group.RDP), "sharding_strategy": ShardingStrategy.NO_SHARD}
    if ranks.size(Group.REPLICA) == 1:
        made: dict[str, Any] = {"process_group": ranks.process_group(Group.SHARD)}
        if _is_hybrid(strategy):
            made["sharding_strategy"] = ShardingStrategy.FULL_SHARD
        return made
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup] = (
        ranks.process_group(Group.SHARD),
        ranks.process_group(Group.REPLICA),
    )
    chosen = strategy if _is_hybrid(strategy) else ShardingStrategy.HYBRID_SHARD
    return {"process_group": groups, "sharding_strategy": chosen}


def _is_hybrid(strategy: ShardingStrategy | None) -> bool:
    """Return whether a strategy has a group that shards and a group that replicates; one such has a private name."""
    return strategy is not None and "HYBRID" in strategy.name
