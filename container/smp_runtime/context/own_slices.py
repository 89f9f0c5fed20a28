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

from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.inputs import WHOLE, SequenceInputs
from smp_runtime.context.layout import SequenceLayout, zigzag
from smp_runtime.context.position_wise import prepare
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.nested import argument_tensors, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from smp_runtime.job.ranks import Ranks


def run_on_slices(model: nn.Module, ranks: Ranks, method: str) -> None:
    """Let a model's calls take and return this rank's slices of sequences; no effect without context parallelism.

    Args:
        method: how keys and values travel in attention.
    """
    inputs = SequenceInputs.of(ranks)
    if inputs is None:
        return
    group = ContextGroup.of(ranks)
    group.method = method
    prepare(model.modules())
    forward: Callable[..., Any] = model.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        layout = _layout_of((args, kwargs), group)
        inputs.agree(layout.length)

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
