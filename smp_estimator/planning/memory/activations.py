"""Bytes of activations: those that a layer keeps for backward, checkpoints, and those of the loss.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", sections 4 and 5:
a layer in half precision keeps seq·batch·hidden·(34 + 5·heads·seq/hidden) bytes; with tensor parallelism t
(10 + 24/t + 5·heads·seq/(hidden·t)), with the rest sliced as well (34/t + …). The functions here add the same terms
up one by one, so that they hold for fp32, autocast, other MLP widths, gated MLPs and models without dropout too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_estimator.planning.request import SELECTIVE

if TYPE_CHECKING:
    from smp_estimator.planning.context import ContextShare
    from smp_estimator.planning.model_shape import ModelShape
    from smp_estimator.planning.request import Workload


@dataclass(frozen=True)
class LayerCost:
    """The sizes and degrees that layers are computed with.

    Attributes:
        samples: that pass through the layer together, of the whole tensor parallel group.
        element_bytes: of one activation: 2 or 4.
        residual_bytes: of one element of the input of a layer or norm; None: as ``element_bytes``.
        tensor: tensor parallel degree.
        sliced: activations that tensor parallelism alone does not divide are sliced too (``optimize: memory``).
        context: the ranks that share each sequence out; None: each rank has whole ones.
    """

    samples: int
    element_bytes: int
    tensor: int = 1
    sliced: bool = True
    context: ContextShare | None = None
    residual_bytes: int | None = None

    @property
    def residual(self) -> int:
        """Return the bytes of one element of the input of a layer or norm."""
        return self.element_bytes if self.residual_bytes is None else self.residual_bytes

    @property
    def gradient(self) -> int:
        """Return the bytes of one element of a matrix's fresh gradient, with its copy in the type of the matrix."""
        return self.element_bytes if self.residual == self.element_bytes else self.element_bytes + self.residual

    def tokens(self, shape: ModelShape) -> int:
        """Return the tokens that pass through together on a rank."""
        degree = 1 if self.context is None else self.context.degree
        return self.samples * -(-shape.sequence // degree)


def layer_bytes(shape: ModelShape, cost: LayerCost, *, fused_attention: bool = True, dropout: bool = True) -> int:
    """Return the bytes that one layer keeps between its forward and its backward.

    Hidden-wide tensors that tensor parallelism alone does not divide: the inputs of both norms, of the
    attention's and the MLP's first matrix. Hidden-wide tensors that it divides: query, key, value and the input
    of the output matrix. MLP-wide tensors: input and output of the activation function, in a gated MLP two more.
    Dropout keeps masks of one byte. Attention that is not fused keeps its map (once more after dropout, with a
    mask). Fused attention keeps one fp32 number per token and head.
    """
    tokens, b = cost.tokens(shape), cost.element_bytes
    whole = 2 * shape.hidden * (b + cost.residual)
    if dropout:
        # Two masks of one byte: behind the attention, and behind the MLP.
        whole += 2 * shape.hidden
    of_mlp = 4 if shape.gated else 2
    divided = (4 * shape.hidden + of_mlp * shape.width) * b
    if cost.context is not None:
        # Two fp32 numbers per token and head: results of blocks are merged by them, and backward computes the map again.
        divided += 8 * shape.heads
    elif fused_attention:
        # One fp32 number per token and head, from which backward computes the map again.
        divided += 4 * shape.heads
    else:
        # With dropout: the map before it, the map after it, and a mask of one byte.
        of_map = 2 * b + 1 if dropout else b
        divided += shape.heads * shape.sequence * of_map
    parts = cost.tensor if cost.sliced else 1
    return round(tokens * (whole / parts + divided / cost.tensor))


def backward_bytes(shape: ModelShape, cost: LayerCost) -> int:
    """Return the most bytes that the backward of a layer needs at once, beyond the kept activations.

    That moment is inside the MLP. It has the gradients of the layer's output and of the activation function's
    input (its output's takes the place of a kept tensor; in a gated MLP both branches count). It also has the
    fresh gradient of one matrix before it is added to the kept one. With sliced activations the gathered input of
    a matrix is whole for a moment.
    """
    tokens, b = cost.tokens(shape), cost.element_bytes
    gradients = tokens * (cost.residual * shape.hidden + b * (3 if shape.gated else 1) * shape.width)
    gradients += cost.gradient * shape.hidden * shape.width
    gathered = b * tokens * shape.hidden if cost.sliced and cost.tensor > 1 else 0
    in_mlp = round(gradients / cost.tensor + gathered)
    if cost.context is None:
        return in_mlp
    # Another moment is inside attention: the gradient of its output, and the buffers of what travels.
    of_output = round(cost.residual * tokens * shape.hidden / cost.tensor)
    return max(in_mlp, of_output + cost.context.buffer_bytes(tokens, b))


def checkpoint_bytes(shape: ModelShape, cost: LayerCost) -> int:
    """Return the bytes of the input of one checkpointed unit.

    That is 2·seq·batch·hidden bytes in half precision, sliced if activations are.
    """
    return round(cost.tokens(shape) * shape.hidden * cost.residual / (cost.tensor if cost.sliced else 1))


def selective_bytes(shape: ModelShape, cost: LayerCost, *, compiled: bool = False) -> int:
    """Return the bytes that one layer keeps under selective checkpointing: its input, and the results of some operations.

    Kept are the results of every second matrix product and of attention, as by PyTorch's ``CheckpointPolicy`` with the list that
    torchtitan uses for single operations; everything else is computed again. The products are those of queries, keys, values,
    attention's output, and the MLP's, in this order. A compiled layer does not keep the last product, which no gradient reads.
    With tensor parallelism, sums over its ranks are kept too, divided as the layer's input.
    """
    tokens, b = cost.tokens(shape), cost.element_bytes
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    # By every second product: (elements, divided by tensor parallelism).
    products = [(queries, True), (keys, True), (keys, True), (shape.hidden, False)]
    products += [(shape.width, True)] * (2 if shape.gated else 1) + [(shape.hidden, False)]
    sums = 2 if cost.tensor > 1 else 0
    if compiled:
        products[-1] = (0.0, False)
        sums = min(sums, 1)
    kept = sum(elements / (cost.tensor if divided else 1) for elements, divided in products[::2])
    parts = cost.tensor if cost.sliced else 1
    kept += queries / cost.tensor + sums * shape.hidden / parts
    return round(tokens * (kept * b + 4 * shape.heads / cost.tensor)) + checkpoint_bytes(shape, cost)


def loss_bytes(shape: ModelShape, cost: LayerCost, *, distributed: bool = False, fp32_loss: bool = False) -> int:
    """Return the bytes of the final norm's input and output, of the logits, and of the cross entropy's tensors.

    Four tensors of tokens × vocabulary are alive at once: the logits, the log-softmax that the loss keeps, its
    gradient, and the gradient of the logits. Each has the width of the activations. If the script converts the
    logits to fp32, the last three have 4 bytes. A moment later the logits and their gradient are left, and the
    fresh gradient of the output matrix exists. With a distributed embedding the gathered gradients of all logits
    exist too. The larger moment counts.
    """
    tokens, b, t = cost.tokens(shape), cost.element_bytes, cost.tensor if distributed else 1
    each = 4 if fp32_loss else b
    in_loss = tokens * (b + 3 * each) / t
    gathered = b if t > 1 else 0
    in_matrix = tokens * ((b + each) / t + gathered) + shape.hidden * cost.gradient / t
    return round(shape.vocabulary * max(in_loss, in_matrix) + tokens * shape.hidden * (b + cost.residual))


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one pipeline stage.

    Attributes:
        kept: activations (or checkpoints) of all microbatches in flight, on the GPU.
        layers: what is needed beside them in the backward pass of a layer, and for the layers that are recomputed.
        loss: what is needed beside them at the loss; 0 where the stage has none.
        offloaded: checkpoints that wait in the memory of the host.
    """

    kept: int
    layers: int
    loss: int
    offloaded: int

    @property
    def working(self) -> int:
        """Return the larger need of the two moments; they never coincide."""
        return max(self.layers, self.loss)

    @property
    def total(self) -> int:
        """Return the bytes on the GPU."""
        return self.kept + self.working


def stage_activations(
    shape: ModelShape,
    cost: LayerCost,
    workload: Workload,
    *,
    layers: int,
    in_flight: int,
    has_loss: bool,
    distributed_loss: bool,
    horizon: int | None,
) -> StageActivations:
    """Return the activations of a stage with ``layers`` layers and ``in_flight`` microbatches.

    With checkpointing the unit that is recomputed needs its layers' activations on top of the kept inputs.
    Recompute and loss never happen at once, so the larger counts.

    Args:
        horizon: ``activation_loading_horizon`` when checkpoints are offloaded, else None. The GPU then has the
            checkpoint in use and those of the next ``horizon`` tasks. A task is the forward or backward pass of
            one checkpointed unit. This holds with a pipeline too: only backward passes follow the last
            microbatches of a step.
    """
    layer = layer_bytes(shape, cost, fused_attention=workload.fused_attention, dropout=workload.dropout)
    backward = backward_bytes(shape, cost)
    in_fp32 = workload.fp32_loss or workload.autocast
    loss = loss_bytes(shape, cost, distributed=distributed_loss, fp32_loss=in_fp32) if has_loss else 0
    group = workload.checkpointed_layers(layers)
    if not group:
        return StageActivations(kept=layer * layers * in_flight, layers=backward, loss=loss, offloaded=0)
    units = -(-layers // group)
    unit = checkpoint_bytes(shape, cost)
    if workload.activation_checkpointing == SELECTIVE:
        unit = min(layer, selective_bytes(shape, cost, compiled=workload.compiled))
    # What a unit keeps is a part of what it has when it is computed again.
    again = layer * group - unit
    kept = unit * units * in_flight
    on_gpu = kept
    if horizon is not None:
        on_gpu = min(kept, unit * (1 + horizon))
    offloaded = kept if horizon is not None else 0
    return StageActivations(kept=on_gpu, layers=again + backward, loss=loss, offloaded=offloaded)
