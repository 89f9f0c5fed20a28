"""Groups of ranks from the degrees of version 2 of the library."""

from __future__ import annotations

from smp_config.errors import ConfigError
from smp_config.topology import Topology


def lay_out(world_size: int, *, tensor: int, shard: int, expert: int = 1, context: int = 1) -> Topology:
    """Lay the ranks out: tensor parallel ranks are neighbors, then come expert parallel and sharding ranks.

    Args:
        shard: ranks that share one copy of the state; 0 leaves that to the script's FSDP.

    Raises:
        ConfigError: the degrees do not divide the number of processes.
    """
    there_are = f"the job has {world_size} processes (processes of a host × instance_count)"
    if world_size % tensor:
        raise ConfigError(
            f"tensor_parallel_degree is {tensor}, and {there_are}, which cannot be divided into groups of {tensor}: use one of "
            f"{_divisors(world_size)}, or start a multiple of {tensor} processes",
            code="SMP102",
        )
    replicas = world_size // tensor
    if replicas % expert:
        raise ConfigError(
            f"expert_parallel_degree is {expert}, and {there_are}, which cannot be divided into groups of {expert}: use one of "
            f"{_divisors(replicas)}, or start a multiple of {expert} processes",
            code="SMP102",
        )
    replicas //= expert
    if replicas % max(1, shard):
        beside = f", {replicas} of them for each part of the tensor_parallel_degree {tensor}" if tensor > 1 else ""
        if expert > 1:
            beside = f", {replicas} of them with the same experts at the expert_parallel_degree {expert}"
        raise ConfigError(
            f"hybrid_shard_degree is {shard}, and {there_are}{beside}, which cannot be divided into groups of {shard}: use one of "
            f"{_divisors(replicas)}, or 0",
            code="SMP102",
        )
    if replicas % context:
        raise ConfigError(
            f"context_parallel_degree is {context}, and {there_are}, which cannot be divided into groups of {context} × "
            f"tensor_parallel_degree {tensor}: use one of {_divisors(replicas)}",
            code="SMP102",
        )
    return Topology(world_size, tensor=tensor, sharded=max(1, shard), expert=expert, context=context)


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
