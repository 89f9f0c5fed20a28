"""Memory of a GPU if the job runs on PyTorch's FSDP2 with fp32 parameters, half precision gathers and sums in fp32.

It is what PyTorch reserves, not only what is allocated: segments of one moment that no later tensor can take count on. All terms
follow from sizes and from what the engine does. No number was fitted.

* Parameters, gradients and optimizer state are fp32 and sharded. Gradients' memory stays reserved between two steps.
* The root unit (embedding, last norm, output matrix) stays gathered from its forward to its backward pass, and so does the last
  layer. Gathers are made on a stream of their own. Its buffers are not used by others: those of the root and of one layer.
* In a pipeline everything stays gathered until the last microbatch, and gradients are summed whole, in fp32, until they are
  reduced after it. Each stage keeps its outputs, and a buffer for the gradient of each.
* A pipeline's first piece has no more layers than any other, as torchtitan divides them.
* The root unit's gradients are reduced when backward has ended. They and their fp32 sums need free segments as large as they are.
  The largest one is the loss's. If that is too small, others are reserved, unless segments are expandable.
* The cross entropy in fp32 has three fp32 tensors of the logits' size in backward: log-softmax, and two gradients. The memory
  of the logits themselves is too small for any of them. Over a tensor parallel group it is computed op by op and has four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_estimator.planning.context import ContextShare
from smp_estimator.planning.memory.activations import LayerCost, StageActivations, stage_activations
from smp_estimator.planning.memory.kinds import Kind, StageMemory
from smp_estimator.planning.request import state_bytes

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_estimator.planning.batches import Batches
    from smp_estimator.planning.model_shape import Weight
    from smp_estimator.planning.request import Request

#: Name of this engine in a workload.
FSDP2 = "fsdp2"

_FP32, _HALF, _FLOAT8 = 4, 2, 1


def bytes_of_logit(*, compiled: bool, tensor: int) -> int:
    """Return the most bytes that the cross entropy in fp32 takes for each logit, in backward.

    A compiled one has the logits and their gradient, both in half precision.
    """
    if compiled:
        return 2 * _HALF
    return _HALF + _FP32 * (3 if tensor == 1 else 4)


def refuse_other_settings(parameters: ModelParallelParameters) -> None:
    """Raise ConfigError for settings that this engine has not."""
    for name, is_set in (
        ("shard_optimizer_state", parameters.shard_optimizer_state),
        ("offload_activations", parameters.offload_activations),
        ("fp16", parameters.fp16),
    ):
        if is_set:
            raise ConfigError(
                f'{name} is set, and a plan for the engine "{FSDP2}" knows parameters in fp32 that are gathered in bf16, '
                f"sharded over sharded_data_parallel_degree ranks: remove {name}, or the engine",
                code="SMP110",
            )


def stage_of_fsdp2(
    request: Request,
    batch: Batches,
    stage: int,
    layers: int,
    weights: Sequence[Weight],
    in_flight: int,
    *,
    has_loss: bool,
) -> StageMemory:
    """Return the memory of a GPU of a stage.

    Args:
        weights: the tensors of the stage.
        in_flight: microbatches whose activations the stage has at once.
        has_loss: the stage computes the loss.
    """
    parameters, workload = request.parameters, request.workload
    tensor, shards = parameters.tensor_parallel_degree, parameters.sharded_data_parallel_degree
    passes = parameters.microbatches * workload.accumulation
    has_stages = parameters.pipeline_parallel_degree > 1
    total = trainable = matrices = root = table = moments = 0
    units: dict[int, int] = {}
    for weight in weights:
        is_matrix = weight.split or weight.embedding
        local = -(-weight.elements // tensor) if is_matrix else weight.elements
        total += local
        if weight.trainable:
            trainable += local
            moments += local * state_bytes(workload.optimizer, matrix=weight.matrix)
        matrices += local if weight.split else 0
        if weight.layer is None or weight.layer < 0:
            root += local
            table = max(table, local)
        else:
            units[weight.layer] = units.get(weight.layer, 0) + local
    layer = max(units.values(), default=0)
    # Matrices of layers may travel in 8 bits; embeddings, norms and the output matrix do not.
    part_in_float8 = matrices / (total - root) if parameters.fp8 and total > root else 0.0
    of_layer = _HALF - (_HALF - _FLOAT8) * part_in_float8
    on_gather_stream = _HALF * root + of_layer * layer
    if shards == 1:
        gathered = float(_HALF * total)
        on_gather_stream = 0.0
    elif has_stages:
        gathered = _HALF * root + of_layer * (total - root)
    else:
        gathered = _HALF * root + of_layer * layer
    # Without stages each pass reduces its own sums, FSDP2's default.
    whole = _FP32 * trainable if has_stages and passes > 1 and shards > 1 else 0
    # One layer's sums travel while those of the next one are made.
    buckets = 2 * _FP32 * layer + _HALF * layer if shards > 1 else 0
    apart = _segments_of_root(request, batch, root, table) if shards > 1 and not has_stages else 0
    activations = _activations(request, batch, layers, in_flight, has_loss=has_loss)
    kinds = {
        Kind.PARAMETERS: round(_FP32 * total / shards),
        Kind.GRADIENTS: round(_FP32 * trainable / shards) + whole,
        Kind.MASTER: 0,
        Kind.OPTIMIZER: round(moments / shards),
        Kind.ACTIVATIONS: activations.kept + activations.layers,
        Kind.GATHERED: round(gathered + on_gather_stream),
        Kind.BUCKETS: buckets + apart,
    }
    stays = sum(kinds.values()) - kinds[Kind.ACTIVATIONS] - kinds[Kind.BUCKETS]
    at_loss = stays + activations.kept + activations.loss + apart if activations.loss else 0
    return StageMemory(stage, layers, total, kinds, activations, at_loss=at_loss, gradient_copy=0, in_update=stays)


def has_expandable_segments(request: Request) -> bool:
    """Return whether the job's environment lets segments of PyTorch's allocator grow."""
    environment = dict(request.environment)
    options = (environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in option.replace(" ", "").lower() for option in options)


def _segments_of_root(request: Request, batch: Batches, root: int, table: int) -> int:
    """Return the bytes of segments that only the root unit's gradients take, and their sums when backward has ended.

    Args:
        root: elements of the root unit.
        table: of its largest tensor.
    """
    shape, parameters, workload = request.shape, request.parameters, request.workload
    if not shape.has_layers or has_expandable_segments(request):
        return 0
    tokens = batch.group_batch * batch.sequence // batch.microbatches // parameters.context_parallel_degree
    logits = tokens * shape.vocabulary // parameters.tensor_parallel_degree
    largest = logits * (_HALF if workload.compiled_loss else _FP32)
    gradients = _HALF * root if _HALF * table > largest else 0
    return gradients + (_FP32 * root if _FP32 * root > largest else 0)


def share_of_context(request: Request) -> ContextShare | None:
    """Return how the ranks of a context group compute attention in the request's engine; None if sequences are not shared out."""
    of = ContextShare.of_pytorch if request.workload.engine == FSDP2 else ContextShare.of
    return of(request.parameters, request.shape)


def _activations(request: Request, batch: Batches, layers: int, in_flight: int, *, has_loss: bool) -> StageActivations:
    shape, parameters, workload = request.shape, request.parameters, request.workload
    if not shape.has_layers:
        return StageActivations(0, 0, 0, 0)
    tensor = parameters.tensor_parallel_degree
    cost = LayerCost(
        samples=max(1, batch.group_batch // batch.microbatches),
        element_bytes=_HALF,
        tensor=tensor,
        context=share_of_context(request),
    )
    made = stage_activations(
        shape,
        cost,
        workload,
        layers=layers,
        in_flight=in_flight,
        has_loss=False,
        distributed_loss=True,
        horizon=None,
    )
    tokens, loss, kept = cost.tokens(shape), 0.0, made.kept
    if has_loss:
        loss = tokens * shape.vocabulary / tensor * bytes_of_logit(compiled=workload.compiled_loss, tensor=tensor)
        # Inputs of the last norm, and of the output matrix, which has the tokens of all ranks of the group.
        loss += tokens * shape.hidden * _HALF * (1 / tensor + 1)
    if parameters.pipeline_parallel_degree > 1:
        # A stage keeps its outputs until the step ends, and has a buffer for the gradient of each.
        kept += round(2 * batch.microbatches * parameters.virtual_stages * tokens * shape.hidden * _HALF / tensor)
    # Each norm's result is gathered from the tensor parallel ranks and kept for the weights' gradients.
    gathered = 2 * tokens * shape.hidden * _HALF * (1 - 1 / tensor)
    return StageActivations(kept=kept, layers=made.layers + round(gathered), loss=round(loss), offloaded=0)
