"""Sequences in the messages between pipeline stages: the slice travels, and what describes its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_runtime.context.layout import layout_of
from smp_runtime.context.sequence import ShardedSequence

if TYPE_CHECKING:
    import torch

    from smp_runtime.context.exchange import ContextGroup


class _Here:
    """The context group of this process."""

    group: ContextGroup | None = None


def let_travel(group: ContextGroup) -> None:
    """Let sequences that come from other stages be this group's."""
    _Here.group = group


def take_apart(sequence: ShardedSequence) -> tuple[Any, ...]:
    """Return what a message keeps of a sequence: a function and its arguments, the slice among them."""
    layout = sequence.sequence_layout
    return put_together, (sequence.local, sequence.dim_held, layout.key, layout.outer, layout.inner)


def put_together(local: torch.Tensor, dim: int, key: Any, outer: int, inner: int) -> ShardedSequence:
    """Return the sequence of a slice that came from another stage."""
    if _Here.group is None:
        raise AssertionError("a sequence came to a rank without context parallelism")
    return ShardedSequence(local, dim, layout_of(key).merged(outer, inner), _Here.group)
