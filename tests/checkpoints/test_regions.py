"""Copying between parts of tensors: every element that two parts share, and no other."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from smp_runtime.checkpoint.files.manifest import Manifest, Piece, TensorRecord
from smp_runtime.checkpoint.files.reader import CheckpointReader
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion, copy_common
from smp_runtime.errors import CheckpointError


def _slice(chance, shape, axis):
    if axis is None or chance.random() < 0.3:
        return TensorRegion.of(shape)
    count = chance.randint(1, max(1, (shape[axis] + 1) // 2))  # of runs, which are joined
    return TensorRegion.of(shape, axis, tuple(sorted(chance.sample(range(shape[axis] + 1), 2 * count))))


def _part(chance, region):
    first = chance.randrange(region.slice_elements)
    flat = (first, chance.randint(first, region.slice_elements))
    return TensorRegion.of(region.shape, region.axis, region.cuts, flat)


def _values(whole, region):
    runs = [(0, None)] if region.axis is None else zip(region.cuts[::2], region.cuts[1::2], strict=True)
    parts = [whole.movedim(region.axis or 0, 0)[start:stop].movedim(0, region.axis or 0) for start, stop in runs]
    return torch.cat(parts, region.axis or 0).reshape(-1)[region.first : region.last].clone()


def test_random_parts():
    chance = random.Random(0)
    for _ in range(2000):
        shape = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 4)))
        axis = chance.choice([None, *range(len(shape))])
        whole = torch.arange(math.prod(shape)).view(shape)
        wanted, given = _slice(chance, shape, axis), _part(chance, _slice(chance, shape, axis))
        if wanted.same_slice(given):
            wanted = _part(chance, wanted)
        target = torch.full((wanted.elements,), -1)
        copied = copy_common(target, wanted, _values(whole, given), given)
        there = set(_values(whole, given).tolist())
        expected = [value if value in there else -1 for value in _values(whole, wanted).tolist()]
        assert target.tolist() == expected, (wanted, given)
        assert copied == sum(value >= 0 for value in expected)
        assert copied == 0 or wanted.overlaps(given)


class _Files(CheckpointReader):
    """A checkpoint of one tensor, cut into pieces."""

    def __init__(self, whole, axis, pieces):
        manifest = Manifest("t", parameters={"w": TensorRecord(tuple(whole.shape), "int64", tensor_axis=axis)})
        written = [Piece.from_list(piece.to_list()) for piece in pieces]
        manifest.pieces = {str(n): {"module": {"w": piece}} for n, piece in enumerate(written)}
        super().__init__(None, manifest)
        for n, piece in enumerate(pieces):
            value = _values(whole, TensorRegion.of_piece(manifest.parameters["w"], piece))
            self._files[str(n)] = {"module": {"w": value}}


def test_any_part_of_any_division():
    """Slices along one axis, each divided in flat parts, read in slices along the same or another axis."""
    chance = random.Random(1)
    for _ in range(500):
        shape = tuple(chance.randint(2, 6) for _ in range(chance.randint(1, 3)))
        whole = torch.arange(math.prod(shape)).view(shape)
        axis = chance.randrange(len(shape))
        runs = list(itertools.pairwise(sorted({0, shape[axis], *(chance.randint(1, shape[axis]) for _ in range(3))})))
        pieces = []
        for mine in (runs[::2], runs[1::2]) if chance.random() < 0.5 else ([run] for run in runs):
            elements = math.prod(shape) // shape[axis] * sum(stop - start for start, stop in mine)
            cuts = sorted({0, elements, *(chance.randint(0, elements) for _ in range(2))})
            bounds = tuple(itertools.chain.from_iterable(mine))
            pieces += [Piece(bounds, flat) for flat in itertools.pairwise(cuts)]
        reader = _Files(whole, axis, pieces)
        wanted = _part(chance, _slice(chance, shape, chance.choice([None, *range(len(shape))])))
        target = torch.full((wanted.elements,), -1)
        reader.fill(target, wanted, "module", "w")
        assert torch.equal(target, _values(whole, wanted))
        assert torch.equal(reader.whole("module", "w"), whole)
        if len(pieces) > 1:
            lacking = _Files(whole, axis, pieces[1:])
            with pytest.raises(CheckpointError, match=r"of the .* wanted elements of module of w"):
                lacking.whole("module", "w")
