"""Models of scripts that cut sequences themselves: a call gets this rank's slices, zig-zag, and returns slices.

Inside the model they are whole sequences, as everywhere: masks, positions and labels are those of the whole.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.inputs import WHOLE, SequenceInputs, digest
from smp_runtime.context.layout import SequenceLayout, zigzag
from smp_runtime.context.loaded_batches import CutBatches, LoadedBatches
from smp_runtime.context.proofs.position_wise import prepare
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import argument_tensors, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from smp_runtime.job.ranks import Ranks


def run_on_slices(model: nn.Module, ranks: Ranks, method: str) -> None:
    """Let a model's calls take and return this rank's slices of sequences; no effect without context parallelism.

    Args:
        method: how keys and values travel in attention.
    """
    inputs = SequenceInputs.of(ranks)
    if inputs is None:
        return
    group, batches, cuts = ContextGroup.of(ranks), LoadedBatches.of(ranks), CutBatches.of(ranks)
    group.method = method
    prepare(model.modules())
    forward: Callable[..., Any] = model.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        layout = _layout_of((args, kwargs), group)
        told = inputs.agree(layout.length, lambda: _describe((args, kwargs), layout, batches, cuts, group.rank))
        _require_one_batch(told, ranks.members(Group.CONTEXT), layout.length)

        def wrap(name: str, value: Any) -> Any:
            stays_whole = any(word in name for word in WHOLE)
            return map_leaves(lambda leaf: _wrap(leaf, layout, group, stays_whole=stays_whole), value)

        placed = zip(itertools.chain(names, itertools.repeat("")), args, strict=False)
        wrapped = [wrap(name, value) for name, value in placed]
        named = {name: wrap(name, value) for name, value in kwargs.items()}
        return map_leaves(lambda leaf: _unwrap(leaf, layout), forward(*wrapped, **named))

    model.forward = run


def _layout_of(given: Any, group: ContextGroup) -> SequenceLayout:
    """Return the layout of the sequence that the slices in a call's arguments belong to."""
    tensors = argument_tensors(given)
    held = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}
    if len(held) != 1 or any(count % 2 for count in held):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"
        raise SMPUserError(
            f"context_parallel_degree is {group.size}, and the model was called with tensors of the shapes {shapes}: pass tensors "
            f"[batch, tokens, …] with the same number of tokens, chunks r and {2 * group.size - 1} - r of each sequence's "
            f"{2 * group.size} equal chunks, and leave other masks out",
            code="SMP303",
        )
    return zigzag(held.pop() * group.size, group.size)


@dataclass(frozen=True)
class _Told:
    """What a rank tells of a call.

    Attributes:
        slices: numbers of its slices; none of those that hold one value only, which are equal without an error.
        count: how many batches it has loaded.
        loaded: numbers of the last one; none if it has no whole sequences.
        cut: for each slice, numbers of the batches that it may have been cut from, as far as they were seen.
    """

    slices: list[float]
    count: int
    loaded: list[float]
    cut: list[list[list[float]]]


def _describe(given: Any, layout: SequenceLayout, batches: LoadedBatches, cuts: CutBatches, rank: int) -> _Told:
    tensors = [tensor for tensor in argument_tensors(given) if tensor.dim() > 1]
    slices = [tensor for tensor in tensors if _varies(tensor)]
    return _Told(
        _numbers(slices),
        batches.count,
        _numbers(batches.with_tokens(layout.length)),
        [[digest([whole]) for whole in wholes] for wholes in cuts.take(tensors, layout, rank)],
    )


def _numbers(tensors: list[torch.Tensor]) -> list[float]:
    return digest(tensors) if tensors else []


def _varies(tensor: torch.Tensor) -> bool:
    return bool((tensor != tensor.flatten()[0]).any()) if tensor.numel() else False


def _require_one_batch(told: list[_Told], members: Sequence[int], length: int) -> None:
    """Raise an error unless the ranks of a group hold different slices of one batch.

    The slices cannot show whether they belong together. The batches that loaders have returned, and that were cut, can.
    """
    size, first = len(members), told[0] if told else None
    for rank, theirs in zip(members[1:], told[1:], strict=False):
        assert first is not None
        if theirs.slices and all(each.slices == theirs.slices for each in told):
            raise SMPUserError(
                f"context_parallel_degree is {size}, and the ranks {members} called the model with the same tokens: each rank must "
                f"cut its batch, and pass chunks r and {2 * size - 1} - r of each sequence's {2 * size} equal chunks, where r is "
                "tsm.state.cp_rank",
                code="SMP310",
            )
        # Other counts: a thread of one rank has loaded ahead.
        if theirs.count == first.count and theirs.loaded and first.loaded and theirs.loaded != first.loaded:
            raise SMPUserError(
                f"context_parallel_degree is {size}, so the ranks {members} share each sequence out, but rank {rank} loaded "
                f"another batch with sequences of {length} tokens than rank {members[0]}: give each sampler "
                "num_replicas=tsm.state.world_size // n and rank=tsm.state.rank // n, where n is tsm.state.tp_size * "
                "tsm.state.cp_size, and all ranks of a group one seed for the order",
                code="SMP310",
            )
        if _cut_from_others(theirs.cut, first.cut):
            raise SMPUserError(
                f"context_parallel_degree is {size}, so the ranks {members} share each sequence out, but rank {rank} cut "
                f"another batch with sequences of {length} tokens than rank {members[0]}: read or draw the same batch on all ranks "
                "of a group, by tsm.state.rank // n in place of the rank, where n is tsm.state.tp_size * tsm.state.cp_size",
                code="SMP310",
            )


def _cut_from_others(one: list[list[list[float]]], other: list[list[list[float]]]) -> bool:
    """Return whether a slice of two ranks is known to come from different batches: none that was seen can be that of both."""
    seen = [(mine, theirs) for mine, theirs in zip(one, other, strict=False) if mine and theirs]
    return any(all(numbers not in theirs for numbers in mine) for mine, theirs in seen)


def _wrap(leaf: Any, layout: SequenceLayout, group: ContextGroup, *, stays_whole: bool) -> Any:
    """Return the sequence of a slice; whole if it is one of those that attention reads whole."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return leaf
    return group.gather(leaf, 1, layout) if stays_whole else ShardedSequence(leaf, 1, layout, group)


def _unwrap(leaf: Any, layout: SequenceLayout) -> Any:
    """Return the slice of a result; the whole of one that has other positions."""
    if not isinstance(leaf, ShardedSequence):
        return leaf
    return leaf.local if leaf.sequence_layout == layout else leaf.whole("a result with other positions")
