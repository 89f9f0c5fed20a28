"""Models of scripts that cut sequences themselves: a call gets this rank's slices, zig-zag, and returns slices.

Inside the model they are whole sequences, as everywhere: masks, positions and labels are those of the whole.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.inputs import WHOLE, SequenceInputs, digest
from smp_runtime.context.layout import SequenceLayout, zigzag
from smp_runtime.context.loaded_batches import LoadedBatches
from smp_runtime.context.position_wise import prepare
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
    group, batches = ContextGroup.of(ranks), LoadedBatches.of(ranks)
    group.method = method
    prepare(model.modules())
    forward: Callable[..., Any] = model.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        layout = _layout_of((args, kwargs), group)
        told = inputs.agree(layout.length, lambda: _describe((args, kwargs), layout, batches))
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


def _describe(given: Any, layout: SequenceLayout, batches: LoadedBatches) -> tuple[list[float], int, list[float]]:
    """Return numbers of this rank's slices, how many batches it has loaded, and numbers of the last one.

    No numbers of slices that hold one value only, which are equal without an error, nor of batches without whole sequences.
    """
    slices = [tensor for tensor in argument_tensors(given) if tensor.dim() > 1 and _varies(tensor)]
    loaded = batches.with_tokens(layout.length)
    return digest(slices) if slices else [], batches.count, digest(loaded) if loaded else []


def _varies(tensor: torch.Tensor) -> bool:
    return bool((tensor != tensor.flatten()[0]).any()) if tensor.numel() else False


def _require_one_batch(told: list[tuple[list[float], int, list[float]]], members: Sequence[int], length: int) -> None:
    """Raise an error unless the ranks of a group hold different slices of one batch.

    The slices cannot show whether they belong together. The batches that loaders have returned can.
    """
    size = len(members)
    for rank, (slices, count, loaded) in zip(members[1:], told[1:], strict=False):
        if slices and all(each[0] == slices for each in told):
            raise SMPUserError(
                f"context_parallel_degree is {size}, and the ranks {members} called the model with the same tokens: each rank must "
                f"cut its batch, and pass chunks r and {2 * size - 1} - r of each sequence's {2 * size} equal chunks, where r is "
                "tsm.state.cp_rank",
                code="SMP310",
            )
        # Other counts: a thread of one rank has loaded ahead.
        if count == told[0][1] and loaded and told[0][2] and loaded != told[0][2]:
            raise SMPUserError(
                f"context_parallel_degree is {size}, so the ranks {members} share each sequence out, but rank {rank} loaded "
                f"another batch with sequences of {length} tokens than rank {members[0]}: give each sampler "
                "num_replicas=tsm.state.world_size // n and rank=tsm.state.rank // n, where n is tsm.state.tp_size * "
                "tsm.state.cp_size, and all ranks of a group one seed for the order",
                code="SMP310",
            )


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
