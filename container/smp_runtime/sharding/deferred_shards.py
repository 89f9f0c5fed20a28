"""Parameters that are created when there is a place for them: each rank keeps its shard, none ever the model."""

from __future__ import annotations

import torch
from torch import nn

from smp_config import Group
from smp_runtime.job.session import Session
from smp_runtime.parameters.deferred_creation import StandIn, materialize, stand_ins
from smp_runtime.sharding.options import ShardingOptions
from smp_runtime.sharding.sharded_parameters import ShardedParameters
from smp_runtime.sharding.unit_plan import is_sharded


def make_stand_ins(session: Session, module: nn.Module) -> list[StandIn]:
    """Parameters without values, in place of those whose creation was deferred; small ones have memory already."""
    options = ShardingOptions.of(session.cfg)

    def make(meta: nn.Parameter) -> torch.Tensor:
        if is_sharded(meta, options):
            return torch.zeros((), dtype=meta.dtype, device=session.device).expand(meta.shape)
        return torch.empty(meta.shape, dtype=meta.dtype, device=session.device)

    return stand_ins(session.deferrals, module, make)


def create_shards(session: Session, module: nn.Module, made: list[StandIn], shards: ShardedParameters) -> None:
    """Run the creation that was deferred; every rank of a stage draws the numbers of its first one and keeps its part."""
    materialize(
        session.deferrals,
        module,
        session.device,
        replaced=made,
        take=shards.receive,
        agree=lambda state: session.control.broadcast(state, session.members(Group.DP)),
    )
