"""A tensor as a few numbers: sums over its elements that add up over shards, microbatches and replicas.

Each tensor is projected onto random directions. A direction's element at an index is a product of one number per axis. Each
of these numbers depends only on the axis and the index along it. So a shard can project its own elements wherever it is cut,
and the projections of shards add up to that of the whole.

The mean square of the difference of two projections is the expected squared distance of the two tensors. So two files show
how far apart two tensors are that were never stored.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from smp_records.numerics import PROJECTIONS, SMALL
from smp_runtime.parameters.registry import intervals

if TYPE_CHECKING:
    from smp_runtime.checkpoint.files.tensor_regions import TensorRegion

#: Elements that are projected at once, in float64.
_CHUNK = 1 << 22
#: Bit patterns of elements that are summed at once: in float64 they stay in the cache of a processor.
_SUMMED = 1 << 20
#: Of a slice with no more elements the directions are kept: most parameters are small, and so is the time for their elements.
_FEW = 2048

#: Real types that PyTorch converts; the others are storage only, such as two numbers of 4 bits in a byte. Older releases lack some.
_NAMES = (
    *(
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_COMPUTABLE = frozenset(getattr(torch, name) for name in _NAMES if hasattr(torch, name))

#: By the bytes of an element, the whole numbers of that size.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Constants of the finaliser of splitmix64, as signed numbers.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass
class Sketch:
    """The numbers of one tensor, on the device that has it; nothing waits for them yet.

    Attributes:
        numbers: float64, ``[2 + PROJECTIONS + len(small)]``: sum of squares, greatest absolute value, projections, counts of
            small elements where they were asked for.
        bits: int64, ``[1]``.
    """

    dtype: str
    columns: int
    elements: int
    numbers: torch.Tensor
    bits: torch.Tensor


@functools.lru_cache(maxsize=256)
def _line(axis: int, length: int, device: torch.device) -> torch.Tensor:
    """Return the directions along an axis, counted from the last.

    float64, ``[length, PROJECTIONS]``, uniform with variance 1.
    """
    place = torch.arange(length, device=device)[:, None] * PROJECTIONS + torch.arange(PROJECTIONS, device=device)
    x = (place + 1) * _GOLDEN + _signed(axis * _FIRST)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ _shifted(x, shift)) * factor
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() * 2.0**-52 - 1.0) * math.sqrt(3.0)


def _signed(number: int) -> int:
    """Return the number modulo 2^64 as a signed one, the only kind that PyTorch accepts.

    PyTorch refuses larger numbers, such as those of a fourth axis.
    """
    return (number + 2**63) % 2**64 - 2**63


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros; PyTorch has only signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rows(region: TensorRegion, device: torch.device) -> torch.Tensor:
    """Return the product of the directions along all axes but the last: ``[rows of the slice, PROJECTIONS]``."""
    shape = region.shape
    found = torch.ones(1, PROJECTIONS, dtype=torch.float64, device=device)
    for axis in range(len(shape) - 1):
        line = _along(region, axis, device)
        found = (found[:, None] * line[None]).reshape(-1, PROJECTIONS)
    return found


def _along(region: TensorRegion, axis: int, device: torch.device) -> torch.Tensor:
    """Return the directions along an axis at the indices of a slice."""
    line = _line(axis - len(region.shape), region.shape[axis], device)
    if axis != region.axis:
        return line
    return torch.cat([line[start:stop] for start, stop in intervals(region.cuts)])


@torch.no_grad()
def plain_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as a strided tensor of real numbers, on the same device, without a wait for it.

    Complex numbers get one more axis, ``[…, 2]``. Of a type that PyTorch cannot compute with, the bytes count.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = _joined_rows(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    if tensor.dtype in _COMPUTABLE:
        return tensor
    return tensor.contiguous().view(torch.uint8)


def _joined_rows(nested: torch.Tensor) -> torch.Tensor:
    """Return the parts of a nested tensor as one: row after row if the parts have rows of one length, else flat."""
    parts = nested.unbind()
    lengths = {part.shape[-1] for part in parts if part.dim()}
    rows = []
    for part in parts:
        if not part.dim():
            continue
        has_rows = len(lengths) == 1 and part.dim() > 1
        rows.append(part.flatten(0, -2) if has_rows else part.reshape(-1))
    return torch.cat(rows)


def plain_region(region: TensorRegion, tensor: torch.Tensor) -> TensorRegion:
    """Return where :func:`plain_numbers` of a part of a tensor lie: of a complex one each element is two."""
    if not tensor.is_complex():
        return region
    return replace(region, shape=(*region.shape, 2), first=region.first * 2, last=region.last * 2)


@torch.no_grad()
def sketch_of(
    tensor: torch.Tensor, region: TensorRegion | None = None, *, counts_small: bool = False, precise: bool = False
) -> Sketch:
    """Return the sketch of a tensor, or of the part of a tensor that ``region`` describes.

    Args:
        tensor: ``[region.elements]`` in any shape. Without a region it is a batch, ``[…, features]``: the origin of its rows
            does not matter then, so any division into microbatches adds up to the same numbers.
        counts_small: whether to count elements so small that rounding may change their sign.
        precise: whether to sum projections in float64, so that their difference shows a small change, and to sum bits.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = plain_numbers(tensor)
    region = None if region is None else plain_region(region, tensor)
    flat = values.reshape(-1)
    whole = tuple(values.shape) if region is None else region.shape
    columns = whole[-1] if len(whole) else 1
    elements = flat.numel()
    if not elements:
        numbers = torch.zeros(2 + PROJECTIONS + len(SMALL) * counts_small, dtype=torch.float64, device=flat.device)
        return Sketch(dtype, columns, 0, numbers, numbers.new_zeros(1, dtype=torch.int64))
    kind = torch.float64 if precise or not flat.is_floating_point() or flat.dtype is torch.float64 else torch.float32
    wide = flat if flat.dtype in (torch.float32, torch.float64) else flat.to(kind)
    square, (low, high) = _squares(wide), wide.aminmax()
    projections = _of_batch(wide, whole, kind) if region is None else _of_region(wide, region, kind)
    parts = [torch.stack([square, torch.maximum(-low, high)]).double(), projections]
    if counts_small:
        sizes, limits = wide.abs(), (square / elements).sqrt() * _small(wide.dtype, wide.device)
        zeros = elements - torch.count_nonzero(sizes)
        if elements <= _FEW:
            counts = torch.count_nonzero(sizes < limits[:, None], dim=1)
        else:
            counts = torch.stack([_count_below(sizes, limit) for limit in limits])
        parts.append((counts - zeros).clamp_min(0).double())
    return Sketch(dtype, columns, elements, torch.cat(parts), bits_of(flat) if precise else _no_bits(flat.device))


def _squares(wide: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, in the data type of the tensor."""
    if wide.numel() <= _CHUNK:
        return torch.dot(wide, wide)
    return torch.stack([torch.dot(part, part) for part in wide.split(_CHUNK)]).double().sum().to(wide.dtype)


def _count_below(sizes: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the number of elements smaller than ``limit``, as float64."""
    # Ones of the elements' own type are written and added several times faster than truth values; each sum is exact.
    sums = [torch.lt(part, limit, out=torch.empty_like(part)).sum() for part in sizes.split(_CHUNK)]
    return sums[0].double() if len(sums) == 1 else torch.stack(sums).double().sum()


@functools.lru_cache(maxsize=16)
def _small(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the limits for small elements, ``[len(SMALL)]``."""
    return torch.tensor(SMALL, dtype=dtype, device=device)


@functools.lru_cache(maxsize=16)
def _no_bits(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@torch.no_grad()
def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits, read as integers, modulo 2^64: int64, ``[1]``."""
    flat = plain_numbers(tensor).reshape(-1)
    whole = flat.view(BITS[flat.element_size()])
    if flat.element_size() == 8:
        return whole.sum().view(1)
    # Exact, since each sum of so many is below 2^53; and much faster than sums of whole numbers.
    sums = [part.double().sum() for part in whole.split(_SUMMED)]
    return torch.stack(sums).long().sum().view(1) if sums else torch.zeros(1, dtype=torch.int64, device=flat.device)


def _of_batch(flat: torch.Tensor, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """Project a batch: its rows are summed first, because all rows count the same.

    Numbers that belong to one sample each are summed too.
    """
    if len(shape) < 2:
        return flat.sum(dtype=torch.float64).expand(PROJECTIONS)
    return flat.view(-1, shape[-1]).to(kind).sum(0).double() @ _line(-1, shape[-1], flat.device)


def _projected(flat: torch.Tensor, columns: torch.Tensor, rows: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Project whole rows, ``[rows × columns]``; returns float64, ``[PROJECTIONS]``."""
    matrix = flat.view(-1, columns.shape[0])
    found = torch.zeros(PROJECTIONS, dtype=torch.float64, device=flat.device)
    step = max(1, _CHUNK // columns.shape[0])
    turned = columns.t().to(kind)  # the thin matrix first: several times faster on a CPU
    for first in range(0, matrix.shape[0], step):
        part = turned @ matrix[first : first + step].to(kind).t()
        found += (part.double() * rows[first : first + step].t()).sum(1)
    return found


@functools.lru_cache(maxsize=256)
def _directions(region: TensorRegion, device: torch.device, kind: torch.dtype) -> torch.Tensor:
    """Return the directions of each element of a small region: ``[PROJECTIONS, elements]``."""
    rows, columns = _rows(region, device), _along(region, len(region.shape) - 1, device)
    whole = (rows[:, None] * columns[None]).reshape(-1, PROJECTIONS)
    return whole[region.first : region.last].t().to(kind).contiguous()


def _of_region(flat: torch.Tensor, region: TensorRegion, kind: torch.dtype) -> torch.Tensor:
    if not region.shape:
        return flat.double().expand(PROJECTIONS)
    if region.slice_elements <= _FEW:
        return (_directions(region, flat.device, kind) @ flat.to(kind)).double()
    rows, columns = _rows(region, flat.device), _along(region, len(region.shape) - 1, flat.device)
    width = columns.shape[0]
    found = torch.zeros(PROJECTIONS, dtype=torch.float64, device=flat.device)
    at, first, last = 0, region.first, region.last
    while first < last:
        row, begin = divmod(first, width)
        whole = 0 if begin else (last - first) // width
        count = whole * width if whole else min(width - begin, last - first)
        piece = flat[at : at + count]
        if whole:
            found += _projected(piece, columns, rows[row : row + whole], kind)
        else:  # a part of one row
            found += (columns[begin : begin + count].t().to(kind) @ piece.to(kind)).double() * rows[row]
        at, first = at + count, first + count
    return found
