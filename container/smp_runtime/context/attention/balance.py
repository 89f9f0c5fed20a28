"""Positions for each rank of a context group, so that all have the same work."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def zigzag_indices(length: int, ranks: int) -> list[torch.Tensor]:
    """Return each rank's positions of a sequence under causal attention: chunks r and ``2 × ranks - 1 - r`` of ``2 × ranks``."""
    chunks = torch.arange(length).tensor_split(2 * ranks)
    return [torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks)]


def balance_documents(lengths: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Return each rank's positions of a sequence of documents under causal attention inside each document.

    Each document is divided zig-zag, and the ranks with the least work so far take its larger parts.
    """
    if ranks == 1:
        return [torch.arange(sum(lengths))]
    held: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    tokens = [0] * ranks
    start = 0
    for length in lengths:
        chunks = (start + torch.arange(length)).tensor_split(2 * ranks)
        parts = [torch.cat([chunks[number], chunks[2 * ranks - 1 - number]]) for number in range(ranks)]
        loads = [float((part - start + 1).sum()) for part in parts]
        largest_first = sorted(range(ranks), key=lambda number: -loads[number])
        least_first = sorted(range(ranks), key=lambda rank: (work[rank], tokens[rank], rank))
        for number, rank in zip(largest_first, least_first, strict=True):
            held[rank].append(parts[number])
            work[rank] += loads[number]
            tokens[rank] += len(parts[number])
        start += length
    return [torch.cat(parts).sort().values if parts else torch.arange(0) for parts in held]
