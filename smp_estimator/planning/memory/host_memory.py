"""A host's shared memory for memory checkpoints: two generations of its ranks' state, replicas once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config.recovery import wants_memory
from smp_estimator.planning.memory.device_memory import embedding_is_distributed, is_half, weights_of_stages
from smp_estimator.planning.request import Request, state_bytes

if TYPE_CHECKING:
    from smp_config import Topology
    from smp_estimator.planning.model_shape import Weight

#: Each rank keeps its last two copies.
GENERATIONS = 2


@dataclass
class _StateParts:
    """Bytes of a stage's state on one rank, by how they are replicated.

    Attributes:
        whole: the same on all replicas.
        divided: different on neighbors along the reduced data parallel axis.
    """

    whole: float = 0.0
    divided: float = 0.0


def checkpoint_bytes(request: Request, topology: Topology) -> int:
    """Return the bytes of shared memory on the host that needs most; 0 if the job keeps no state in memory.

    Raises:
        ConfigError: the job's variables for memory checkpoints are invalid.
    """
    if not wants_memory({name: value for name, value in request.environment if isinstance(value, str)}):
        return 0
    split, same = zip(*(_parts(request, topology, weights) for weights in weights_of_stages(request)), strict=True)
    neighbours = _neighbours(request, topology)
    most, ranks = 0.0, request.processes_per_host
    for host in range(request.instance_count):
        # Of each part, which ranks of the host have it: one of them copies it.
        whole: set[tuple[int, int]] = set()
        divided: set[tuple[int, int, int]] = set()
        for rank in range(host * ranks, (host + 1) * ranks):
            at = topology.coordinates(rank)
            whole.add((at.pp, at.tp))
            divided.add((at.pp, at.tp, at.rdp % neighbours))
        held: dict[int, float] = defaultdict(float)
        for stage, tensor in whole:
            held[stage] += split[stage].whole + (same[stage].whole if tensor == 0 else 0)
        for stage, tensor, _ in divided:
            held[stage] += split[stage].divided + (same[stage].divided if tensor == 0 else 0)
        most = max(most, sum(held.values()))
    return GENERATIONS * round(most)


def _neighbours(request: Request, topology: Topology) -> int:
    """Return the number of ranks along the reduced data parallel axis that have different parts of the state."""
    if request.parameters.sharded_data_parallel_degree > 1:
        return topology.sharded
    return topology.rdp_size if request.parameters.shard_optimizer_state else 1


def _parts(request: Request, topology: Topology, weights: list[Weight]) -> tuple[_StateParts, _StateParts]:
    """Return the state on a rank of a stage: of tensors that tensor parallelism divides, and of the others."""
    parameters, neighbours = request.parameters, _neighbours(request, topology)
    element = 2 if is_half(parameters) else 4
    master = 4 if is_half(parameters) else 0
    tensor, split_embedding = parameters.tensor_parallel_degree, embedding_is_distributed(parameters, request.workload)
    is_sharded = parameters.sharded_data_parallel_degree > 1
    split, same = _StateParts(), _StateParts()
    for weight in weights:
        can_split = split_embedding if weight.embedding else weight.split
        is_split = tensor > 1 and can_split
        local = -(-weight.elements // tensor) if is_split else weight.elements
        found = split if is_split else same
        each = state_bytes(request.workload.optimizer, matrix=weight.matrix) + master
        state = local * each if weight.trainable else 0
        if is_sharded and local >= parameters.sdp_param_persistence_threshold:
            found.divided += (local * element + state) / neighbours
        elif neighbours > 1 and not is_sharded:
            found.whole += local * element
            found.divided += state / neighbours
        else:
            found.whole += local * element + state
    return split, same
