"""The elements of whole matrices that a rank has: a run of elements of its part of a parameter, by matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_runtime.parameters.registry import intervals

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Join:
    """The place of a parameter in a matrix that it is a part of, with other parameters.

    Attributes:
        name: of the matrix, the same on all ranks.
        shape: of it.
        axis: along which the parameters follow each other.
        start: of this one along it.
    """

    name: str
    shape: tuple[int, int]
    axis: int
    start: int


@dataclass(frozen=True)
class Region:
    """The elements of one matrix that a rank updates.

    The rank has a *part* of the matrix, cut along one dimension or whole, and of this part a run of elements.

    Attributes:
        number: of the matrix in its parameter; 0 if the parameter is a matrix, else that of the expert, and -1 if the matrix has
            other parameters too.
        offset: first of the elements, counted in the flattened tensor that the rank updates.
        start: first of them, counted in the flattened part.
        stop: behind the last one.
        shape: of the whole matrix.
        axis: along which the part is cut, or None.
        bounds: start and stop of the runs of the part along it.
    """

    number: int
    offset: int
    start: int
    stop: int
    shape: tuple[int, int]
    axis: int | None = None
    bounds: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Return whether these are all elements of the matrix."""
        return self.elements == self.shape[0] * self.shape[1]

    @property
    def _width(self) -> int:
        """Return the columns of the part."""
        return self._length if self.axis == 1 else self.shape[1]

    @property
    def _length(self) -> int:
        """Return the length of the part along its axis."""
        return sum(stop - start for start, stop in intervals(self.bounds))

    def put(self, whole: torch.Tensor, elements: torch.Tensor) -> None:
        """Copy these elements, ``[elements]``, to their places in the whole matrix."""
        for mine, theirs in self._pairs(whole, elements):
            theirs.copy_(mine)

    def take(self, whole: torch.Tensor, elements: torch.Tensor) -> None:
        """Copy these elements out of the whole matrix, into ``elements``."""
        for mine, theirs in self._pairs(whole, elements):
            mine.copy_(theirs)

    def _pairs(self, whole: torch.Tensor, elements: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield blocks of the elements with the same blocks of the whole matrix."""
        width = self._width
        for offset, rows, first_row, first_column, columns in self._blocks(width):
            block = elements[offset : offset + rows * columns].view(rows, columns)
            across = self._runs(first_row, rows, 0)
            along = self._runs(first_column, columns, 1)
            for row, here_row, some_rows in across:
                for column, here_column, some_columns in along:
                    mine = block[here_row : here_row + some_rows, here_column : here_column + some_columns]
                    yield mine, whole[row : row + some_rows, column : column + some_columns]

    def _blocks(self, width: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield rectangles that the run is made of: its offset in the run, rows, first row, first column, columns."""
        at = self.start
        while at < self.stop:
            row, column = divmod(at, width)
            if column == 0 and self.stop - at >= width:
                rows = (self.stop - at) // width
                yield at - self.start, rows, row, 0, width
                at += rows * width
            else:
                columns = min(width - column, self.stop - at)
                yield at - self.start, 1, row, column, columns
                at += columns

    def _runs(self, first: int, count: int, axis: int) -> list[tuple[int, int, int]]:
        """Return runs of a block along an axis: place in the whole matrix, place in the block, length."""
        if axis != self.axis:
            return [(first, 0, count)]
        found, begin = [], 0
        for start, stop in intervals(self.bounds):
            low, high = max(first, begin), min(first + count, begin + stop - start)
            if low < high:
                found.append((start + low - begin, low - first, high - low))
            begin += stop - start
        return found


def regions_of(
    shape: Sequence[int],
    axis: int | None,
    bounds: Sequence[int] | None,
    start: int,
    stop: int,
    join: Join | None = None,
) -> list[Region]:
    """Return the regions of a parameter that is a matrix or a stack of matrices, by matrix.

    Args:
        shape: of the whole parameter.
        axis: along which tensor parallelism cuts it, or None.
        bounds: start and stop of the runs that this rank has along it.
        start: first element that this rank updates, counted in its flattened part of the parameter.
        stop: behind the last one.
        join: if it is a part of a matrix; tensor parallelism cuts it along the same axis or not at all.
    """
    if join is not None:
        whole = (0, shape[join.axis])
        there = tuple(join.start + each for each in (whole if axis is None else bounds or ()))
        length = sum(last - first for first, last in intervals(there))
        size = length * join.shape[1 - join.axis]
        stop = min(stop, size)
        return [Region(-1, 0, start, stop, join.shape, join.axis, there)] if start < stop else []
    rows, columns = shape[-2:]
    is_stack = len(shape) == 3
    cut = tuple(bounds or ()) if axis is not None else ()
    numbers = list(range(shape[0])) if is_stack else [0]
    within: int | None = axis
    if is_stack and axis is not None:
        within = None if axis == 0 else axis - 1
        if axis == 0:
            numbers = [number for first, last in intervals(cut) for number in range(first, last)]
            cut = ()
    sizes = [rows, columns]
    if within is not None:
        sizes[within] = sum(last - first for first, last in intervals(cut))
    each = sizes[0] * sizes[1]
    found = []
    for place, number in enumerate(numbers):
        low, high = max(start, place * each), min(stop, (place + 1) * each)
        if low < high:
            begin = place * each
            found.append(Region(number, low - start, low - begin, high - begin, (rows, columns), within, cut))
    return found
