"""The entry point: scaled dot product attention of this rank's rows over all ranks' keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from smp_runtime.context.attention import costs
from smp_runtime.context.attention.blockwise import MemberRing, attend_blockwise
from smp_runtime.context.attention.bounds import bounds_of
from smp_runtime.context.attention.heads import HeadNeighbors, NeighborRows, to_heads, to_rows
from smp_runtime.context.attention.plan import plan_for
from smp_runtime.context.attention.positions import HeldPositions, keep, positions_of
from smp_runtime.context.attention.scores import BlockScoring, PositionalDropout
from smp_runtime.context.attention.visibility import GivenMask, Visibility, by_mask

if TYPE_CHECKING:
    import torch

    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.traffic import AttentionGroup

METHODS = ("auto", "ring", "all_gather", "all_to_all")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the first result of :func:`attend_with_logsumexp`, for the same arguments."""
    return attend_with_logsumexp(q, k, v, wants_logsumexp=False, **options)[0]


def attend_with_logsumexp(  # noqa: PLR0913 - the arguments of scaled_dot_product_attention, and the places of the rows
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    query_index: Sequence[torch.Tensor],
    key_index: Sequence[torch.Tensor],
    group: AttentionGroup,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    key_range: tuple[torch.Tensor, torch.Tensor] | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    method: str = "auto",
    grouped: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    wants_logsumexp: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of ``scaled_dot_product_attention`` over the whole sequence; every rank of the group calls it.

    The second result is the log-sum-exp of each row's scores, ``[batch, heads, rows]``, which has gradients too.

    Args:
        q, k, v: ``[batch, heads, rows of this rank, width]``; one dtype.
        query_index, key_index: for each rank of the group the positions of its rows, int64 on the CPU. Together they are
            ``range(length)``, each once. Pass the same tensors again for the same positions: plans are kept with them.
        mask: True where a query attends to a key, or what is added to the scores; broadcastable to ``[batch, heads, rows of
            this rank, keys of all ranks in order of position]``. Pass the same tensor for layers with the same mask: what it
            hides is exchanged once.
        causal: a query attends to keys at positions up to its own only.
        key_range: for each query of the whole sequence, by position, the first and the last key that it attends to: int64 on
            the CPU, the same on all ranks. Windows, chunks and packed documents need no mask with it. Pass the same tensors
            again for the same ranges.
        dropout: probability.
        dropout_seed: required with dropout; the same on all ranks. Elements drop by seed and position, whatever the degree.
        method: one of :data:`METHODS`.
        grouped: several query heads share a key head (``enable_gqa``).
        softcap: caps the scores to ``softcap · tanh(score / softcap)``.
        sinks: for each head the score of a further key, whose value is 0. Its gradient on a rank is that of the rank's rows.
        wants_logsumexp: whether the second result is used; it may be empty if not.

    Raises:
        AssertionError: the arguments do not fit each other.
    """
    _check(q, k, v, method, grouped=grouped, needs_seed=dropout > 0 and dropout_seed is None)
    queries, keys = positions_of(query_index), positions_of(key_index)
    _check_rows(q, k, v, queries, keys, group.rank)
    inputs = [each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v)]
    whole = _Call(
        group,
        queries,
        keys,
        mask=None if mask is None else GivenMask(_four_dims(mask, queries.counts[group.rank], keys.length), mask),
        bounds=bounds_of(key_range, queries.length, causal=causal),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        dropout=PositionalDropout(dropout, dropout_seed or 0, 0, q.shape[1]) if dropout > 0 else None,
        softcap=softcap,
        sinks=sinks,
    )
    return whole.run(inputs[0], inputs[1], inputs[2], method, wants_logsumexp=wants_logsumexp)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, checked."""

    group: AttentionGroup
    queries: HeldPositions
    keys: HeldPositions
    mask: GivenMask | None
    bounds: KeyBounds | None
    scale: float
    dropout: PositionalDropout | None
    softcap: float | None
    sinks: torch.Tensor | None

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str, *, wants_logsumexp: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows, and the log-sum-exp of their scores; it is empty if it is not wanted."""
        neighbors = costs.neighbors_for(self.group.size, q.shape[1], k.shape[1])
        visibility = self._visibility() if method != "all_to_all" or neighbors == 1 else None
        if method == "auto":
            method = self._cheapest(q, k, v, neighbors, visibility)
        if method == "all_to_all" and neighbors > 1:
            return self._with_heads_exchanged(q, k, v, neighbors, wants_logsumexp=wants_logsumexp)
        ranks = list(range(self.group.size))
        at_once = method == "all_gather"
        return self.over_members(
            q, k, v, self.group.rank, ranks, visibility, at_once=at_once, wants_logsumexp=wants_logsumexp
        )

    def _visibility(self) -> Visibility | None:
        if self.mask is None:
            return None
        return by_mask(self.mask, self.queries, self.keys, self.group.rank, self.group, bounds=self.bounds)

    def _cheapest(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, neighbors: int, visibility: Visibility | None
    ) -> str:
        """Return the method that sends the fewest bytes, forward and backward."""
        mask = None if self.mask is None else self.mask.tensor
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())
        of_mask = (
            (0, 1)
            if mask is None or mask.shape[2] == 1
            else (mask[:, :, :1].numel() * mask.element_size(), mask.shape[1])
        )
        shape = costs.AttentionShape(*sizes, *of_mask)
        kept = self.queries.plans if visibility is None else visibility.plans
        key = (self.keys, self.bounds, shape, neighbors)
        if key not in kept:
            needed = None if visibility is None else visibility.needed
            keep(kept, key, costs.cheapest(shape, self.queries, self.keys, needed, neighbors, bounds=self.bounds))
        return str(kept[key])

    def _with_heads_exchanged(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, *, wants_logsumexp: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows, computed by groups of ``count`` neighbors, each with its heads of all the group's rows."""
        group = self.group
        first = group.rank // count * count
        neighbors = HeadNeighbors(group, range(first, first + count), group.rank - first)
        member = first // count
        queries, keys = self.queries.merged(count)[0], self.keys.merged(count)[0]
        query_rows, key_rows = (_neighbor_rows(each, member, count) for each in (self.queries, self.keys))
        heads = q.shape[1]
        q, k, v = to_heads(neighbors, [query_rows, key_rows, key_rows], [q, k, v])
        dropout = self.dropout and PositionalDropout(
            self.dropout.probability, self.dropout.seed, neighbors.place * q.shape[1], heads
        )
        own = slice(neighbors.place * q.shape[1], (neighbors.place + 1) * q.shape[1])
        inner = dataclasses.replace(
            self,
            queries=queries,
            keys=keys,
            mask=self._mask_of(neighbors, query_rows),
            dropout=dropout,
            sinks=None if self.sinks is None else self.sinks[own],
        )
        ranks = list(range(neighbors.place, group.size, count))
        visibility = None
        if inner.mask is not None:
            visibility = by_mask(inner.mask, queries, keys, member, group, bounds=self.bounds)
        out, logsumexp = inner.over_members(
            q, k, v, member, ranks, visibility, at_once=False, wants_logsumexp=wants_logsumexp
        )
        rows = to_rows(neighbors, query_rows, heads, out)
        if not wants_logsumexp:
            return rows, logsumexp
        return rows, to_rows(neighbors, query_rows, heads, logsumexp[..., None])[..., 0]

    def _mask_of(self, neighbors: HeadNeighbors, rows: NeighborRows) -> GivenMask | None:
        """Return the mask of all the neighbors' rows, for this rank's heads."""
        if self.mask is None:
            return None
        mask, given = self.mask.tensor, self.mask.given
        label = (neighbors.place, len(neighbors.ranks))
        # A rank with one row cannot tell whether the mask has one for it or one for all.
        is_for_all_rows = mask.shape[2] == 1 and 1 not in self.queries.counts
        if is_for_all_rows and not mask.requires_grad:
            return GivenMask(neighbors.own_heads(mask), given, label)
        # A gradient belongs to the rank with the row.
        mask = mask.expand(-1, -1, rows.counts[neighbors.place], -1)
        if mask.requires_grad:
            return GivenMask(to_heads(neighbors, [rows], [mask], of_masks=True)[0], given, label)
        exchanged = self.mask.keep(("heads", label, rows), lambda: neighbors.to_heads([mask], [rows], of_masks=True)[0])
        return GivenMask(exchanged, given, label)

    def over_members(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        member: int,
        ranks: list[int],
        visibility: Visibility | None,
        *,
        at_once: bool,
        wants_logsumexp: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a member, which is this rank, or this rank's heads of its group.

        Args:
            ranks: for each member the rank that has these heads.
            visibility: by the mask; None without one.
        """
        plan = plan_for(self.queries, self.keys, member, visibility, bounds=self.bounds, at_once=at_once)
        mask = None if self.mask is None else self.mask.tensor
        is_exact = visibility is not None and visibility.is_exact
        scoring = BlockScoring(
            self.queries, self.keys, member, self.scale, self.bounds, mask, self.dropout, self.softcap, is_exact
        )
        return attend_blockwise(
            q, k, v, mask, self.sinks, MemberRing(self.group, ranks, plan, wants_logsumexp), scoring
        )


def _neighbor_rows(positions: HeldPositions, member: int, count: int) -> NeighborRows:
    """Return the rows of the ``count`` neighbors that are a member; the same object again for the same positions."""
    key = ("neighbors", member, count)
    if key not in positions.plans:
        counts = positions.counts[member * count : (member + 1) * count]
        keep(positions.plans, key, NeighborRows(counts, positions.merged(count)[1][member]))
    return cast("NeighborRows", positions.plans[key])


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, method: str, *, grouped: bool, needs_seed: bool) -> None:
    if method not in METHODS:
        raise AssertionError(f"{method!r} is none of the methods {', '.join(METHODS)}")
    if needs_seed:
        raise AssertionError("attention with dropout needs a seed that is the same on all ranks")
    if not q.dtype == k.dtype == v.dtype:
        raise AssertionError(f"queries, keys and values have the types {q.dtype}, {k.dtype} and {v.dtype}")
    shared = k.shape[1] == 1 or grouped
    if k.shape[1] != v.shape[1] or (q.shape[1] != k.shape[1] and not (shared and q.shape[1] % k.shape[1] == 0)):
        raise AssertionError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads and {v.shape[1]} value heads"
        )


def _check_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: HeldPositions, keys: HeldPositions, rank: int
) -> None:
    rows = (q.shape[2], k.shape[2], v.shape[2])
    if rows != (queries.counts[rank], keys.counts[rank], keys.counts[rank]):
        raise AssertionError(
            f"rank {rank} has {rows} rows of queries, keys and values; its positions are "
            f"{queries.counts[rank]} and {keys.counts[rank]}"
        )


def _four_dims(mask: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Return a mask of four dims with a column for each key.

    It is the mask itself if that has them: what is known about a mask is kept with it.
    """
    if mask.shape[-2] not in (1, rows) or mask.shape[-1] not in (1, keys):
        raise AssertionError(f"a mask of shape {tuple(mask.shape)} does not fit {rows} rows and {keys} keys")
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask if mask.shape[-1] == keys else mask.expand(-1, -1, -1, keys).contiguous()
