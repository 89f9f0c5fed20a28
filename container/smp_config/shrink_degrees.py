"""The degrees with which a job goes on that has lost ranks: those that it has, or the nearest that fit the ranks that are left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_config.topology import Group

if TYPE_CHECKING:
    from smp_config.parameters import ModelParallelParameters

#: The degrees, in the order ``pp, tp, sharded, cp``.
_DEGREES = (
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
    "context_parallel_degree",
)


def shrink_to(parameters: ModelParallelParameters, ranks: int) -> ModelParallelParameters | None:
    """Return the parameters for a job of ``ranks`` ranks, fewer than it was configured for.

    No degree becomes larger. Tensor parallel and sharding degrees become divisors of their former values, so they
    still divide the model's layers. Of all degrees that fit, the largest product wins, since it leaves each rank
    the least of the model's state. Among equals, the fewest changed degrees win; tensor parallelism is kept before
    stages.

    Returns:
        None if no degrees fit: without ``ddp`` the remaining ranks must make one replica.
    """
    pp, tp, sharded, cp = (getattr(parameters, name) for name in _DEGREES)
    candidates = [
        (stages, tensor, shards, context)
        for stages in range(1, pp + 1)
        for tensor in _divisors(tp)
        for shards in _divisors(sharded)
        for context in _divisors(cp)
        if stages * tensor * max(shards, context) <= ranks
    ]

    def preference(degrees: tuple[int, int, int, int]) -> tuple[int, int, int, bool, bool]:
        stages, tensor, shards, context = degrees
        changed = [stages != pp, tensor != tp, shards != sharded, context != cp]
        return -stages * tensor * shards, -context, sum(changed), changed[1], changed[0]

    for degrees in sorted(candidates, key=preference):
        if (found := _with_degrees(parameters, *degrees, ranks)) is not None:
            return found
    return None


def _with_degrees(
    parameters: ModelParallelParameters, stages: int, tensor: int, shards: int, context: int, ranks: int
) -> ModelParallelParameters | None:
    """Return the parameters with these degrees; None if they do not fit the ranks, or each other."""
    given = parameters.to_mp_parameters()
    given |= {"partitions": stages, "pipeline_parallel_degree": stages}
    if tensor != parameters.tensor_parallel_degree:
        given["tensor_parallel_degree"] = tensor
        if parameters.expert_parallel_degree > 1:  # whole experts lie over all of a tensor parallel group
            given["expert_parallel_degree"] = tensor
    if shards != parameters.sharded_data_parallel_degree:
        given["sharded_data_parallel_degree"] = shards
    if context != parameters.context_parallel_degree:
        given["context_parallel_degree"] = context
    try:
        found = type(parameters).from_mp_parameters(given)
        topology = found.topology(ranks)
    except ConfigError:
        return None  # these degrees do not fit to each other, or to the ranks
    # Replicas without a gradient reduction between them would train apart.
    return found if found.ddp or topology.size(Group.DP) == 1 else None


def count_readers(parameters: ModelParallelParameters, ranks: int) -> int:
    """Return the number of shares that a batch is divided into, for a job of ``ranks`` ranks."""
    return parameters.topology(ranks).size(Group.BATCH_RDP if parameters.prescaled_batch else Group.BATCH_DP)


def describe_difference(former: ModelParallelParameters, now: ModelParallelParameters) -> str:
    """Describe the degrees that differ; empty if none does."""
    changed = [
        f"{name} {getattr(former, name)} → {getattr(now, name)}"
        for name in _DEGREES
        if getattr(former, name) != getattr(now, name)
    ]
    return ", ".join(changed)


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
