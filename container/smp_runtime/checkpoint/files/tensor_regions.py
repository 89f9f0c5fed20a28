"""Parts of tensors, and copying what two parts have in common, without the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_runtime.parameters.registry import cut, intervals

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.manifest import Piece, TensorRecord


@dataclass(frozen=True)
class TensorRegion:
    """Elements ``first`` to ``last`` of a flattened slice along ``axis`` of a tensor.

    Attributes:
        shape: of the whole tensor.
        axis: along which the slice is cut; None when the slice is the whole.
        cuts: start and stop of the slice, or of each of the runs that it joins, one after the other.
        last: exclusive, as every stop is.
    """

    shape: tuple[int, ...]
    axis: int | None
    cuts: tuple[int, ...]
    first: int
    last: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        axis: int | None = None,
        bounds: tuple[int, ...] | None = None,
        flat: tuple[int, int] | None = None,
    ) -> TensorRegion:
        """Return a region of a tensor.

        ``bounds`` None means the whole axis, ``flat`` None the whole slice.
        """
        if axis is None or bounds is None:
            axis, bounds = None, (0, 0)
        region = cls(tuple(shape), axis, bounds, 0, 0)
        first, last = (0, region.slice_elements) if flat is None else flat
        return cls(tuple(shape), axis, bounds, first, last)

    @classmethod
    def of_piece(cls, record: TensorRecord, piece: Piece) -> TensorRegion:
        """Return the region that a piece of a checkpoint covers."""
        return cls.of(record.shape, record.tensor_axis, piece.tensor, piece.flat)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Return the shape of the slice."""
        if self.axis is None:
            return self.shape
        length = sum(stop - start for start, stop in intervals(self.cuts))
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    @property
    def slice_elements(self) -> int:
        """Return the number of elements of the slice."""
        return math.prod(self.slice_shape)

    @property
    def elements(self) -> int:
        """Return the number of elements of the region."""
        return self.last - self.first

    @property
    def is_slice(self) -> bool:
        """Return whether the region covers its whole slice."""
        return self.first == 0 and self.last == self.slice_elements

    def same_slice(self, other: TensorRegion) -> bool:
        """Return whether both are parts of the same slice."""
        return self.bounds(other.axis) == other.bounds(self.axis)

    def overlaps(self, other: TensorRegion) -> bool:
        """Return whether both may have elements in common; slices of different axes always may."""
        if self.same_slice(other):
            return max(self.first, other.first) < min(self.last, other.last)
        axes = {region.axis for region in (self, other)} - {None}
        if len(axes) != 1:
            return True
        axis = axes.pop()
        common = _common(self.bounds(axis), other.bounds(axis))
        return next(iter(common), None) is not None

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the region's slice of a whole tensor."""
        return whole if self.axis is None else cut(whole, self.axis, self.cuts)

    def bounds(self, axis: int | None) -> tuple[int, ...]:
        """Return starts and stops along an axis: the region's own axis, or one that it is not cut along."""
        if self.axis is not None:
            return self.cuts
        return (0, 0) if axis is None else (0, self.shape[axis])


@torch.no_grad()
def copy_common(target: torch.Tensor, wanted: TensorRegion, source: torch.Tensor, given: TensorRegion) -> int:
    """Copy the elements that two regions of one tensor share; types may differ.

    Args:
        target: flat, ``[wanted.elements]``. It covers its whole slice, unless both regions are of the same slice.
        source: flat, ``[given.elements]``.

    Returns:
        The number of elements copied.
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
    common = list(_common(wanted.bounds(axis), given.bounds(axis)))
    if not common:
        return 0
    long = sum(stop - start for start, stop in intervals(given.bounds(axis)))
    rows = target.view(outer, -1, inner)
    copied, width = 0, long * inner
    for row, count, begin, end in _rows(given.first, given.last, width):
        at = row * width + begin - given.first
        for there, here, length in common:
            if count:  # whole rows
                block = source[at : at + count * width].view(count, long, inner)
                rows[row : row + count, there : there + length].copy_(block[:, here : here + length])
                copied += count * length * inner
                continue
            # A part of one row: its elements are contiguous.
            first, last = max(here * inner, begin), min((here + length) * inner, end)
            if first < last:
                flat, to = rows[row].view(-1), first + (there - here) * inner
                flat[to : to + last - first].copy_(source[at + first - begin : at + last - begin])
                copied += last - first
    return copied


def _common(wanted: Sequence[int], given: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the intervals that two slices share along one axis: start in ``wanted``, start in ``given``, length."""
    there = 0
    for t0, t1 in intervals(wanted):
        here = 0
        for s0, s1 in intervals(given):
            low, high = max(t0, s0), min(t1, s1)
            if low < high:
                yield there + low - t0, here + low - s0, high - low
            here += s1 - s0
        there += t1 - t0


def _rows(first: int, last: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Split a flat range into rows of ``width``.

    Yields:
        Row, number of whole rows (0 for a part of one), begin and end in the row.
    """
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
