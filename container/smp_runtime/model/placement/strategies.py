"""Steps of the recipe that place a model on this rank. Each takes one strategy, and returns a frozen record of its result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group
from smp_config.limits import effective_bucket_bytes
from smp_runtime.context.inputs import SequenceInputs
from smp_runtime.context.proofs.position_wise import prepare
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.context.travel import take_apart
from smp_runtime.data_parallel.reducer import batch_shares, seeing_own_batch, sharing_group
from smp_runtime.data_parallel.sparse_gradients import sparse_tables
from smp_runtime.model.stages import create_late
from smp_runtime.parameters.optimizer_shards import whole_shard
from smp_runtime.pipeline.transport.packing import register_wrapper
from smp_runtime.sharding.sharded_state import ShardedState

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.backward import Backward
    from smp_runtime.model.gradient_accumulation import GradientAccumulation
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_runtime.model.replicas import Replicas
    from smp_runtime.model.stages import Stages
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.parameters.precision import Precision
    from smp_runtime.sharding.sharded_parameters import ShardedParameters


@dataclass(frozen=True)
class ModelParts:
    """A wrapped model's objects, which its strategies change."""

    ranks: Ranks
    stages: Stages
    replicas: Replicas
    accumulation: GradientAccumulation
    backward: Backward
    placed: ParallelState

    @property
    def part(self) -> LocalPart:
        """Return this rank's part of the model."""
        return self.stages.part

    @property
    def precision(self) -> Precision:
        """Return the precision in which the model trains."""
        return self.stages.precision

    @property
    def are_replicated(self) -> bool:
        """Return whether other ranks have replicas of this rank's part, with which it averages gradients."""
        return self.ranks.cfg.ddp and self.ranks.size(Group.DP) > 1

    @property
    def shards_state(self) -> bool:
        """Return whether the replicas divide the optimizer state, while each keeps whole parameters."""
        return self.are_replicated and self.ranks.cfg.shard_optimizer_state


@dataclass(frozen=True)
class CreatedParameters:
    """The parameters of this rank's part, on its device.

    Attributes:
        shards: the sharded ones, under sharded data parallelism; or None.
        in_shards: parameters that lie in ``shards``.
    """

    shards: ShardedParameters | None
    in_shards: Collection[nn.Parameter]


@dataclass(frozen=True)
class ParameterRoles:
    """The parameters of a model by their role on this rank.

    Attributes:
        trained: those that this rank trains.
        whole: those of ``trained`` that are not in shards.
        frozen: those on this rank that are not trained.
        elsewhere: those of other stages.
    """

    trained: list[nn.Parameter]
    whole: list[nn.Parameter]
    frozen: list[nn.Parameter]
    elsewhere: list[nn.Parameter]


@dataclass(frozen=True)
class OptimizerState:
    """The tensors that the optimizer updates on this rank.

    Attributes:
        updated: shards that it updates in place of parameters; None if it updates the parameters.
        replicas_share: the optimizer state that the replicas divide, which also transports gradients; or None.
        sharded: ``replicas_share``, or the sharded parameters; or None.
    """

    updated: dict[nn.Parameter, OptimizerShard | None] | None
    replicas_share: ShardedState | None
    sharded: ShardedState | ShardedParameters | None


def create_parameters(parts: ModelParts) -> CreatedParameters:
    """Create late parameters, sharded ones in their shards, free those of other stages, and move the rest to the device."""
    shards = create_late(parts.ranks, parts.stages)
    parts.accumulation.shards = shards
    parts.stages.move(parts.ranks.device)
    return CreatedParameters(shards, frozenset() if shards is None else shards.parameters)


def make_replicas_equal(parts: ModelParts, created: CreatedParameters) -> None:
    """Copy the weights and buffers of the first replica to the others; shards were made equal when they were created."""
    if not parts.are_replicated or parts.replicas.are_equal:
        return
    whole = [parameter for parameter in parts.part.parameters() if parameter not in created.in_shards]
    parts.replicas.copy([*whole, *parts.part.buffers()])


def cast_weights(parts: ModelParts, created: CreatedParameters) -> Mapping[nn.Parameter, torch.Tensor]:
    """Cast the weights to the precision of training; return the float32 masters of those that were cast."""
    modules = parts.part.modules()
    return parts.precision.convert(modules, skip=created.in_shards, others=parts.part.module.modules())


def sort_parameters(parts: ModelParts, created: CreatedParameters) -> ParameterRoles:
    """Sort the model's parameters by their role on this rank, in the order in which they are registered."""
    local = {id(parameter) for parameter in parts.part.parameters()}
    roles = ParameterRoles(trained=[], whole=[], frozen=[], elsewhere=[])
    for record in parts.part.registry:
        parameter = record.parameter
        if id(parameter) not in local:
            roles.elsewhere.append(parameter)
        elif not parameter.requires_grad:
            roles.frozen.append(parameter)
        else:
            roles.trained.append(parameter)
            if parameter not in created.in_shards:
                roles.whole.append(parameter)
    return roles


def place_optimizer_state(
    parts: ModelParts, created: CreatedParameters, roles: ParameterRoles, masters: Mapping[nn.Parameter, torch.Tensor]
) -> OptimizerState:
    """Choose the tensors that the optimizer updates: the parameters, their masters, or this rank's shards of either."""
    shards = created.shards
    shared = None
    updated: dict[nn.Parameter, OptimizerShard | None] | None = None
    if parts.shards_state:
        shared = _share_state(parts, roles, masters)
    elif shards is not None:
        shards.add_whole({parameter: whole_shard(parameter, masters) for parameter in roles.whole})
    elif masters:
        updated = {parameter: whole_shard(parameter, masters) for parameter in roles.trained}
    sharded = shared or shards
    if sharded is not None:
        updated = sharded.optimizer_shards
        parts.part.registry.place_shards(sharded.places)
    if roles.elsewhere:  # the optimizer has nothing to do with other stages' parameters
        updated = {**(updated or {}), **dict.fromkeys(roles.elsewhere)}
    return OptimizerState(updated, shared, sharded)


def _share_state(
    parts: ModelParts, roles: ParameterRoles, masters: Mapping[nn.Parameter, torch.Tensor]
) -> ShardedState:
    """Divide the optimizer state over the replicas."""
    sharing = sharing_group(parts.ranks)
    own_batch = seeing_own_batch(parts.part.registry, roles.trained, parts.ranks)
    most_bytes = parts.accumulation.bucket_bytes
    return ShardedState(parts.ranks, sharing, roles.trained, parts.precision, masters, most_bytes, own_batch)


def keep_records(
    parts: ModelParts, created: CreatedParameters, roles: ParameterRoles, state: OptimizerState, *, has_masters: bool
) -> None:
    """Record the results of the strategies for the model's other parts."""
    placed = parts.placed
    placed.shards = created.shards
    placed.sharded_state = state.sharded
    placed.optimizer_shards = state.updated
    # A rank that trains alone, in full precision, may unfreeze parameters at any time, as in plain PyTorch.
    if parts.are_replicated or has_masters or created.shards is not None:
        placed.frozen = roles.frozen


def average_gradients(parts: ModelParts, roles: ParameterRoles, state: OptimizerState) -> None:
    """Average gradients over the replicas, once per window."""
    if not parts.are_replicated:
        return
    accumulation = parts.accumulation
    trained_bytes = sum(parameter.numel() * parameter.element_size() for parameter in roles.trained)
    # Other ranks must learn of backward before any gradient is sent, so this hook comes first.
    accumulation.watch_backward(roles.trained)
    accumulation.reduce(
        parts.part.registry,
        roles.whole,
        effective_bucket_bytes(trained_bytes, accumulation.bucket_bytes),
        parts.precision.reduce,
        state.replicas_share,
        sparse_tables(parts.part.modules()),
    )


def scale_gradients(parts: ModelParts, roles: ParameterRoles) -> None:
    """Multiply gradients as they come by this rank's share, and by the loss scale of a script's own backward."""
    cfg = parts.ranks.cfg
    shares = [1.0] * len(roles.trained)
    # With divided optimizer state, gradients of other layers are summed over the group, and all are divided by one number.
    if parts.are_replicated and not parts.shards_state:
        shares = batch_shares(parts.part.registry, roles.trained, parts.ranks)
    has_shares = min(shares, default=1.0) < 1.0
    # A script's own backward averages over microbatches, and scales the loss, as model.backward does.
    scales_loss = cfg.fp16 or cfg.microbatches > 1
    if scales_loss or has_shares:
        parts.backward.scale_gradients(roles.trained, shares)


def share_sequences_out(parts: ModelParts) -> None:
    """Prepare this rank's modules and its messages for slices of sequences; no effect without context parallelism."""
    if SequenceInputs.of(parts.ranks) is None:
        return
    register_wrapper(ShardedSequence, take_apart)
    prepare(parts.part.modules())
