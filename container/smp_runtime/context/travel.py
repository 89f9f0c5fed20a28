"""Sequences in the messages between pipeline stages: the slice travels, and what describes its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_runtime.context.exchange import ContextGroup
from smp_runtime.context.layout import layout_of
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.job import session as sessions

if TYPE_CHECKING:
    import torch


def take_apart(sequence: ShardedSequence) -> tuple[Any, ...]:
    """Return what a pickle keeps of a sequence: a function and its arguments, the slice among them."""
    layout = sequence.sequence_layout
    return put_together, (sequence.local, sequence.dim_held, layout.key, layout.outer, layout.inner)


def put_together(local: torch.Tensor, dim: int, key: Any, outer: int, inner: int) -> ShardedSequence:
    """Return the sequence of a slice that came from another stage, whose ranks hold the same positions."""
    group = ContextGroup.of(sessions.current_session().ranks)
    return ShardedSequence(local, dim, layout_of(key).merged(outer, inner), group)
