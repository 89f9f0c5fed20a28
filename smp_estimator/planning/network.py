"""Bytes that a rank sends in one optimizer step, as bandwidth-optimal lower bounds.

n ranks, S bytes: all-gather or reduce-scatter (n − 1)/n · S, all-reduce 2(n − 1)/n · S (Patarasuk and Yuan
2009). An implementation may send more; a measured number divided by the one here shows how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group, Topology
from smp_estimator.planning.memory.device_memory import embedding_is_distributed, is_half, summed_bytes
from smp_estimator.planning.memory.fsdp2 import share_of_context
from smp_records.rate_card import sent_bytes

if TYPE_CHECKING:
    from smp_estimator.planning.batches import Batches
    from smp_estimator.planning.memory.kinds import StageMemory
    from smp_estimator.planning.request import Request


def gather_bytes(ranks: int, size: float) -> float:
    """Return the bytes that a rank sends in an all-gather or reduce-scatter of ``size`` bytes over ``ranks`` ranks."""
    return sent_bytes("all_gather", ranks, size)


def reduce_bytes(ranks: int, size: float) -> float:
    """Return the bytes that a rank sends in an all-reduce of ``size`` bytes over ``ranks`` ranks."""
    return sent_bytes("all_reduce", ranks, size)


def data_parallel_bytes(
    ranks: int, elements: float, element_bytes: int, *, summed: int | None = None, shares_state: bool = False
) -> float:
    """Return the bytes of plain data parallelism (one all-reduce), or of sharded optimizer state.

    The latter has a reduce-scatter and an all-gather.

    Args:
        element_bytes: of a parameter.
        summed: of a gradient on its way, if that is another type.
        shares_state: updated parameters are gathered, instead of the sums.
    """
    summed = summed or element_bytes
    again = element_bytes if shares_state else summed
    return gather_bytes(ranks, elements * summed) + gather_bytes(ranks, elements * again)


def sharded_bytes(
    ranks: int,
    degree: int,
    elements: float,
    element_bytes: int,
    *,
    summed: int | None = None,
    accumulation: int = 1,
    keep_gathered: bool = False,
    gathered: int | None = None,
) -> float:
    """Return the bytes of sharded data parallelism in two hops: k·3(s−1)/s·Ψb + 2(r−1)/r·Ψb/s.

    The scheme is MiCS (Zhang et al. 2022). Each of the k backward passes (accumulation steps × microbatches)
    gathers the parameters in forward and again in backward, and reduces the gradients inside the sharding group.
    The r = n/s replicas of a shard are averaged once per optimizer step. With s = n this is fully sharded
    training, 3k(n−1)/n·Ψb.

    Args:
        ranks: n, the ranks that hold the same parameters.
        degree: s.
        elements: Ψ, on one rank before sharding.
        element_bytes: b of the parameters, as communicated.
        summed: b of the gradients, if that is another.
        accumulation: k.
        keep_gathered: parameters stay gathered from forward to backward (2 instead of 3).
        gathered: b of the parameters in gathers, if that is another.
    """
    gradients = elements * (summed or element_bytes)
    gathers = (1 if keep_gathered else 2) * gather_bytes(degree, elements * (gathered or element_bytes))
    inside = accumulation * (gathers + gather_bytes(degree, gradients))
    return inside + reduce_bytes(ranks // degree, gradients / degree)


def node_gather_bytes(ranks: int, per_node: int, size: float, *, hierarchical: bool = True) -> float:
    """Return the bytes that enter one node in an all-gather.

    That is (n − g)/n·S in phases inside and between nodes, else (n − 1)/n·S.
    """
    return (ranks - per_node) / ranks * size if hierarchical else (ranks - 1) / ranks * size


def tensor_parallel_bytes(tensor: int, layers: int, hidden_bytes: float, *, recompute: bool = False) -> float:
    """Return the bytes of tensor parallelism.

    Each layer has 4 all-reduces of batch·seq·hidden·b (Shoeybi et al. 2019), 6 with recompute. Sliced activations
    send the same: each all-reduce becomes a reduce-scatter and an all-gather.
    """
    return layers * (6 if recompute else 4) * reduce_bytes(tensor, hidden_bytes)


def pipeline_bytes(stages: int, stage: int, hidden_bytes: float, pieces: int = 1) -> float:
    """Return the bytes of activations sent to the next stage and gradients sent to the one before.

    They are counted for a whole batch, and for each of the pieces.
    """
    ends = (stage == stages - 1) + (stage == 0)
    return (2 * pieces - ends) * hidden_bytes if stages > 1 else 0.0


def gathered_shards(request: Request) -> list[int]:
    """Return the bytes that a rank contributes to the all-gather of each unit.

    A unit is a layer, or the parameters before or after all layers.
    """
    parameters = request.parameters
    tensor = parameters.tensor_parallel_degree
    split_embedding = embedding_is_distributed(parameters, request.workload)
    units: dict[int | None, int] = {}
    for weight in request.shape.tensors():
        is_split = split_embedding if weight.embedding else weight.split
        local = -(-weight.elements // tensor) if is_split else weight.elements
        # Smaller ones stay whole on every rank.
        if local >= parameters.sdp_param_persistence_threshold:
            units[weight.layer] = units.get(weight.layer, 0) + local
    element = 2 if is_half(parameters) else 4
    return [-(-unit // parameters.sharded_data_parallel_degree) * element for unit in units.values()]


@dataclass(frozen=True)
class Traffic:
    """Bytes sent per rank per optimizer step, by axis, of the rank that sends most.

    Attributes:
        context: keys, values and gradients of attention, received from ranks that share sequences out.
        data_late: of ``data``, what is sent when backward has ended: updated parameters of a sharded optimizer state, and
            what the replicas of a shard average.
    """

    data: float
    tensor: float
    pipeline: float
    data_late: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes over all axes."""
        return self.data + self.tensor + self.pipeline + self.context


def traffic(request: Request, topology: Topology, batch: Batches, stage: StageMemory) -> Traffic:
    """Return a lower bound of the bytes that a rank of ``stage`` sends in one optimizer step."""
    shape, parameters, workload = request.shape, request.parameters, request.workload
    b = 2 if is_half(parameters) else 4
    ranks, degree = topology.size(Group.RDP), parameters.sharded_data_parallel_degree
    k, tensor, stages = workload.accumulation, parameters.tensor_parallel_degree, parameters.pipeline_parallel_degree
    data, late, summed = 0.0, 0.0, summed_bytes(parameters)
    if degree > 1:
        passes = k * parameters.microbatches  # each gathers, and sums inside its group, for itself
        keep = workload.engine == "fsdp2" and stages > 1
        if keep:  # FSDP2 gathers once, and sums after the last microbatch
            passes = 1
        gathered = 1 if parameters.fp8 else b  # of linear layers, the most by far
        data = sharded_bytes(
            ranks,
            degree,
            stage.elements,
            b,
            summed=summed,
            accumulation=passes,
            keep_gathered=keep,
            gathered=gathered,
        )
        late = reduce_bytes(ranks // degree, stage.elements * summed / degree)
    elif parameters.ddp:
        shares = parameters.shard_optimizer_state
        data = data_parallel_bytes(ranks, stage.elements, b, summed=summed, shares_state=shares)
        late = gather_bytes(ranks, stage.elements * b) if shares else 0.0
    tokens = batch.group_batch * batch.sequence
    width, between = request.activation_element_bytes, request.residual_element_bytes
    hidden = tokens * shape.hidden * width / parameters.context_parallel_degree if shape.has_layers else 0
    passed = hidden * between / width / (tensor if parameters.optimize == "memory" else 1)
    recompute = workload.activation_checkpointing is not None
    return Traffic(
        data=data,
        tensor=k * tensor_parallel_bytes(tensor, stage.layers, hidden, recompute=recompute),
        pipeline=k * pipeline_bytes(stages, stage.stage, passed, parameters.virtual_stages),
        data_late=late,
        context=k * width * stage.layers * _attention_elements(request, tokens),
    )


def _attention_elements(request: Request, tokens: int) -> float:
    """Return the elements of attention that a rank receives for each layer; ``tokens`` are those of whole sequences."""
    share = share_of_context(request) if request.shape.has_layers else None
    if share is None:
        return 0.0
    forwards = 1 if request.workload.activation_checkpointing is None else 2
    return forwards * share.forward_elements(tokens) + share.backward_elements(tokens)
