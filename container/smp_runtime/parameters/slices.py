"""Which part of a tensor a tensor parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from smp_runtime.parameters.registry import ParameterRecord


@dataclass(frozen=True)
class TensorSlice:
    """Which part of a whole tensor a rank has.

    Attributes:
        shape: of the whole.
        dim: along which it is split.
        start: first index of this rank's part.
        stop: behind its last.
        size: longest part along ``dim`` that a rank has.
    """

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, rank: int, ranks: int) -> TensorSlice:
        """Parts of equal size, but for the last when the number of ranks does not divide."""
        size = -(-shape[dim] // ranks)
        return cls(shape, dim, min(rank * size, shape[dim]), min((rank + 1) * size, shape[dim]), size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor; a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


def part_of(record: ParameterRecord, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value that may be whole."""
    axis, bounds = record.placement.tensor_axis, record.placement.tensor_slice
    if axis is None or bounds is None or value.shape == record.parameter.shape or tuple(value.shape) != record.shape:
        return value
    return value.narrow(axis, bounds[0], bounds[1] - bounds[0])
