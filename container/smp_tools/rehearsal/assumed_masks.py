"""Masks of attention whose elements a rehearsal has not computed: each key that positions do not hide counts as needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smp_runtime.context.attention import visibility
from smp_runtime.context.attention.traffic import gather_bits
from smp_runtime.context.host_values import always_computed

if TYPE_CHECKING:
    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.positions import HeldPositions
    from smp_runtime.context.attention.traffic import AttentionGroup

_analyze = visibility.analyze


def assume_masks(limit: int | None) -> None:
    """Let attention over several ranks count what masks could let through at most, instead of reading them.

    Args:
        limit: bytes of masks of all rows that are read; None: all are.
    """

    def analyze(
        mask: torch.Tensor,
        queries: HeldPositions,
        keys: HeldPositions,
        member: int,
        group: AttentionGroup,
        *,
        bounds: KeyBounds | None,
    ) -> visibility.Visibility:
        if limit is None or mask.nbytes * group.size <= limit:
            return _analyze(mask, queries, keys, member, group, bounds=bounds)
        gather_bits(group, torch.ones(keys.length, dtype=torch.bool, device=mask.device))  # it counts
        return _assumed(queries, keys, member, bounds)

    visibility.analyze = analyze


@always_computed
def _assumed(
    queries: HeldPositions, keys: HeldPositions, member: int, bounds: KeyBounds | None
) -> visibility.Visibility:
    segments = visibility.segments_of(queries.held[member], bounds, tiled=True)
    seen = torch.ones(len(segments), keys.length, dtype=torch.bool)
    needed = [
        torch.ones(keys.length, dtype=torch.bool) if bounds is None else bounds.needed(held, keys.length)
        for held in queries.held
    ]
    return visibility.Visibility(segments, seen, torch.zeros_like(seen), torch.stack(needed))
