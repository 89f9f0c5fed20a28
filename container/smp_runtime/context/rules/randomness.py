"""Random numbers of sequences: each position has the ones that one process would draw.

Every rank draws the numbers of the whole tensor, and takes those of its positions; the generators of the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.sequence import ShardedSequence, rule


@rule("F.dropout", "F.dropout1d", "F.dropout2d", "F.alpha_dropout", "F.feature_alpha_dropout", "F.dropout3d")
def _drop(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    sequence, probability = given["input"], given["p"]
    if not given["training"] or probability == 0:
        return sequence
    if func.__name__ != "dropout":
        return NotImplemented
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    return _scale_kept(sequence, probability, in_place=given["inplace"])


@rule("dropout", "native_dropout", "dropout_")
def _drop_in_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 3 or func.__name__ == "native_dropout":
        return NotImplemented
    sequence, probability, training = args
    if not training or probability == 0:
        return sequence
    return _scale_kept(sequence, probability, in_place=func.__name__ == "dropout_")


def _scale_kept(sequence: ShardedSequence, probability: float, *, in_place: bool) -> ShardedSequence:
    local = sequence.local
    with torch.no_grad():
        whole = torch.empty(sequence.shape, dtype=local.dtype, device=local.device)
        noise = whole.bernoulli_(1 - probability)
        if probability < 1:
            noise.div_(1 - probability)
        mine = sequence.group.take(noise, sequence.dim_held, sequence.sequence_layout)
    if not in_place:
        return sequence.like(local * mine)
    local.mul_(mine)
    return sequence


@rule("rand_like", "randn_like", "randint_like")
def _draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sequence = args[0]
    whole = func(torch.empty(sequence.shape, dtype=sequence.dtype, device=sequence.device), *args[1:], **kwargs)
    return sequence.like(sequence.group.take(whole, sequence.dim_held, sequence.sequence_layout))
