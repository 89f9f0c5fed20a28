"""Seconds of the kernels of a step, by kind: matrix products, attention, and kernels that only move memory.

Each kind has a rate of its own (``KernelRates``). Operations and bytes are counted from the model's shape:

* Matrix products: 2 operations per weight and token in forward, 4 in backward; what is checkpointed, again. Those of the layers
  may be in float8; the output matrix is not.
* Attention of causal sequences: 2·s·hidden operations per token in forward, half of whole maps. Backward has five products instead
  of two. It is never in float8.
* Elementwise work: bytes read and written by norms, rotations, activation functions and sums; more if layers are not compiled, as
  each operation then reads and writes for itself. Float8 reads each operand twice more, and writes it.
* Context parallelism of PyTorch merges the results of blocks, and sums their gradients, in fp32.
* The loss, the optimizer's step, and FSDP2's copies into and out of its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_estimator.planning.memory.fsdp2 import share_of_context

if TYPE_CHECKING:
    from smp_estimator.planning.batches import Batches
    from smp_estimator.planning.rates.kernel_rates import KernelRates
    from smp_estimator.planning.request import Request


#: Adam reads four and writes three fp32 numbers for each parameter.
UPDATED_BYTES = 28


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of a rank's kernels in one optimizer step.

    Attributes:
        forward: of the layers and the output matrix, in forward.
        backward: the same in backward, with what is computed again.
        update: the optimizer's step, and copies of FSDP2.
    """

    forward: float
    backward: float
    update: float


def recomputed_part(request: Request) -> float:
    """Return the part of the layers' matrix products that backward computes again."""
    workload, shape = request.workload, request.shape
    if workload.activation_checkpointing is None:
        return 0.0
    if workload.activation_checkpointing != "selective":
        return 1.0
    products = _products(request)
    return sum(products[1::2]) / sum(products) if shape.has_layers else 1.0


def _products(request: Request) -> list[float]:
    """Return the weights of a layer's matrix products in the order of forward."""
    shape = request.shape
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    of_attention = [shape.hidden * queries, shape.hidden * keys, shape.hidden * keys, shape.hidden * queries]
    return of_attention + [float(shape.hidden * shape.width)] * (3 if shape.gated else 2)


def kernel_seconds(
    request: Request, batch: Batches, rates: KernelRates, peak: float, memory_rate: float
) -> KernelSeconds:
    """Return the seconds of a rank's kernels.

    Args:
        peak: operations per second of the GPU at most, in half precision.
        memory_rate: bytes per second of its memory at most.
    """
    shape, parameters, workload = request.shape, request.parameters, request.workload
    tensor, stages = parameters.tensor_parallel_degree, parameters.pipeline_parallel_degree
    tokens = batch.group_batch * batch.sequence * workload.accumulation / parameters.context_parallel_degree
    share = tokens / (tensor * stages)
    moved = memory_rate * rates.memory
    again = recomputed_part(request)
    float8 = workload.float8 or parameters.fp8
    product = 2 * share * shape.layers * sum(_products(request))
    product /= 2 * peak * rates.matrix_float8 if float8 else peak * rates.matrix
    attention = 2 * share * shape.layers * batch.sequence * shape.hidden / (peak * rates.attention)
    head = 2 * share * shape.vocabulary * shape.hidden / (peak * rates.matrix)
    elementwise = share * shape.layers * _elementwise_bytes(request, float8=float8) / moved
    loss = share * shape.vocabulary * (10 if workload.compiled_loss else 34) / moved
    # Attention's result is kept by selective checkpointing.
    attention_again = 1.0 if workload.activation_checkpointing not in (None, "selective") else 0.0
    elementwise_again = 0.0 if workload.activation_checkpointing is None else 1.0
    merged, summed = _merging(request, tokens / stages, moved)
    forward = product + attention + merged + elementwise + head + loss / 2
    backward = (2 + again) * product + (2.5 + attention_again) * attention + summed + attention_again * merged
    backward += (2 + elementwise_again) * elementwise + 2 * head + loss / 2
    held = shape.parameters / (tensor * stages)
    shards = parameters.sharded_data_parallel_degree
    # Gathers write bf16 and copy it once more, sums are copied into fp32.
    update = UPDATED_BYTES * held / shards
    if shards > 1:
        gathers = 1 if stages > 1 else 2
        passes = 1 if stages > 1 else workload.accumulation * parameters.microbatches
        update += passes * (gathers * 6 + 6) * held
    return KernelSeconds(forward, backward, update / moved)


def _merging(request: Request, tokens: float, moved: float) -> tuple[float, float]:
    """Return the seconds in which the layers of a rank merge what blocks of keys gave, in forward and in backward.

    Args:
        tokens: of a rank in a step, divided by the stages.
        moved: bytes per second.
    """
    share = share_of_context(request)
    if share is None:
        return 0.0, 0.0
    compiled = request.workload.compiled or request.parameters.compile
    forward, backward = share.merged_bytes(round(tokens * request.shape.layers), compiled=compiled)
    return forward / moved, backward / moved


def _elementwise_bytes(request: Request, *, float8: bool) -> float:
    """Return the bytes that elementwise kernels of a layer move for a token, in forward."""
    shape = request.shape
    hidden, width = shape.hidden, shape.width
    heads = (shape.heads + shape.key_heads) * shape.head_width
    inner = (3 if shape.gated else 2) * width
    if request.workload.compiled or request.parameters.compile:
        # Norms read and write; the first sum is part of the second norm; rotations, and the activation function.
        moved = 2 * (9 * hidden + 2 * heads + inner)
    else:
        # Norms and rotations in fp32, one operation after the other.
        moved = (2 * 36 + 12) * hidden + 20 * heads + 10 * width
    if float8:
        # The operands of four products: read for the largest value, read and written to convert them.
        moved += (2 + 2 + 1) * (3 * hidden + width)
    return float(moved)
