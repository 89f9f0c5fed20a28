"""Functions of other strategies on a rank's own tokens: it is known, and needs no proof, that tokens do not depend on each other.

Tensor parallelism may divide the tokens between the layers of a block over its ranks. Beside context parallelism it divides the
tokens of each context rank, so that a rank has its part of its slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from smp_runtime.context.layout import SequenceLayout, parts_of
from smp_runtime.context.sequence import ShardedSequence
from smp_runtime.tensors.torch_private import tree_map


class TokenFunction(Protocol):
    """A class of autograd functions that are token-wise: a token's result depends on that token alone.

    Attributes:
        token_arguments: so many of the first arguments have tokens.
        joins, divides: the places of the arguments with the dim along which the parts of a group's ranks are joined, or a tensor
            is divided over them; None without. The second argument is the group, with its ``size``.
        may_move_tokens: whether that dim may be the one with the tokens.
        mixes_features: whether the last dim must not have the tokens.
    """

    token_arguments: int
    joins: int | None
    divides: int | None
    may_move_tokens: bool
    mixes_features: bool


def run_on_tokens(cls: TokenFunction, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on slices; return ``NotImplemented`` if the tokens do not lie as it asks."""
    given = args[: cls.token_arguments]
    first = given[0]
    if not isinstance(first, ShardedSequence) or not all(_is_like(one, first) for one in given):
        return NotImplemented
    if cls.mixes_features and first.dim_held == first.dim() - 1:
        return NotImplemented
    joins, divides = (_moves_tokens(place, first, args) for place in (cls.joins, cls.divides))
    if not (joins or divides):
        return _wrap(call(*map(_local, args)), first, first.sequence_layout)
    layout = first.sequence_layout
    if not cls.may_move_tokens or layout.outer != 1 or layout.inner != 1:
        return NotImplemented
    return (_join if joins else _divide)(call, first, args)


def _join(call: Callable[..., Any], first: ShardedSequence, args: tuple[Any, ...]) -> Any:
    """Run a function that joins the parts of this rank's tokens."""
    whole = first.sequence_layout.whole(args[1].size)
    if whole is None:
        return NotImplemented
    held, count = first.dim_held, whole.local_size(first.group.rank)
    results = tree_map(lambda one: one.narrow(held, 0, count), call(*map(_local, args)))  # without padding
    return _wrap(results, first, whole)


def _divide(call: Callable[..., Any], first: ShardedSequence, args: tuple[Any, ...]) -> Any:
    """Run a function that divides this rank's tokens."""
    parts, held = parts_of(first.sequence_layout, args[1].size), first.dim_held
    missing = parts.local_size(first.group.rank) * args[1].size - first.local.shape[held]
    local = F.pad(first.local, [0, 0] * (first.dim() - 1 - held) + [0, missing]) if missing else first.local
    return _wrap(call(local, *map(_local, args[1:])), first, parts)


def _moves_tokens(place: int | None, first: ShardedSequence, args: tuple[Any, ...]) -> bool:
    return place is not None and args[place] is not None and args[place] % first.dim() == first.dim_held


def _is_like(one: Any, first: ShardedSequence) -> bool:
    is_sequence = isinstance(one, ShardedSequence)
    return is_sequence and (one.dim_held, one.sequence_layout) == (first.dim_held, first.sequence_layout)


def _local(value: Any) -> Any:
    return value.local if isinstance(value, ShardedSequence) else value


def _wrap(results: Any, first: ShardedSequence, layout: SequenceLayout) -> Any:
    return tree_map(lambda one: first.like(one, layout=layout) if isinstance(one, torch.Tensor) else one, results)
