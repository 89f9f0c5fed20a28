"""Lower bounds of seconds and bytes, from closed forms, for configurations that are still partly open.

A rank computes at least its share of the operations. A pipeline fills and empties. Nothing hides the sums of
tensor parallelism. Gradients take their time on the links, and state has its bytes. A simulation finds more,
never less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group
from smp_config.schedules import TRAITS
from smp_records.rate_card import RateCard, sent_bytes

if TYPE_CHECKING:
    from smp_estimator.planning.search.space import Configuration, Space


@dataclass(frozen=True)
class Needs:
    """The needs of a model, independent of the degrees.

    Attributes:
        forward, backward: seconds of one sample through the whole model on one GPU, at the assumed rates.
        again: seconds that checkpointing adds in backward.
        of_microbatch: seconds of forward and backward of a microbatch of so many samples through the whole model
            on one GPU, if more is known of it than of a sample. Not used with tensor parallelism.
        update: seconds in which one GPU updates all parameters.
        sums_last: gradients are summed over replicas in the last microbatch's backward pass, not before.
        launches: seconds of each microbatch through the whole model that no degree divides: starting its kernels.
        elements: parameters.
        kept_bytes: per element, of parameters and their gradients.
        updated_bytes: per element, of master copies and optimizer state.
        layers: identical layers; stages have whole ones. 0: the time is that of the slowest stage, which has at
            least an even share.
        layer_elements: of all trained layers, at least.
        summed_bytes: per element, of a gradient on its way to other ranks.
        element_bytes: of a parameter on its way.
        once_in_pipeline: stages gather their parameters once in a step, and sum their gradients once.
        gathers: of sharded parameters in a backward pass and the forward pass before it, at least.
        tensor_bytes: of one sample, of all tensors that tensor parallelism sums up in forward and backward.
        tensor_bytes_again: of these, the bytes that checkpointing adds.
        activation_bytes: of one sample, the least bytes kept for backward with the first of the space's
            ``memories``.
    """

    forward: float
    backward: float
    again: float = 0.0
    of_microbatch: Callable[[int], tuple[float, float]] | None = None
    update: float = 0.0
    sums_last: bool = False
    launches: float = 0.0
    elements: int = 0
    kept_bytes: float = 8.0
    updated_bytes: float = 8.0
    layers: int = 1
    layer_elements: int = 0
    summed_bytes: float = 4.0
    element_bytes: float = 4.0
    gathers: float = 2.0
    once_in_pipeline: bool = False
    tensor_bytes: float = 0.0
    tensor_bytes_again: float = 0.0
    activation_bytes: float = 0.0


def least_state(needs: Needs, at: Configuration, replicas: int) -> float:
    """Return the bytes of state on a rank, divided evenly; tensors that are not divided only add to it."""
    model_parallel = (at.pipeline or 1) * (at.tensor or 1)
    elements = needs.elements / model_parallel
    whole = needs.kept_bytes + needs.updated_bytes
    if at.sharded > 1:
        return elements * whole / at.sharded
    if at.state == "optimizer":
        return elements * (needs.kept_bytes + needs.updated_bytes / (replicas * (at.tensor or 1)))
    if at.state is not None:
        return elements * whole
    # If no way to store state is chosen yet, assume that all replicas share it, the smallest case.
    return elements * whole / max(1, replicas)


def least_bytes(needs: Needs, space: Space, at: Configuration) -> float:
    """Return the least bytes on the fullest rank: its state, and the known activations of one microbatch."""
    if at.tensor is None:
        return 0.0
    held = least_state(needs, at, space.replicas(at))
    keeps_activations = at.memory == space.memories[0]
    if keeps_activations and at.microbatches is not None:
        stages = at.pipeline or 1
        model_parallel = stages * at.tensor
        held += needs.activation_bytes * space.batch(at) / at.microbatches / model_parallel
    return held


def least_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Return the least seconds of an optimizer step: the longer of pipeline computation and data parallel traffic."""
    if at.tensor is None:  # the samples that a replica reads at a time are open, too
        return space.samples * (needs.forward + needs.backward) / space.world
    stages, count = at.pipeline or 1, at.microbatches or 1
    samples = space.batch(at)
    forward, backward, work = _passes(needs, samples, at)
    seconds = count * work * (forward + backward)
    seconds += _tensor_parallel_seconds(needs, space, card, at)
    seconds += needs.launches * count
    microbatches = at.microbatches or samples
    active = min(at.active or microbatches, microbatches)
    # Gradients of weights may be computed in any moment: before a stage can begin stand forward passes alone.
    waits_for_forward = forward > 0 and _may_split_backward(space, at)
    waiting = forward / (forward + backward) if waits_for_forward else 1.0
    passes = space.accumulation * _pipelined(seconds, stages, microbatches, active, waiting)
    is_summed_whole = stages == 1 and at.state is not None and at.sharded == 1
    if needs.sums_last and is_summed_whole:
        passes = max(passes, passes - work * backward + _summing_seconds(needs, space, card, at))
    return max(passes, _data_seconds(needs, space, card, at)) + _update_seconds(needs, space, at)


def _passes(needs: Needs, samples: int, at: Configuration) -> tuple[float, float, float]:
    """Return the seconds of a forward and of a backward pass through all stages, and by what a microbatch multiplies them."""
    count = at.microbatches or 1  # one if the number is open: more of them take longer
    tensor = at.tensor or 1
    if needs.of_microbatch is not None and tensor == 1:
        forward, backward = needs.of_microbatch(samples // count)
        return forward, backward, 1.0
    again = needs.again if at.recomputes else 0.0
    return needs.forward, needs.backward + again, samples / count / tensor


def _tensor_parallel_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Return the seconds in which tensor parallel ranks exchange the activations of all samples that a replica reads."""
    tensor = at.tensor or 1
    if tensor == 1 or not needs.tensor_bytes:
        return 0.0
    again = needs.tensor_bytes_again if at.recomputes else 0.0
    size = space.batch(at) * (needs.tensor_bytes + again) * _whole(needs, at.pipeline or 1)
    return card.seconds_of_traffic(sent_bytes("all_reduce", tensor, size), *space.ring(at, Group.TP))


def _may_split_backward(space: Space, at: Configuration) -> bool:
    """Return whether a schedule that is still possible computes gradients of weights apart from those of inputs."""
    schedules = space.schedules if at.schedule is None else (at.schedule,)
    return any(TRAITS[schedule].splits_backward for schedule in schedules)


def _summing_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Return the seconds that gradients need on their links until every rank has the sum of its own part."""
    elements = needs.layer_elements * _whole(needs, at.pipeline or 1) / ((at.pipeline or 1) * (at.tensor or 1))
    kind = "reduce_scatter" if at.state == "optimizer" else "all_reduce"
    sent = sent_bytes(kind, space.replicas(at), elements * needs.summed_bytes)
    return card.seconds_of_traffic(sent, *space.ring(at, Group.RDP))


def _update_seconds(needs: Needs, space: Space, at: Configuration) -> float:
    """Return the seconds of an even part of the update; an open state counts as sharded over all replicas."""
    divides = at.state not in (None, "optimizer")
    shards = at.sharded if divides else space.replicas(at)
    model_parallel = (at.pipeline or 1) * (at.tensor or 1)
    return needs.update / (model_parallel * shards)


def _pipelined(seconds: float, stages: int, microbatches: int, active: int, waiting: float) -> float:
    """Return the seconds that ``stages`` need for ``seconds`` of computation, for any division among them.

    Stage i of a chain cannot begin before the earlier ones have passed a microbatch on, and these come last in
    backward. Let t_i be the times of a microbatch, and w the part of each earlier stage that is waited for. Then
    the step takes at least m · t_i + w · (t_0 + … + t_(i−1)). The division with the least maximum of these gives
    T · w / (m · (1 − (1 − w/m)^p)). Of ``active`` microbatches in flight each takes the part w of the whole
    chain.
    """
    filling = seconds * waiting / (microbatches * (1.0 - (1.0 - waiting / microbatches) ** stages))
    return max(filling, waiting * seconds / active)


def _data_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Return the seconds that gradients and sharded parameters need on their links, without other traffic."""
    replicas = space.replicas(at)
    if replicas == 1 or at.state is None:
        return 0.0
    elements = needs.layer_elements * _whole(needs, at.pipeline or 1) / ((at.pipeline or 1) * (at.tensor or 1))
    if at.sharded == 1:
        again = needs.element_bytes if at.state == "optimizer" else needs.summed_bytes
        sent = sent_bytes("all_gather", replicas, elements * (needs.summed_bytes + again))
        return card.seconds_of_traffic(sent, *space.ring(at, Group.RDP))
    is_once = needs.once_in_pipeline and (at.pipeline or 1) > 1
    gathered = elements * ((1 if is_once else needs.gathers) * needs.element_bytes + needs.summed_bytes)
    passes = 1 if is_once else space.accumulation * (at.microbatches or 1)
    inside = passes * sent_bytes("all_gather", at.sharded, gathered)
    seconds = card.seconds_of_traffic(inside, *space.ring(at, Group.SHARD))
    copies = replicas // at.sharded
    averaged = sent_bytes("all_reduce", copies, elements / at.sharded * needs.summed_bytes)
    return max(seconds, card.seconds_of_traffic(averaged, *space.ring(at, Group.REPLICA)))


def _whole(needs: Needs, stages: int) -> float:
    """Return the least part of an even share of the layers that every stage has: stages have whole layers."""
    return needs.layers // stages * stages / needs.layers if needs.layers else 1.0


__all__ = ["Needs", "least_bytes", "least_seconds", "least_state"]
