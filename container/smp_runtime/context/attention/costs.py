"""Bytes that attention sends, before it sends them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_runtime.context.attention.plan import needed_of
from smp_runtime.context.host_values import always_computed

if TYPE_CHECKING:
    import torch

    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.positions import HeldPositions

#: Blocks of keys that are smaller travel at once: messages of a ring would take longer than what they carry.
_SMALL_BLOCK_BYTES = 2**16


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of an attention over a whole sequence.

    Args:
        width, value_width: of a head.
        element: bytes of an element.
        mask_bytes: of a row of the mask, for all heads; 0 if it has no row for each query.
        mask_heads: heads of the mask.
    """

    batch: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    element: int
    mask_bytes: int = 0
    mask_heads: int = 1

    @property
    def key_bytes(self) -> int:
        """Return the bytes of a position's keys and values."""
        return self.batch * self.key_heads * (self.width + self.value_width) * self.element

    @property
    def query_bytes(self) -> int:
        """Return the bytes of a position's queries and results."""
        return self.batch * self.heads * (self.width + self.value_width) * self.element


def neighbors_for(ranks: int, heads: int, key_heads: int) -> int:
    """Return how many neighboring ranks exchange heads: as many as both kinds of heads can be divided over."""
    return max(each for each in range(1, ranks + 1) if ranks % each == 0 and math.gcd(heads, key_heads) % each == 0)


def rows_sent(
    queries: HeldPositions, keys: HeldPositions, needed: torch.Tensor | None, *, bounds: KeyBounds | None
) -> list[int]:
    """Return for each member how many of its keys it sends to others, counting a key once for each receiver."""
    wanted = needed_of(queries, keys, needed, bounds=bounds)
    members = range(len(keys.held))
    return [sum(int(wanted[other][member].sum()) for other in members if other != member) for member in members]


def ring_bytes(shape: AttentionShape, rows: list[int], *, backward: bool) -> float:
    """Return the bytes that a rank sends on average as a ring, or with all keys gathered.

    The backward pass fetches keys and values again, and returns their gradients.
    """
    passes = 3 if backward else 1
    return passes * shape.key_bytes * sum(rows) / len(rows)


def head_bytes(shape: AttentionShape, queries: int, keys: int, ranks: int, neighbors: int, *, backward: bool) -> float:
    """Return the bytes that a rank sends on average to exchange heads with its neighbors.

    Args:
        queries, keys: lengths of the sequences.
    """
    share = (neighbors - 1) / (neighbors * ranks)
    tokens = shape.query_bytes * queries + shape.key_bytes * keys
    return share * tokens * (2 if backward else 1)


def mask_bytes(shape: AttentionShape, queries: int, ranks: int, neighbors: int) -> float:
    """Return the bytes of masks that a rank sends on average when it exchanges heads with its neighbors."""
    copies = (neighbors - 1) / (neighbors if shape.mask_heads > 1 else 1)
    return shape.mask_bytes * queries / ranks * copies


@always_computed
def cheapest(
    shape: AttentionShape,
    queries: HeldPositions,
    keys: HeldPositions,
    needed: torch.Tensor | None,
    neighbors: int,
    *,
    bounds: KeyBounds | None,
) -> str:
    """Return the method that sends the fewest bytes, forward and backward.

    Args:
        needed: whether a rank needs a key, by mask; None without one.
        neighbors: ranks that would exchange heads.
    """
    ranks = len(keys.held)
    as_ring = ring_bytes(shape, rows_sent(queries, keys, needed, bounds=bounds), backward=True)
    if neighbors > 1:
        groups, key_groups = queries.merged(neighbors)[0], keys.merged(neighbors)[0]
        by_group = None if needed is None else needed.view(len(groups.held), neighbors, -1).any(1)
        between = rows_sent(groups, key_groups, by_group, bounds=bounds)
        # Each rank has its share of the heads of its group's rows.
        with_heads = ring_bytes(shape, between, backward=True) / neighbors
        with_heads += head_bytes(shape, queries.length, keys.length, ranks, neighbors, backward=True)
        with_heads += mask_bytes(shape, queries.length, ranks, neighbors)
        if with_heads < as_ring:
            return "all_to_all"
    return "all_gather" if max(keys.counts) * shape.key_bytes <= _SMALL_BLOCK_BYTES else "ring"
