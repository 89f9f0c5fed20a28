"""Random numbers of sequences: each position has the ones that one process would draw.

Every rank draws the numbers of the whole tensor, and takes those of its positions; the generators of the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.context.sequence import ShardedSequence, gather_all, rule, write_back


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
        noise = _empty_whole(sequence).bernoulli_(1 - probability)
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
    whole = func(_empty_whole(sequence), *args[1:], **kwargs)
    return sequence.like(sequence.group.take(whole, sequence.dim_held, sequence.sequence_layout))


@rule("uniform_", "normal_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_", "bernoulli_")
def _fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    given = gather_all(kwargs, name)
    sequence = args[0] if args else kwargs["tensor"]  # as torch.nn.init names it
    given.pop("tensor", None)
    if not isinstance(sequence, ShardedSequence):
        return NotImplemented
    with torch.no_grad():
        whole = func(_empty_whole(sequence), *gather_all(args[1:], name), **given)
    return write_back(sequence, whole, name)


def _empty_whole(sequence: ShardedSequence) -> torch.Tensor:
    """Return a whole tensor without values, whose dims lie in memory in the order of the slice's: generators fill memory."""
    strides = torch.empty_like(sequence.local, device="meta").stride()
    order = sorted(range(sequence.dim()), key=lambda dim: -strides[dim])
    made = torch.empty([sequence.shape[dim] for dim in order], dtype=sequence.dtype, device=sequence.device)
    return made.permute([order.index(dim) for dim in range(sequence.dim())])
