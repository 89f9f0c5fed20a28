"""Positions for each rank of a context group, so that all have the same work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from smp_runtime.context.host_values import always_computed


@always_computed
def zigzag_indices(length: int, ranks: int) -> list[torch.Tensor]:
    """Return each rank's positions of a sequence under causal attention: chunks r and ``2 × ranks - 1 - r`` of ``2 × ranks``."""
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


#: A document with a smaller share of a rank's work and tokens stays whole: its keys need not travel.
_WHOLE_SHARE = 0.03


@always_computed
def balance_documents(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Return each rank's positions of a sequence of documents under causal attention inside each document.

    Short documents stay whole. Each other one is divided zig-zag, and the ranks with the least work so far take its larger
    parts.
    """
    starts = [0, *itertools.accumulate(lengths)]
    held: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    work, tokens = [0.0] * ranks, [0] * ranks
    most_work = _WHOLE_SHARE * sum(map(_work, lengths)) / ranks
    most_tokens = _WHOLE_SHARE * sum(lengths) / ranks

    def give(rank: int, part: torch.Tensor, start: int) -> None:
        held[rank].append(part + start)
        work[rank] += float((part + 1).sum())
        tokens[rank] += len(part)

    def load(rank: int) -> float:
        return work[rank] / max(most_work, 1.0) + tokens[rank] / max(most_tokens, 1.0)

    # The longest first: short ones then even out what is left.
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length, start = lengths[number], starts[number]
        if _work(length) <= most_work and length <= most_tokens:
            give(min(range(ranks), key=load), torch.arange(length), start)
            continue
        parts = sorted(zigzag_indices(length, ranks), key=lambda part: -int(part.sum()))
        for rank, part in zip(sorted(range(ranks), key=load), parts, strict=True):
            give(rank, part, start)
    return [torch.cat(parts).sort().values if parts else torch.arange(0) for parts in held]


def _work(length: int) -> float:
    return length * (length + 1) / 2
