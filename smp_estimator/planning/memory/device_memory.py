"""Memory of one GPU by kind, for every strategy of the model parallel library.

State per parameter with Adam (Rajbhandari et al. 2020, ZeRO, section 3): half precision 2 (parameter) + 2
(gradient) + 4 (fp32 master copy) + 8 (two moments) = 16 bytes, fp32 4 + 4 + 8 = 16. With
``shard_optimizer_state`` over n ranks 4 + 12/n, or 8 + 8/n, and a rank's shard of the reduced gradients. With
sharded data parallelism of degree s all 16 are divided by s. In bfloat16 these are 18, because its gradients
are then summed and kept in fp32.

Two moments are compared: backward, with activations, and ``optimizer.step()``. In the latter the activations
are gone and half precision gradients exist a second time, in fp32: 20 bytes. Gradients that are kept in fp32
need no copy. If state is sharded, gradients are freed after each update. Then a step of one pass has none at
its loss, so the loss is a moment of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from smp_config import Group, ModelParallelParameters, Topology
from smp_config.limits import MATRIX_ROUND_BYTES, effective_bucket_bytes
from smp_config.schedules import TRAITS
from smp_estimator.planning.batches import Batches, in_flight, layers_of_stages
from smp_estimator.planning.context import ContextShare
from smp_estimator.planning.memory.activations import LayerCost, StageActivations, stage_activations
from smp_estimator.planning.memory.communicators import communicator_bytes
from smp_estimator.planning.memory.fsdp2 import FSDP2, refuse_other_settings, stage_of_fsdp2
from smp_estimator.planning.memory.kinds import Kind, StageMemory
from smp_estimator.planning.request import Request, Workload, state_bytes
from smp_estimator.planning.smddp import buffer_bytes

if TYPE_CHECKING:
    from smp_estimator.planning.model_shape import Weight

#: A schedule under which every stage holds all microbatches that are in flight.
_IN_WAVES = next(name for name, traits in TRAITS.items() if traits.has_waves)


def memory(request: Request, topology: Topology, batch: Batches) -> list[StageMemory]:
    """Return the memory of a GPU in each pipeline stage; without activations if the model's width is unknown.

    Raises:
        ConfigError: more stages than layers.
    """
    shape, stages = request.shape, request.parameters.pipeline_parallel_degree
    held = weights_of_stages(request)
    ranges = _layers(request)
    # Modules that share a parameter live in one stage, so the loss of a tied model is computed beside its embedding.
    loss_stage = 0 if shape.tied_embeddings else stages - 1
    found = []
    is_fsdp2 = request.workload.engine == FSDP2
    if is_fsdp2:
        refuse_other_settings(request.parameters)
        loss_stage = stages - 1
    for stage, layers in enumerate(map(len, ranges)):
        if is_fsdp2:
            flying, has_loss = _in_flight(request, batch, stage), stage == loss_stage
            found.append(stage_of_fsdp2(request, batch, stage, layers, held[stage], flying, has_loss=has_loss))
            continue
        activations = _activations(request, batch, stage, layers, has_loss=stage == loss_stage)
        found.append(_stage(request, topology, stage, layers, held[stage], activations))
    return found


def weights_of_stages(request: Request) -> list[list[Weight]]:
    """Return the model's tensors by pipeline stage; raise ConfigError if there are more stages than layers."""
    shape, stages = request.shape, request.parameters.pipeline_parallel_degree
    owner: dict[int, int] = {}
    for stage, layers in enumerate(_layers(request)):
        owner.update(dict.fromkeys(layers, stage))
    held: list[list[Weight]] = [[] for _ in range(stages)]
    for weight in shape.tensors():
        if weight.layer is None:  # behind all layers
            held[-1].append(weight)
        else:
            held[owner.get(weight.layer, 0)].append(weight)
    return held


def _layers(request: Request) -> list[list[int]]:
    """Return the layers of each stage; with FSDP2 the first piece has none of those that are left over."""
    parameters, is_fsdp2 = request.parameters, request.workload.engine == FSDP2
    stages, pieces = parameters.pipeline_parallel_degree, parameters.virtual_stages
    return layers_of_stages(request.shape.layers, stages, pieces, first_has_more=not is_fsdp2)


def embedding_is_distributed(parameters: ModelParallelParameters, workload: Workload) -> bool:
    """Return whether tensor parallelism divides the word embedding; sharded data parallelism always enables it."""
    return parameters.tensor_parallel_degree > 1 and (
        workload.distribute_embedding or parameters.sharded_data_parallel_degree > 1
    )


def _in_flight(request: Request, batch: Batches, stage: int) -> int:
    """Return the microbatches whose activations a stage has at once."""
    parameters = request.parameters
    stages = parameters.pipeline_parallel_degree
    microbatches = batch.microbatches if stages > 1 else 1
    # With several pieces, a stage may hold those of all microbatches in flight, as if all forward passes came first.
    schedule = _IN_WAVES if parameters.virtual_stages > 1 else parameters.pipeline
    return in_flight(schedule, stage, stages, microbatches, parameters.active_microbatches)


def _activations(request: Request, batch: Batches, stage: int, layers: int, *, has_loss: bool) -> StageActivations:
    if not request.shape.has_layers:
        return StageActivations(0, 0, 0, 0)
    parameters, workload = request.parameters, request.workload
    cost = LayerCost(
        samples=max(1, batch.group_batch // batch.microbatches),
        element_bytes=request.activation_element_bytes,
        residual_bytes=request.residual_element_bytes,
        tensor=parameters.tensor_parallel_degree,
        sliced=parameters.optimize == "memory",
        context=ContextShare.of(parameters, request.shape),
    )
    return stage_activations(
        request.shape,
        cost,
        workload,
        layers=layers,
        in_flight=_in_flight(request, batch, stage),
        has_loss=has_loss,
        distributed_loss=embedding_is_distributed(parameters, workload),
        horizon=parameters.activation_loading_horizon if parameters.offload_activations else None,
    )


def is_half(parameters: ModelParallelParameters) -> bool:
    """Return whether parameters, gradients and activations have two bytes."""
    return parameters.fp16 or parameters.bf16


def summed_bytes(parameters: ModelParallelParameters) -> int:
    """Return the bytes of a gradient element in reductions; bfloat16 is too coarse for sums, so it is summed in fp32."""
    sums_in_half = parameters.fp16 and not parameters.fp32_grad_accumulation
    return 2 if sums_in_half else 4


def _stage(
    request: Request,
    topology: Topology,
    stage: int,
    layers: int,
    weights: Sequence[Weight],
    activations: StageActivations,
) -> StageMemory:
    parameters, workload = request.parameters, request.workload
    half = is_half(parameters)
    element = 2 if half else 4
    summed = summed_bytes(parameters)  # gradients of shards stay in the type they travel in
    master = 4 if half else 0
    tensor, shards = parameters.tensor_parallel_degree, parameters.sharded_data_parallel_degree
    threshold = parameters.sdp_param_persistence_threshold
    split_embedding = embedding_is_distributed(parameters, workload)
    # A tensor that tensor parallelism does not divide is the same on all ranks of the stage.
    holders_of = {
        split: topology.size(Group.RDP if split else Group.DP) if parameters.ddp else 1 for split in (True, False)
    }

    # State is shared out over the ranks that hold the same parts, ordinary tensors' too.
    sharers = holders_of[tensor > 1] if parameters.shard_optimizer_state else 1

    total = trainable = sharded = reduced = 0
    stored = updated = 0.0  # elements that this rank stores, and that its optimizer updates
    state = 0.0  # bytes of the optimizer's state
    # Looked up here: searches plan models of thousands of weights, thousands of times.
    of_matrix, of_others = (state_bytes(workload.optimizer, matrix=matrix) for matrix in (True, False))
    # Bytes of gradients: whole ones, those that have left when the optimizer steps, of shards, and fp32 copies.
    whole = leaving = in_shards = copied = 0.0
    units: dict[int | None, int] = {}
    for weight in weights:
        split = tensor > 1 and (split_embedding if weight.embedding else weight.split)
        local = -(-weight.elements // tensor) if split else weight.elements
        divided = shards > 1 and local >= threshold
        part = local / shards if divided else local
        total += local
        stored += part
        if divided:
            sharded += local
            units[weight.layer] = units.get(weight.layer, 0) + local
        if weight.trainable:
            trainable += local
            holders = holders_of[split]
            reduced += local if holders > 1 else 0
            shares_state = sharers > 1
            mine = part / sharers
            updated += mine
            state += mine * (of_matrix if weight.matrix else of_others)
            whole += 0 if divided else local * element
            leaving += local * element if shares_state else 0
            if divided or shares_state:
                in_shards += mine * summed
                copied += mine * 4 if summed == 2 else 0
            elif half:
                copied += mine * 4
    largest_unit = max(units.values(), default=0)
    gathered = min(sharded, max(parameters.sdp_max_live_parameters, largest_unit))
    if shards > 1:  # a unit above the bucket is complete before it is sent, a bucket at a time
        bucket = parameters.sdp_reduce_bucket_size
        buckets, staying = summed * (min(trainable, bucket) if largest_unit <= bucket else largest_unit + bucket), 0
    else:
        buckets, staying = _bucket_bytes(request, reduced, shares_state=sharers > 1)
    # Between two updates there are none of these; with several passes, those of the first are there at the next one's loss.
    let_go = round(leaving + in_shards) if parameters.microbatches * workload.accumulation == 1 else 0
    all_copies, unit_copies = _copied_bytes(request, weights, layers)
    working, copies = activations.layers, unit_copies
    if not let_go and activations.loss + all_copies > working + copies:
        working, copies = activations.loss, all_copies
    kinds = {
        Kind.PARAMETERS: round(stored * element),
        Kind.GRADIENTS: round(whole + in_shards),
        Kind.MASTER: round(updated * master),
        Kind.OPTIMIZER: round(state),
        Kind.ACTIVATIONS: activations.kept + working,
        Kind.COPIES: copies,
        Kind.GATHERED: gathered * element,
        Kind.BUCKETS: buckets,
        Kind.SMDDP: buffer_bytes(request, topology),
        Kind.COMMUNICATORS: communicator_bytes(request, stage),
    }
    comes_and_goes = kinds[Kind.ACTIVATIONS] + kinds[Kind.BUCKETS] + kinds[Kind.COPIES]
    stays = sum(kinds.values()) - comes_and_goes
    in_passes = all_copies + activations.kept + activations.loss
    at_loss = stays - let_go + in_passes if let_go and activations.loss else 0
    return StageMemory(
        stage,
        layers,
        total,
        kinds,
        activations,
        at_loss=at_loss,
        gradient_copy=round(copied),
        in_update=stays + staying + round(copied - leaving) + _iteration_bytes(request, weights),
    )


def _iteration_bytes(request: Request, weights: Iterable[Weight]) -> int:
    """Return the bytes of Muon's iterations for the largest matrix, and of messages with parts of matrices; 0 for others.

    In bfloat16, the matrix and its successor are there, and two products of at most that size.
    """
    if request.workload.optimizer != "muon":
        return 0
    largest = max((2 * weight.elements for weight in weights if weight.matrix and weight.trainable), default=0)
    parameters = request.parameters
    has_parts = max(parameters.tensor_parallel_degree, parameters.sharded_data_parallel_degree) > 1
    messages = 2 * max(largest, MATRIX_ROUND_BYTES) if has_parts or parameters.shard_optimizer_state else 0
    return 4 * largest + messages if largest else 0


def _copied_bytes(request: Request, weights: Iterable[Weight], layers: int) -> tuple[int, int]:
    """Return the bytes of the copies of matrices that autocast computes with, at the loss and in a layer's backward.

    Autocast's cache and autograd keep each copy from its forward pass on. In backward, a checkpointed unit makes its own ones
    again. The others are gone, as the script has left autocast.
    """
    if not request.workload.autocast:
        return 0, 0
    tensor = request.parameters.tensor_parallel_degree
    split_embedding = embedding_is_distributed(request.parameters, request.workload)
    elements = 0
    of_layers = 0
    for weight in weights:
        # A word embedding is looked up in fp32. It is copied if it is the output projection too.
        is_output = weight.embedding and (weight.layer is None or request.shape.tied_embeddings)
        if weight.split or is_output:
            is_divided = tensor > 1 and (weight.split or split_embedding)
            local = -(-weight.elements // tensor) if is_divided else weight.elements
            elements += local
            of_layers += local if weight.split else 0
    group = request.workload.checkpointed_layers(layers)
    in_backward = of_layers * group // max(1, layers) if group else elements
    return 2 * elements, 2 * in_backward


def _bucket_bytes(request: Request, reduced: int, *, shares_state: bool) -> tuple[int, int]:
    """Return the bytes of buckets that exist besides the gradients, in backward and in ``optimizer.step()``.

    Args:
        reduced: gradient elements that other ranks average too.

    Returns:
        The bytes in backward, and the part of them that still exists in ``optimizer.step()``.
    """
    parameters, workload = request.parameters, request.workload
    element = 2 if is_half(parameters) else 4
    is_widened = summed_bytes(parameters) > element
    one = min(reduced * element, effective_bucket_bytes(reduced * element) // element * element)
    if workload.gradient_as_bucket_view and not shares_state:
        if is_widened:  # gradients are copies of the buffers, which stay
            return reduced * 4, reduced * 4
        # Gradients are the buffers. Cleared to None, new ones of a bucket are made beside it: once, or in several passes.
        passes = parameters.microbatches * workload.accumulation
        return (reduced * element if passes > 1 else one), 0
    # A bucket takes the place of its gradients; fp32 sums of half precision take twice theirs until the step ends.
    return one + (reduced * element if is_widened else 0), 0
