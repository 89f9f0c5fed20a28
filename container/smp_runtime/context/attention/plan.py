"""The plan of a block-wise attention: who sends which rows to whom, and which calls compute a block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from smp_runtime.context.attention.positions import HeldPositions, RowIndex, keep
from smp_runtime.context.host_values import always_computed

if TYPE_CHECKING:
    from smp_runtime.context.attention.bounds import KeyBounds
    from smp_runtime.context.attention.visibility import Visibility

#: Keys that are hidden, or fully visible, between others get a call of their own if there are so many.
GAP = 64
#: Ranges of keys of a segment and a block that are always left as they are.
_FEW_RANGES = 4

_HIDDEN, _SOME, _EVERY = 0, 1, 2


class CallKind(Enum):
    """How the rows of a call attend to its keys."""

    FULL = "all to all"
    CAUSAL = "each row to as many keys as its number"
    MASKED = "as position and mask say"


@dataclass(frozen=True)
class AttentionCall:
    """A range of rows that attends to a range of a block's keys.

    Attributes:
        columns: of a mask, for these keys: a slice if they follow each other, which needs no copy.
    """

    rows: slice
    keys: slice
    kind: CallKind
    columns: slice | RowIndex


@dataclass(frozen=True)
class KeyBlock:
    """The keys of one member that this member needs.

    Attributes:
        owner: the member that holds them.
        places: their places among the owner's rows; None for all.
        positions: their positions.
        calls: compute this member's rows with them.
    """

    owner: int
    places: RowIndex | None
    positions: RowIndex
    calls: list[AttentionCall]


@dataclass(frozen=True)
class BlockwisePlan:
    """What one member does.

    Attributes:
        member: which one.
        members: how many.
        own: the block of its own keys.
        rounds: for each round of messages, the distances between sender and receiver.
        arriving: by distance, the block that comes from the member so far before this one; without those that are empty.
        leaving: by distance, places of the rows that the member so far behind this one needs (None for all); without those
            that are empty.
    """

    member: int
    members: int
    own: KeyBlock
    rounds: list[list[int]]
    arriving: dict[int, KeyBlock]
    leaving: dict[int, RowIndex | None]

    def scores(self) -> int:
        """Return the number of pairs of a row and a key that are computed."""
        return sum(_scores(call) for block in (self.own, *self.arriving.values()) for call in block.calls)


def _scores(call: AttentionCall) -> int:
    rows = call.rows.stop - call.rows.start
    keys = call.keys.stop - call.keys.start
    return rows * (rows + 1) // 2 if call.kind is CallKind.CAUSAL else rows * keys


@always_computed
def plan_for(
    queries: HeldPositions,
    keys: HeldPositions,
    member: int,
    visibility: Visibility | None,
    *,
    bounds: KeyBounds | None,
    at_once: bool,
) -> BlockwisePlan:
    """Return a member's plan; it is made once for the same positions and mask.

    Args:
        visibility: by a mask; None without one.
        at_once: all blocks travel in one round, as in an all-gather. Otherwise each round has one distance, as in a ring.
    """
    kept = queries.plans if visibility is None else visibility.plans
    key = (keys, member, bounds, at_once)
    found = kept.get(key)
    if isinstance(found, BlockwisePlan):
        return found
    made = _make(queries, keys, member, visibility, bounds=bounds, at_once=at_once)
    keep(kept, key, made)
    return made


def needed_of(
    queries: HeldPositions, keys: HeldPositions, needed: torch.Tensor | None, *, bounds: KeyBounds | None
) -> list[list[torch.Tensor]]:
    """Return for each member and owner which of the owner's rows the member needs."""
    found = []
    for member, held in enumerate(queries.held):
        everything = torch.full((keys.length,), len(held) > 0)
        wanted = everything if bounds is None else bounds.needed(held, keys.length)
        if needed is not None:
            wanted = wanted & needed[member]
        found.append([wanted[owned] for owned in keys.held])
    return found


def _make(
    queries: HeldPositions,
    keys: HeldPositions,
    member: int,
    visibility: Visibility | None,
    *,
    bounds: KeyBounds | None,
    at_once: bool,
) -> BlockwisePlan:
    from smp_runtime.context.attention.visibility import by_position

    members = len(keys.held)
    seen = visibility or by_position(queries, member, bounds)
    needed = needed_of(queries, keys, seen.needed, bounds=bounds)
    held = queries.held[member]
    is_masked = seen.some is not None
    segments = [_Segment.of(held[begin:end], bounds, keys.length, is_masked=is_masked) for begin, end in seen.segments]

    def block(owner: int) -> KeyBlock:
        wanted = needed[member][owner]
        positions = keys.held[owner][wanted]
        calls = _calls(segments, positions, seen)
        return KeyBlock(owner, _places(wanted), RowIndex(positions), calls)

    distances = [distance for distance in range(1, members) if _is_used(needed, distance)]
    rounds = [distances] if at_once and distances else [[distance] for distance in distances]
    arriving, leaving = {}, {}
    for distance in distances:
        owner, receiver = (member - distance) % members, (member + distance) % members
        if needed[member][owner].any():
            arriving[distance] = block(owner)
        if needed[receiver][member].any():
            leaving[distance] = _places(needed[receiver][member])
    return BlockwisePlan(member, members, block(member), rounds, arriving, leaving)


def _is_used(needed: list[list[torch.Tensor]], distance: int) -> bool:
    """Return whether any member sends something so far: all members know, and leave the round out together."""
    members = len(needed)
    return any(bool(needed[member][(member - distance) % members].any()) for member in range(members))


def _places(wanted: torch.Tensor) -> RowIndex | None:
    return None if bool(wanted.all()) else RowIndex(wanted.nonzero()[:, 0])


def _columns(positions: torch.Tensor) -> slice | RowIndex:
    first, count = int(positions[0]), len(positions)
    if int(positions[-1]) - first == count - 1 and bool((positions.diff() == 1).all()):
        return slice(first, first + count)
    return RowIndex(positions)


@dataclass(frozen=True)
class _Segment:
    """What bounds say about rows that are computed together.

    Attributes:
        some: the range of keys to which some row attends at most, both ends included; empty for none.
        every: the range to which each row attends.
        is_diagonal: whether the rows attend to each other as causality has it.
    """

    rows: torch.Tensor
    some: tuple[int, int]
    every: tuple[int, int]
    is_diagonal: bool

    @classmethod
    def of(cls, rows: torch.Tensor, bounds: KeyBounds | None, length: int, *, is_masked: bool) -> _Segment:
        """Return the summary of rows by position, of keys of this number."""
        if bounds is None:
            return cls(rows, (0, length - 1), (0, length - 1), False)
        first, last = bounds.first[rows], bounds.last[rows]
        attends = first <= last
        if not bool(attends.any()):
            return cls(rows, (0, -1), (0, -1), False)
        is_diagonal = not is_masked and bounds.is_diagonal(rows)
        # The first row's own key belongs to the diagonal, although all rows attend to it.
        end = int(last.min()) - is_diagonal
        some = int(first[attends].min()), int(last[attends].max())
        return cls(rows, some, (int(first.max()), end), is_diagonal)


def _calls(segments: list[_Segment], positions: torch.Tensor, seen: Visibility) -> list[AttentionCall]:
    """Return the calls that compute a block with the keys at these positions."""
    if not len(positions):
        return []
    calls = []
    # Most documents have keys in a small part of a block only: where they begin and end is looked up at once.
    is_sorted = bool((positions.diff() > 0).all())
    ends = torch.tensor([[each.some[0], each.some[1] + 1] for each in segments], dtype=torch.int64).view(-1, 2)
    parts = torch.searchsorted(positions, ends).tolist() if is_sorted else [[0, len(positions)]] * len(segments)
    for number, (segment, (start, stop)) in enumerate(zip(segments, parts, strict=True)):
        if start >= stop:
            continue
        begin, end = seen.segments[number]
        for low, high, code in _ranges(_codes(segment, positions[start:stop], seen, number)):
            held = positions[start + low : start + high]
            kind = CallKind.FULL if code == _EVERY else CallKind.MASKED
            if code == _SOME and segment.is_diagonal and torch.equal(segment.rows, held):
                kind = CallKind.CAUSAL
            keys = slice(start + low, start + high)
            calls.append(AttentionCall(slice(begin, end), keys, kind, _columns(held)))
    return calls


def _codes(segment: _Segment, positions: torch.Tensor, seen: Visibility, number: int) -> torch.Tensor:
    """Return for each key whether no row of a segment attends to it, some do, or all."""
    some = (positions >= segment.some[0]) & (positions <= segment.some[1])
    every = (positions >= segment.every[0]) & (positions <= segment.every[1])
    if seen.some is not None and seen.every is not None:
        some, every = some & seen.some[number][positions], every & seen.every[number][positions]
    return some.to(torch.int8) + (some & every).to(torch.int8)


def _ranges(codes: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return ranges of keys with one code, without hidden ones; small ranges are joined to partly visible ones."""
    if not len(codes):
        return []
    edges = [0, *(codes.diff() != 0).nonzero()[:, 0].add(1).tolist(), len(codes)]
    ranges = [(start, stop, int(codes[start])) for start, stop in itertools.pairwise(edges)]
    # Each range is a call: so many small ones would take longer than what they leave out.
    if len(ranges) > _FEW_RANGES:
        ranges = _joined(ranges)
    return [each for each in ranges if each[2] != _HIDDEN]


def _joined(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    while ranges and ranges[0][2] == _HIDDEN:
        ranges = ranges[1:]
    while ranges and ranges[-1][2] == _HIDDEN:
        ranges = ranges[:-1]
    joined: list[tuple[int, int, int]] = []
    for start, stop, code in ranges:
        kept = code if stop - start >= GAP else _SOME
        if joined and joined[-1][2] == kept:
            joined[-1] = (joined[-1][0], stop, kept)
        else:
            joined.append((start, stop, kept))
    return joined
