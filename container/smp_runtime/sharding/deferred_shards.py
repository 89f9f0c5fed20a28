"""Parameters that are created when there is a place for them: each rank keeps its shard, none ever the model."""

from __future__ import annotations

import torch
from torch import nn

from smp_config import Group
from smp_runtime.job.ranks import Ranks
from smp_runtime.parameters.deferred_creation import Deferrals, StandIn, materialize, stand_ins
from smp_runtime.sharding.options import ShardingOptions
from smp_runtime.sharding.sharded_parameters import ShardedParameters
from smp_runtime.sharding.unit_plan import is_sharded


def make_stand_ins(ranks: Ranks, module: nn.Module) -> list[StandIn]:
    """Parameters without values, in place of those whose creation was deferred; small ones have memory already."""
    options = ShardingOptions.of(ranks.cfg)

    def make(meta: nn.Parameter) -> torch.Tensor:
        if is_sharded(meta, options):
            return torch.zeros((), dtype=meta.dtype, device=ranks.device).expand(meta.shape)
        return torch.empty(meta.shape, dtype=meta.dtype, device=ranks.device)

    return stand_ins(ranks.keep(Deferrals, Deferrals), module, make)


def create_shards(ranks: Ranks, module: nn.Module, made: list[StandIn], shards: ShardedParameters) -> None:
    """Run the creation that was deferred; every rank of a stage draws the numbers of its first one and keeps its part."""
    materialize(
        ranks.keep(Deferrals, Deferrals),
        module,
        ranks.device,
        replaced=made,
        take=shards.receive,
        agree=lambda state: ranks.control.broadcast(state, ranks.members(Group.DP)),
    )
