"""The positions of a sequence that each rank of a context group holds."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smp_runtime.context.host_values import always_computed


@dataclass(frozen=True)
class SequenceLayout:
    """A dim of a tensor that is divided over ranks by position.

    The dim may be merged with others, as by ``logits.view(-1, vocabulary)``: it then counts ``outer × length × inner``
    elements. A rank holds those at its positions.

    Args:
        key: equal for layouts with the same positions.
        length: positions of the whole sequence.
        positions: for each rank the positions that it holds, ascending: int64 on the CPU.
        outer, inner: sizes of the dims merged into this one, before and after the sequence.
    """

    key: Hashable
    length: int = field(compare=False)
    positions: tuple[torch.Tensor, ...] = field(compare=False, repr=False)
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """Return the size of the whole dim."""
        return self.outer * self.length * self.inner

    @property
    def base(self) -> SequenceLayout:
        """Return the layout of the sequence alone, without merged dims."""
        return self if self.outer == self.inner == 1 else SequenceLayout(self.key, self.length, self.positions)

    def counts(self) -> tuple[int, ...]:
        """Return the number of positions of each rank."""
        return tuple(len(held) for held in self.positions)

    def local_size(self, rank: int) -> int:
        """Return the size of the dim on a rank."""
        return self.outer * len(self.positions[rank]) * self.inner

    def merged(self, outer: int, inner: int) -> SequenceLayout:
        """Return the layout of this sequence in a dim merged with others of these sizes."""
        return SequenceLayout(self.key, self.length, self.positions, outer, inner)

    def select(self, start: int, stop: int, step: int) -> tuple[SequenceLayout, list[torch.Tensor]]:
        """Return the layout of a slice of the sequence, and for each rank the places of the slice's positions in its own."""
        selected, places = _select(self.key, self.positions, start, stop, step)
        length = len(range(start, stop, step))
        key, before, after = self._padding()
        if before + after and (start, length, step) == (before, self.length - before - after, 1):
            return SequenceLayout(key, length, selected), list(places)  # without its padding it is what it was
        return SequenceLayout(("slice", self.key, start, stop, step), length, selected), list(places)

    def padded(self, before: int, after: int) -> SequenceLayout:
        """Return the layout of the sequence with further positions before and after; the first and last rank hold them."""
        return _padded(self.base, before, after)

    def _padding(self) -> tuple[Hashable, int, int]:
        """Return the key without padding, and the positions of padding before and after."""
        if isinstance(self.key, tuple) and self.key[0] == "padded":
            return self.key[1], self.key[2], self.key[3]
        return self.key, 0, 0

    def without_padding(self) -> SequenceLayout:
        """Return the layout of the sequence before it was padded; itself if it was not."""
        _, before, after = self._padding()
        return self.select(before, self.length - after, 1)[0] if before + after else self

    def followed_by(self, others: Sequence[SequenceLayout]) -> SequenceLayout | None:
        """Return the layout of this slice joined with later ones; None unless each begins where the last ends."""
        keys = [one.key for one in (self, *others)]
        if any(not isinstance(key, tuple) or key[0] != "slice" or key[4] != 1 for key in keys):
            return None
        bounds = [key[2:4] for key in keys if isinstance(key, tuple)]
        follow = all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
        if not follow or len({key[1] for key in keys if isinstance(key, tuple)}) != 1:
            return None
        whole: SequenceLayout = layout_of(keys[0][1])  # type: ignore[index]
        start, stop = bounds[0][0], bounds[-1][1]
        return whole if (start, stop) == (0, whole.length) else whole.select(start, stop, 1)[0]

    def whole(self, parts: int) -> SequenceLayout | None:
        """Return the layout that :func:`parts_of` has divided in so many parts; None for another one."""
        is_part = isinstance(self.key, tuple) and self.key[0] == "parts" and self.key[2] == parts
        return layout_of(self.key[1]) if is_part else None  # type: ignore[index]

    def runs(self) -> tuple[tuple[range, ...], ...]:
        """Return for each rank the ranges of neighboring positions that it holds, ascending."""
        return _runs(self.base)

    @always_computed
    def rank_of(self, position: int) -> int:
        """Return the rank that holds a position."""
        for rank, held in enumerate(self.positions):
            if position in held:
                return rank
        raise AssertionError(f"no rank holds position {position} of {self.length}")


@functools.lru_cache(maxsize=64)
@always_computed
def _select(
    key: Hashable, positions: tuple[torch.Tensor, ...], start: int, stop: int, step: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    selected, places = [], []
    for held in positions:
        # A negative step cannot occur: PyTorch has no such slices.
        inside = (held >= start) & (held < stop) & ((held - start) % step == 0)
        selected.append((held[inside] - start) // step)
        places.append(inside.nonzero()[:, 0])
    return tuple(selected), tuple(places)


@functools.lru_cache(maxsize=64)
@always_computed
def _runs(layout: SequenceLayout) -> tuple[tuple[range, ...], ...]:
    found: list[tuple[range, ...]] = []
    for held in layout.positions:
        if not len(held):
            found.append(())
            continue
        # A run ends where a position does not follow the one before.
        starts = [0, *(held.diff() != 1).nonzero()[:, 0].add(1).tolist()]
        ends = [*starts[1:], len(held)]
        firsts = held[starts].tolist()
        runs = [range(first, first + end - start) for first, start, end in zip(firsts, starts, ends, strict=True)]
        found.append(tuple(runs))
    return tuple(found)


@functools.lru_cache(maxsize=64)
@always_computed
def of_runs(layout: SequenceLayout) -> SequenceLayout:
    """Return the layout of a sequence with one element for each run of neighboring positions of another one."""
    owners = sorted((run.start, rank) for rank, runs in enumerate(layout.runs()) for run in runs)
    places: list[list[int]] = [[] for _ in layout.positions]
    for number, (_, rank) in enumerate(owners):
        places[rank].append(number)
    held = tuple(torch.tensor(numbers, dtype=torch.int64) for numbers in places)
    return SequenceLayout(("runs", layout.key), len(owners), held)


@functools.lru_cache(maxsize=64)
@always_computed
def _padded(layout: SequenceLayout, before: int, after: int) -> SequenceLayout:
    shifted = [held + before for held in layout.positions]
    total = before + layout.length + after
    if before:
        first = layout.rank_of(0)
        shifted[first] = torch.cat([torch.arange(before), shifted[first]])
    if after:
        last = layout.rank_of(layout.length - 1)
        shifted[last] = torch.cat([shifted[last], torch.arange(total - after, total)])
    return SequenceLayout(("padded", layout.key, before, after), total, tuple(shifted))


@functools.lru_cache(maxsize=64)
@always_computed
def parts_of(layout: SequenceLayout, parts: int) -> SequenceLayout:
    """Return the layout of a part of each rank's positions, where as many other ranks have the other parts.

    They are numbered in the order of the ranks. The last part ends in padding where a rank's positions cannot be divided.
    """
    sizes = [-(-count // parts) for count in layout.counts()]
    held = torch.arange(sum(sizes)).split(sizes)
    return SequenceLayout(("parts", layout.key, parts), sum(sizes), held)


@functools.lru_cache(maxsize=64)
@always_computed
def zigzag(length: int, ranks: int) -> SequenceLayout:
    """Divide a sequence into ``2 × ranks`` chunks; rank r holds chunks r and ``2 × ranks - 1 - r``.

    The work of causal attention is then equal. A length that ``2 × ranks`` does not divide makes some chunks longer by one.
    """
    chunks = torch.arange(length).tensor_split(2 * ranks)
    held = tuple(torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]]) for rank in range(ranks))
    return SequenceLayout(("zigzag", length, ranks), length, held)


@functools.lru_cache(maxsize=64)
@always_computed
def contiguous(length: int, ranks: int) -> SequenceLayout:
    """Divide a sequence into one chunk per rank."""
    return SequenceLayout(("contiguous", length, ranks), length, torch.arange(length).tensor_split(ranks))


def layout_of(key: Any) -> SequenceLayout:
    """Return the layout with a key."""
    kind, *facts = key
    if kind == "slice":
        return layout_of(facts[0]).select(*facts[1:])[0]
    if kind == "runs":
        return of_runs(layout_of(facts[0]))
    if kind == "padded":
        return layout_of(facts[0]).padded(*facts[1:])
    if kind == "parts":
        return parts_of(layout_of(facts[0]), *facts[1:])
    return {"zigzag": zigzag, "contiguous": contiguous}[kind](*facts)


@dataclass(frozen=True)
class PositionMove:
    """The rows that a rank keeps, sends and receives to change to another layout of the same sequence.

    Args:
        kept, kept_places: old and new places of the rows that stay on this rank.
        leaving: for each rank, the old places of the rows sent to it.
        arriving: for each rank, the new places of the rows received from it.
    """

    kept: torch.Tensor
    kept_places: torch.Tensor
    leaving: list[torch.Tensor]
    arriving: list[torch.Tensor]


@functools.lru_cache(maxsize=64)
@always_computed
def move_between(one: SequenceLayout, other: SequenceLayout, rank: int) -> PositionMove:
    """Return a rank's part in moving a sequence from one layout to another."""
    places = torch.empty(2, one.length, dtype=torch.int64)  # of each position on its rank
    owners = torch.empty_like(places)
    for number, layout in enumerate((one, other)):
        for owner, held in enumerate(layout.positions):
            places[number, held] = torch.arange(len(held))
            owners[number, held] = owner

    def between(source: int, target: int) -> torch.Tensor:
        """Return the places of what a rank sends to another: on the first, and on the second."""
        return places[:, (owners[0] == source) & (owners[1] == target)]

    others = range(len(one.positions))
    leaving = [between(rank, each)[0] if each != rank else places[0, :0] for each in others]
    arriving = [between(each, rank)[1] if each != rank else places[0, :0] for each in others]
    kept, kept_places = between(rank, rank)
    return PositionMove(kept, kept_places, leaving, arriving)


@dataclass(frozen=True)
class DimGroup:
    """Dims that a view merges and splits together: those of its input, and those of its output."""

    before: range
    after: range


def view_dim(
    shape: tuple[int, ...], target: tuple[int, ...], dim: int, layout: SequenceLayout
) -> tuple[int, SequenceLayout] | None:
    """Return where a view of a sequence has it: the dim, and its layout; None if the view divides the sequence itself.

    Args:
        shape, target: whole shapes before and after the view, without -1.
        dim: the dim of ``shape`` with the sequence.
    """
    group = _group_with(shape, target, dim)
    if group is None:
        return None
    outer = layout.outer * math.prod(shape[group.before.start : dim])
    inner = layout.inner * math.prod(shape[dim + 1 : group.before.stop])
    before = 1
    for place in group.after:
        after = math.prod(target[place + 1 : group.after.stop])
        holds_sequence = target[place] == layout.length * (outer // max(before, 1)) * (inner // max(after, 1))
        if holds_sequence and outer % before == 0 and inner % after == 0 and target[place] != 1:
            return place, layout.merged(outer // before, inner // after)
        before *= target[place]
    return None


def _group_with(shape: tuple[int, ...], target: tuple[int, ...], dim: int) -> DimGroup | None:
    """Return the smallest group of neighboring dims, with as many elements before as after a view, that has a dim."""
    one = other = 0
    while one < len(shape):
        first, first_after = one, other
        here, there = shape[one], target[other] if other < len(target) else 1
        one, other = one + 1, other + 1
        while here != there:
            if here < there:
                if one >= len(shape):
                    return None
                here, one = here * shape[one], one + 1
            else:
                if other >= len(target):
                    return None
                there, other = there * target[other], other + 1
        if first <= dim < one:
            return DimGroup(range(first, one), range(first_after, min(other, len(target))))
    return None
