"""Which keys the rows of a rank attend to: by position, and by a mask."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from smp_runtime.context.attention.positions import HeldPositions, keep, runs_of
from smp_runtime.context.attention.traffic import gather_bits
from smp_runtime.context.host_values import always_computed

if TYPE_CHECKING:
    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.traffic import AttentionGroup

T = TypeVar("T")

#: Rows of a tile at least, if a mask says what they attend to. Smaller tiles skip more, and need more launches.
TILE_ROWS = 256
#: Tiles of a rank at most.
MOST_TILES = 256

#: Scores of a row whose mask is above or below this everywhere lose digits in their log-sum-exp.
_LARGE = 32.0


@dataclass
class Visibility:
    """What this member's rows attend to.

    Attributes:
        segments: ranges of rows that are computed together.
        some, every: whether a mask lets some row of a segment attend to a key, ``[segments, keys]``, and whether it lets
            every row and adds nothing; None without a mask.
        needed: whether a member needs a key, ``[members, keys]``; None without a mask.
        is_exact: whether scores must be computed as one process does, digit by digit: the mask hides keys by large
            numbers, whose log-sum-exp has no digits left for the scores.
    """

    segments: list[tuple[int, int]]
    some: torch.Tensor | None = None
    every: torch.Tensor | None = None
    needed: torch.Tensor | None = None
    is_exact: bool = False
    plans: OrderedDict[object, object] = field(default_factory=OrderedDict)


@always_computed
def segments_of(positions: torch.Tensor, bounds: KeyBounds | None, *, tiled: bool) -> list[tuple[int, int]]:
    """Return the ranges of rows to compute together.

    These are rows that follow each other, of one document. Where windows or a mask hide keys, they are divided into tiles.
    """
    count = len(positions)
    runs = runs_of(positions)
    if bounds is not None:
        edges = {edge for run in runs for edge in run} | set(bounds.breaks(positions))
        runs = list(itertools.pairwise(sorted(edges)))
    if len(runs) > MOST_TILES:  # each row may stand alone: cut by number
        runs = [(0, count)]
        tiled = True
    rows = max(TILE_ROWS, -(-count // MOST_TILES))
    segments = []
    for start, end in runs:
        is_whole = not tiled and (bounds is None or bounds.is_diagonal(positions[start:end]))
        size = end - start if is_whole else rows
        segments += [(begin, min(begin + size, end)) for begin in range(start, end, size)]
    return segments


def by_position(queries: HeldPositions, member: int, bounds: KeyBounds | None) -> Visibility:
    """Return what rows attend to without a mask."""
    return Visibility(segments_of(queries.held[member], bounds, tiled=False))


@dataclass(frozen=True)
class GivenMask:
    """A mask as it is used, and as the caller knows it.

    Args:
        tensor: ``[batch or 1, heads or 1, rows or 1, keys]``.
        given: the caller's tensor, with which everything is kept that is known about it.
        label: tells masks apart that were made of one: the heads that were taken, for example.
    """

    tensor: torch.Tensor
    given: torch.Tensor
    label: object = None

    def keep(self, key: object, make: Callable[[], T]) -> T:
        """Return what was made of the mask before, if it has not changed since, or make it.

        All ranks run the same program on masks of their own, so that all of them make it, or none.
        """
        if self.given.is_inference():  # it does not count its changes
            return make()
        kept = _known.setdefault(self.given, OrderedDict())
        full_key = (key, self.label, self.given._version, self.given.requires_grad)
        if full_key not in kept:
            keep(kept, full_key, make())
        return cast("T", kept[full_key])


#: By mask, what was made of it; it must not refer to the mask, which would live forever.
_known: MutableMapping[torch.Tensor, OrderedDict[object, object]] = WeakIdKeyDictionary()


def by_mask(
    mask: GivenMask,
    queries: HeldPositions,
    keys: HeldPositions,
    member: int,
    group: AttentionGroup,
    *,
    bounds: KeyBounds | None,
) -> Visibility:
    """Return what rows attend to under a mask; every rank of the group calls it with its own.

    It is kept as long as the mask comes again unchanged, so that layers with one mask exchange it once.

    Args:
        member: of the positions; a member may stand for several neighboring ranks.
    """

    def make() -> Visibility:
        return analyze(mask.tensor, queries, keys, member, group, bounds=bounds)

    # The key holds the objects, so that no others get their identities.
    return mask.keep((queries, keys, member, group, bounds), make)


@torch.no_grad()
def analyze(
    mask: torch.Tensor,
    queries: HeldPositions,
    keys: HeldPositions,
    member: int,
    group: AttentionGroup,
    *,
    bounds: KeyBounds | None,
) -> Visibility:
    """Return what rows attend to under a mask, from its elements; every rank of the group calls it."""
    held = queries.held[member]
    segments = segments_of(held, bounds, tiled=True)
    flat = mask.detach().flatten(0, 1)  # [samples × heads, rows or 1, keys]
    some, every = _reduced(flat, segments)
    if mask.requires_grad:  # what is added has a gradient where it is 0, too
        every = torch.zeros_like(every)
    is_exact = _has_large_rows(flat)
    bits = some.any(0) if segments else torch.zeros(keys.length, dtype=torch.bool)
    if bounds is not None:
        bits = bits & bounds.needed(held, keys.length)
    everyone = gather_bits(group, bits.to(mask.device))  # [ranks, keys]
    # A member of several ranks needs what one of them needs, each for its own heads.
    needed = everyone.view(len(queries.held), -1, keys.length).any(1)
    return Visibility(segments, some, every, needed, is_exact)


def _reduced(flat: torch.Tensor, segments: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether some row of each segment attends to a key, and whether every one does without an addition."""
    is_bool = flat.dtype is torch.bool
    some, every = [], []
    for begin, end in segments if flat.shape[1] > 1 else segments[:1]:
        tile = flat[:, begin:end] if flat.shape[1] > 1 else flat
        some.append((tile if is_bool else tile != -torch.inf).flatten(0, 1).any(0))
        every.append((tile if is_bool else tile == 0).flatten(0, 1).all(0))
    if not some:
        none = torch.zeros(len(segments), flat.shape[2], dtype=torch.bool)
        return none, none
    found = torch.stack([torch.stack(some), torch.stack(every)]).cpu()  # one copy from the device
    return found[0].expand(len(segments), -1), found[1].expand(len(segments), -1)


def _has_large_rows(flat: torch.Tensor) -> bool:
    if flat.dtype is torch.bool or not flat.numel():
        return False
    top = flat.amax(-1)
    return bool(((top.abs() > _LARGE) & (top > -torch.inf)).any())
