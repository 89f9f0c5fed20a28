"""Weights of distributed modules: drawn whole, one after the other, from a generator all ranks share, then sliced.

What tensor parallel ranks hold together is therefore what one rank would have drawn, whatever their number. Each
parameter has random numbers of its own, so a rank draws only the parameters that it holds.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.parameters.deferred_creation import Deferral
from smp_runtime.tensor_parallel.random_tracker import draw_seed, mix_seeds
from smp_runtime.tensors.torch_private import without_modes

if TYPE_CHECKING:
    from smp_runtime.parameters.registry import TensorSlice
    from smp_runtime.tensor_parallel.group import TensorGroup

#: Writes a whole weight in place, with random numbers from the generator.
Fill = Callable[[torch.Tensor, torch.Generator], object]


class _Stream(threading.local):
    """Where the parameters made now get their random numbers from."""

    group: TensorGroup | None = None
    #: The ranks agree on it when the first number is drawn. It is a tensor without a value if the creation is deferred.
    seed: int | torch.Tensor | None = None
    count: int = 0
    #: Of parameters made without values, what writes them.
    unwritten: dict[int, Callable[[], None]] | None = None


_stream = _Stream()


@contextlib.contextmanager
def weight_stream(group: TensorGroup) -> Iterator[None]:
    """Let all parameters made inside the block share one seed, which the group's first rank draws.

    All ranks enter the block together. The outermost block counts: a model is drawn from one seed. A module that a
    script makes outside a model has a seed of its own.
    """
    if _stream.group is not None:
        yield
        return
    _stream.group, _stream.seed, _stream.count = group, None, 0
    try:
        yield
    finally:
        _stream.group = None


@contextlib.contextmanager
def without_values(waiting: dict[int, Callable[[], None]]) -> Iterator[None]:
    """Make parameters inside the block without values.

    For each parameter, by its id, ``waiting`` gets a function that draws its values. Call the functions that you
    need inside the same :func:`weight_stream`.
    """
    before, _stream.unwritten = _stream.unwritten, waiting
    try:
        yield
    finally:
        _stream.unwritten = before


def make_parameter(
    shape: tuple[int, ...],
    fill: Fill,
    where: TensorSlice | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """Create a parameter with its values: the whole, or this rank's part of it.

    If creation is deferred, the parameter gets its values later.

    Args:
        shape: of the whole.
        fill: draws the whole; it exists only inside this call.
        where: the part that this rank has, or None for the whole.
        dtype: None means PyTorch's default.
    """
    # Also of parameters that this rank does not draw: the ranks must number them alike.
    _stream.count += 1
    number, local_shape = _stream.count, shape if where is None else where.local_shape
    dtype = dtype or torch.get_default_dtype()
    deferral = Deferral.current()
    if deferral is None and _stream.unwritten is None:
        # Past whatever records or redirects the creation of tensors: the part is small and wanted now.
        with without_modes(), torch.no_grad():
            mine = _part(int(_seed()), number, shape, fill, where)
            return nn.Parameter(mine.to(device=device, dtype=dtype, copy=where is not None).contiguous())
    parameter = nn.Parameter(torch.empty(local_shape, dtype=dtype, device=device if deferral is None else "cpu"))

    def write() -> None:
        if deferral is not None:
            deferral.later(_write, parameter.data, _seed(), number, shape, fill, where)
        else:
            with without_modes(), torch.no_grad():
                _write(parameter, _seed(), number, shape, fill, where)

    if _stream.unwritten is None:
        write()
    else:
        _stream.unwritten[id(parameter)] = write
    return parameter


def _seed() -> int | torch.Tensor:
    """Return the stream's seed; the first call draws it."""
    if _stream.group is None:
        raise AssertionError("parameters of distributed modules are made inside weight_stream")
    if _stream.seed is None:
        deferral = Deferral.current()
        if deferral is None:
            _stream.seed = _stream.group.agree(draw_seed())
        else:
            # The agreement is a collective: it waits until all ranks create their parameters.
            _stream.seed = torch.empty((), dtype=torch.int64, device="cpu")
            deferral.later(_write_seed, _stream.seed, _stream.group)
    return _stream.seed


def _part(seed: int, number: int, shape: tuple[int, ...], fill: Fill, where: TensorSlice | None) -> torch.Tensor:
    """Draw this rank's part of the weight ``number`` of a stream; the whole exists only inside this call."""
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    fill(whole, torch.Generator().manual_seed(mix_seeds(seed, number)))
    return whole if where is None else where.cut(whole)


def _write_seed(target: torch.Tensor, group: TensorGroup) -> None:
    target.fill_(group.agree(draw_seed()))


def _write(
    target: torch.Tensor,
    seed: int | torch.Tensor,
    number: int,
    shape: tuple[int, ...],
    fill: Fill,
    where: TensorSlice | None,
) -> None:
    target.copy_(_part(int(seed), number, shape, fill, where))


def normal_fill(std: float) -> Fill:
    """Return a fill with normal numbers around 0."""
    return lambda whole, generator: whole.normal_(0.0, std, generator=generator)


def constant_fill(value: float) -> Fill:
    """Return a fill with one number everywhere."""
    return lambda whole, generator: whole.fill_(value)


def uniform_for(fan_in: int) -> Fill:
    """Return the fill of ``nn.Linear`` for weight and bias: uniform within 1/√fan_in."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0  # as PyTorch does without inputs
    return lambda whole, generator: whole.uniform_(-bound, bound, generator=generator)
