"""Parts of tensors, and copying what two parts have in common, without the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.manifest import Piece, TensorRecord


@dataclass(frozen=True)
class Region:
    """Elements ``first`` to ``last`` of the flattened slice ``start`` to ``stop`` along ``axis`` of a tensor.

    Attributes:
        shape: of the whole tensor.
        axis: along which the slice is cut; None when the slice is the whole.
        stop: exclusive, as ``last`` is.
    """

    shape: tuple[int, ...]
    axis: int | None
    start: int
    stop: int
    first: int
    last: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        axis: int | None = None,
        bounds: tuple[int, int] | None = None,
        flat: tuple[int, int] | None = None,
    ) -> Region:
        """A region; ``bounds`` None means all along the axis, ``flat`` None all of the slice."""
        if axis is None or bounds is None:
            axis, bounds = None, (0, 0)
        region = cls(tuple(shape), axis, *bounds, 0, 0)
        first, last = (0, region.slice_elements) if flat is None else flat
        return cls(tuple(shape), axis, *bounds, first, last)

    @classmethod
    def of_piece(cls, record: TensorRecord, piece: Piece) -> Region:
        """Where a piece of a checkpoint lies."""
        return cls.of(record.shape, record.tensor_axis, piece.tensor, piece.flat)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.stop - self.start, *self.shape[self.axis + 1 :])

    @property
    def slice_elements(self) -> int:
        """Elements of the slice."""
        return math.prod(self.slice_shape)

    @property
    def elements(self) -> int:
        """Elements of the region."""
        return self.last - self.first

    @property
    def is_slice(self) -> bool:
        """Whether it is all of its slice."""
        return self.first == 0 and self.last == self.slice_elements

    def same_slice(self, other: Region) -> bool:
        """Whether both are parts of the same slice."""
        return self.bounds(other.axis) == other.bounds(self.axis)

    def overlaps(self, other: Region) -> bool:
        """Whether both may have elements in common; slices of different axes always may."""
        if self.same_slice(other):
            return max(self.first, other.first) < min(self.last, other.last)
        axis = self.axis if self.axis is not None else other.axis
        if self.axis not in (None, axis) or other.axis not in (None, axis) or axis is None:
            return True
        mine, theirs = self.bounds(axis), other.bounds(axis)
        return max(mine[0], theirs[0]) < min(mine[1], theirs[1])

    def bounds(self, axis: int | None) -> tuple[int, int]:
        """Start and stop along an axis, which is this region's own or one that it is not cut along."""
        if self.axis is not None:
            return self.start, self.stop
        return (0, 0) if axis is None else (0, self.shape[axis])


@torch.no_grad()
def copy_common(target: torch.Tensor, wanted: Region, source: torch.Tensor, given: Region) -> int:
    """Copy the elements that two regions of one tensor share; types may differ.

    Args:
        target: flat, ``[wanted.elements]``. All of a slice, unless both regions are of the same slice.
        source: flat, ``[given.elements]``.

    Returns:
        How many elements were copied.
    """
    if wanted.same_slice(given):
        begin, end = max(wanted.first, given.first), min(wanted.last, given.last)
        if begin >= end:
            return 0
        target[begin - wanted.first : end - wanted.first].copy_(source[begin - given.first : end - given.first])
        return end - begin
    if not wanted.is_slice:
        raise AssertionError("only a whole slice can be filled from other slices")
    axis = wanted.axis if wanted.axis is not None else given.axis
    if axis is None or given.axis not in (None, axis):
        raise AssertionError("regions that are cut along different axes go through the whole tensor")
    outer, inner = math.prod(wanted.shape[:axis]), math.prod(wanted.shape[axis + 1 :])
    (t0, t1), (s0, s1) = wanted.bounds(axis), given.bounds(axis)
    low, high = max(t0, s0), min(t1, s1)
    if low >= high:
        return 0
    rows = target.view(outer, t1 - t0, inner)
    copied, width = 0, (s1 - s0) * inner
    for row, count, begin, end in _rows(given.first, given.last, width):
        at = row * width + begin - given.first
        if count:  # whole rows
            block = source[at : at + count * width].view(count, s1 - s0, inner)
            rows[row : row + count, low - t0 : high - t0].copy_(block[:, low - s0 : high - s0])
            copied += count * (high - low) * inner
            continue
        # A part of one row, whose elements follow each other in the whole tensor.
        first, last = max(s0 * inner + begin, t0 * inner), min(s0 * inner + end, t1 * inner)
        if first < last:
            flat = rows[row].view(-1)
            offset = at + first - (s0 * inner + begin)
            flat[first - t0 * inner : last - t0 * inner].copy_(source[offset : offset + last - first])
            copied += last - first
    return copied


def _rows(first: int, last: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """A flat range as rows of ``width``: row, number of whole rows (0 for a part of one), begin and end in the row."""
    row, begin = divmod(first, width)
    if begin and first < last:
        end = min(width, begin + last - first)
        yield row, 0, begin, end
        first += end - begin
        row += 1
    whole = (last - first) // width
    if whole > 0:
        yield row, whole, 0, width
        first += whole * width
        row += whole
    if first < last:
        yield row, 0, 0, last - first
