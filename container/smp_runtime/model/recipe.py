"""The recipe of a wrapped model: every strategy in its order, each a call into one package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config import Group
from smp_config.limits import effective_bucket_bytes
from smp_runtime.activations.marking import carry_over, find_marks
from smp_runtime.data_parallel.reducer import batch_shares, seeing_own_batch, sharing_group
from smp_runtime.data_parallel.sparse_gradients import sparse_tables
from smp_runtime.microbatch_state import compiled_blocks
from smp_runtime.model.stages import create_late
from smp_runtime.module_conversion.replacing import distribute
from smp_runtime.parameters.optimizer_shards import whole_shard
from smp_runtime.sharding.sharded_state import ShardedState
from smp_runtime.tensor_parallel.group import TensorGroup

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.backward import Backward
    from smp_runtime.model.gradient_accumulation import GradientAccumulation
    from smp_runtime.model.local_part import ParallelState
    from smp_runtime.model.replicas import Replicas
    from smp_runtime.model.stages import Stages


def apply_tensor_parallelism(module: nn.Module, ranks: Ranks) -> nn.Module:
    """Apply tensor parallelism to the model, and return it.

    It comes first, so that all other strategies see the modules that it creates. These are checkpointed and compiled as the
    modules that they replace.
    """
    checkpointed, compiled = find_marks(module), compiled_blocks.find_compile_marks(module)
    module = distribute(module, TensorGroup.of(ranks))
    carry_over(checkpointed, module)
    return compiled_blocks.carry_over(compiled, module)


def place(
    ranks: Ranks,
    stages: Stages,
    replicas: Replicas,
    window: GradientAccumulation,
    backward: Backward,
    placed: ParallelState,
) -> None:
    """Place this rank's part of the model: create, shard, move, agree, cast, shard the state, reduce."""
    part, cfg, precision = stages.part, ranks.cfg, stages.precision
    replicated = cfg.ddp and ranks.size(Group.DP) > 1
    shards_state = replicated and cfg.shard_optimizer_state
    # The order matters: replicas agree in full precision, then weights are cast, then their storage is flattened.
    window.shards = placed.shards = create_late(ranks, stages)
    in_shards = placed.shards.parameters if placed.shards else set()
    stages.move(ranks.device)
    if replicated and not replicas.are_equal:
        replicas.copy([*(p for p in part.parameters() if p not in in_shards), *part.buffers()])
    masters = precision.convert(part.modules(), skip=in_shards, others=part.module.modules())
    # The optimizer updates the parameters, their float32 masters, or this rank's shards of either.
    local = {id(parameter) for parameter in part.parameters()}
    here = [record.parameter for record in part.registry if id(record.parameter) in local]
    trained = [parameter for parameter in here if parameter.requires_grad]
    if replicated or masters or placed.shards is not None:
        placed.frozen = [parameter for parameter in here if not parameter.requires_grad]
    bucket_bytes = effective_bucket_bytes(sum(p.numel() * p.element_size() for p in trained), window.bucket_bytes)
    whole = [parameter for parameter in trained if parameter not in in_shards]
    state = None
    if shards_state:
        sharing, own_batch = sharing_group(ranks), seeing_own_batch(part.registry, trained, ranks)
        state = ShardedState(ranks, sharing, trained, precision, masters, window.bucket_bytes, own_batch)
    elif placed.shards is not None:
        placed.shards.add_whole({p: whole_shard(p, masters) for p in whole})
    elif masters:
        placed.optimizer_shards = {p: whole_shard(p, masters) for p in trained}
    placed.sharded_state = state or placed.shards
    if placed.sharded_state is not None:
        placed.optimizer_shards = placed.sharded_state.optimizer_shards
        part.registry.place_shards(placed.sharded_state.places)
    if len(here) < len(part.registry):  # the optimizer has nothing to do with other stages' parameters
        elsewhere = {r.parameter: None for r in part.registry if id(r.parameter) not in local}
        placed.optimizer_shards = {**(placed.optimizer_shards or {}), **elsewhere}
    # Gradients: the other ranks hear of backward before anything is sent, so that comes first.
    if replicated:
        window.watch_backward(trained)
        window.reduce(part.registry, whole, bucket_bytes, precision.reduce, state, sparse_tables(part.modules()))
    # Sharded state sums the gradients of other layers over the group, and divides all by the same number.
    averages = replicated and not shards_state
    shares = batch_shares(part.registry, trained, ranks) if averages else [1.0] * len(trained)
    if cfg.fp16 or cfg.microbatches > 1 or min(shares, default=1.0) < 1.0:
        backward.scale_gradients(trained, shares)
