"""What no configuration can beat: seconds and bytes from closed forms, for configurations of which some is still open.

A rank computes at least its share of the operations, a pipeline fills and empties, sums of tensor parallelism hide behind
nothing, gradients take their time on the links, and state has its bytes. Whoever simulates finds more, never less.
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
    """What a model needs, whatever the degrees.

    Attributes:
        forward, backward: seconds of one sample through the whole model on one GPU, at the rates that are assumed.
        again: what checkpointing adds in backward.
        of_microbatch: seconds of forward and backward of a microbatch of so many samples through the whole model on one GPU,
            where more is known of it than of a sample; not of what tensor parallelism divides.
        update: seconds in which one GPU updates all parameters.
        sums_last: gradients are summed over replicas in the last microbatch's backward pass, not before.
        launches: seconds of each microbatch through the whole model that no degree divides: starting its kernels.
        elements: parameters.
        kept_bytes: per element, of parameters and their gradients.
        updated_bytes: per element, of master copies and optimizer state.
        layers: that are alike, of which stages hold whole ones; 0: the time is that of the slowest stage, which has no less than
            an even share.
        layer_elements: of all of them that are trained, at least.
        summed_bytes: per element, of a gradient on its way to other ranks.
        element_bytes: of a parameter on its way.
        gathers: of sharded parameters in a backward pass and the forward pass before it, at least.
        tensor_bytes: of one sample, of all tensors that tensor parallelism sums up in forward and backward.
        tensor_bytes_again: of these, what checkpointing adds.
        activation_bytes: of one sample, that the first of a space's ways to hold activations keeps for backward, at least.
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
    tensor_bytes: float = 0.0
    tensor_bytes_again: float = 0.0
    activation_bytes: float = 0.0


def least_state(needs: Needs, at: Configuration, replicas: int) -> float:
    """Bytes of state on a rank, divided evenly; tensors that are not divided only add to it."""
    elements = needs.elements / ((at.pipeline or 1) * (at.tensor or 1))
    whole = needs.kept_bytes + needs.updated_bytes
    if at.sharded > 1:
        return elements * whole / at.sharded
    if at.state == "optimizer":
        return elements * (needs.kept_bytes + needs.updated_bytes / (replicas * (at.tensor or 1)))
    # Where nothing is chosen, as if it were shared over all.
    return elements * whole / (1 if at.state is not None else max(1, replicas))


def least_bytes(needs: Needs, space: Space, at: Configuration) -> float:
    """Bytes that the fullest rank holds at least: state, and the activations of one microbatch as far as they are known."""
    if at.tensor is None:
        return 0.0
    held = least_state(needs, at, space.replicas(at))
    if at.memory == space.memories[0] and at.microbatches is not None:
        model_parallel = (at.pipeline or 1) * (at.tensor or 1)
        held += needs.activation_bytes * space.batch(at) / at.microbatches / model_parallel
    return held


def least_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Seconds of an optimizer step at least: the longer of what a pipeline computes and what data parallelism sends."""
    if at.tensor is None:  # what a replica reads at a time is open, too
        return space.samples * (needs.forward + needs.backward) / space.world
    stages, tensor = at.pipeline or 1, at.tensor
    samples, count = space.batch(at), at.microbatches or 1
    again = at.recomputes
    forward, backward = needs.forward, needs.backward + (needs.again if again else 0.0)
    each = samples / count / tensor  # as one microbatch where that is open: more of them take longer
    if needs.of_microbatch is not None and tensor == 1:
        (forward, backward), each = needs.of_microbatch(samples // count), 1.0
    seconds = count * each * (forward + backward)
    if tensor > 1 and needs.tensor_bytes:
        size = samples * (needs.tensor_bytes + (needs.tensor_bytes_again if again else 0.0)) * _whole(needs, stages)
        seconds += card.seconds_of_traffic(sent_bytes("all_reduce", tensor, size), *space.ring(at, Group.TP))
    seconds += needs.launches * count
    microbatches = at.microbatches or samples
    active = min(at.active or microbatches, microbatches)
    # Gradients of weights may be computed in any moment: before a stage can begin stand forward passes alone.
    schedules = space.schedules if at.schedule is None else (at.schedule,)
    splits = any(TRAITS[schedule].splits_backward for schedule in schedules)
    waiting = forward / (forward + backward) if splits and forward else 1.0
    passes = space.accumulation * _pipelined(seconds, stages, microbatches, active, waiting)
    if needs.sums_last and stages == 1 and at.state is not None and at.sharded == 1:
        passes = max(passes, passes - each * backward + _summing_seconds(needs, space, card, at))
    return max(passes, _data_seconds(needs, space, card, at)) + _update_seconds(needs, space, at)


def _summing_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Seconds in which gradients go over their links until every rank has the sum of what it updates."""
    elements = needs.layer_elements * _whole(needs, at.pipeline or 1) / ((at.pipeline or 1) * (at.tensor or 1))
    kind = "reduce_scatter" if at.state == "optimizer" else "all_reduce"
    sent = sent_bytes(kind, space.replicas(at), elements * needs.summed_bytes)
    return card.seconds_of_traffic(sent, *space.ring(at, Group.RDP))


def _update_seconds(needs: Needs, space: Space, at: Configuration) -> float:
    """Seconds of an even part of the update; as if state were shared over all where nothing is chosen."""
    shards = at.sharded if at.state not in (None, "optimizer") else space.replicas(at)
    return needs.update / ((at.pipeline or 1) * (at.tensor or 1) * shards)


def _pipelined(seconds: float, stages: int, microbatches: int, active: int, waiting: float) -> float:
    """Seconds in which ``stages`` compute what takes ``seconds`` on one of them, however it is divided.

    Stage i of a chain cannot begin before those before it have passed a microbatch on, and these come last in backward. With
    times t_i of a microbatch, of which the part w of each stage before is waited for, the step takes m · t_i + w · (t_0 + … +
    t_(i−1)) or more, and the division for which the largest of these is least gives T · w / (m · (1 − (1 − w/m)^p)). Of
    ``active`` microbatches in flight each takes the part w of the whole chain.
    """
    filling = seconds * waiting / (microbatches * (1.0 - (1.0 - waiting / microbatches) ** stages))
    return max(filling, waiting * seconds / active)


def _data_seconds(needs: Needs, space: Space, card: RateCard, at: Configuration) -> float:
    """Seconds in which gradients and sharded parameters go over their links, if nothing else did."""
    replicas = space.replicas(at)
    if replicas == 1 or at.state is None:
        return 0.0
    elements = needs.layer_elements * _whole(needs, at.pipeline or 1) / ((at.pipeline or 1) * (at.tensor or 1))
    if at.sharded == 1:
        again = needs.element_bytes if at.state == "optimizer" else needs.summed_bytes
        sent = sent_bytes("all_gather", replicas, elements * (needs.summed_bytes + again))
        return card.seconds_of_traffic(sent, *space.ring(at, Group.RDP))
    gathered = elements * (needs.gathers * needs.element_bytes + needs.summed_bytes)
    passes = space.accumulation * (at.microbatches or 1)
    inside = passes * sent_bytes("all_gather", at.sharded, gathered)
    seconds = card.seconds_of_traffic(inside, *space.ring(at, Group.SHARD))
    copies = replicas // at.sharded
    averaged = sent_bytes("all_reduce", copies, elements / at.sharded * needs.summed_bytes)
    return max(seconds, card.seconds_of_traffic(averaged, *space.ring(at, Group.REPLICA)))


def _whole(needs: Needs, stages: int) -> float:
    """Part of an even share of the layers that every stage has at least: stages hold whole ones."""
    return needs.layers // stages * stages / needs.layers if needs.layers else 1.0


__all__ = ["Needs", "least_bytes", "least_seconds", "least_state"]
