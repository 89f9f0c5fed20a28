"""Regions as runs of elements: what two regions share is what sets of elements say."""

from __future__ import annotations

import random

import pytest
import torch

from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_runtime.reshape.runs import intersect, runs_of, take_runs, write_runs


def _region(draw: random.Random, shape: tuple[int, ...]) -> TensorRegion:
    axis, bounds = draw.choice([None, *range(len(shape))]), None
    if axis is not None:
        runs = draw.randint(1, min(3, (shape[axis] + 1) // 2))
        bounds = tuple(sorted(draw.sample(range(shape[axis] + 1), 2 * runs)))
    region = TensorRegion.of(shape, axis, bounds)
    if draw.random() < 0.5:
        return region
    first = draw.randint(0, region.slice_elements)
    return TensorRegion.of(shape, axis, bounds, (first, draw.randint(first, region.slice_elements)))


@pytest.mark.parametrize("seed", range(4))
def test_what_two_regions_share(seed):
    draw = random.Random(seed)
    for _ in range(100):
        shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3)))
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        wanted, given = _region(draw, shape), _region(draw, shape)
        wants, has = (r.cut(whole).reshape(-1)[r.first : r.last].clone() for r in (wanted, given))
        share = intersect(runs_of(wanted), runs_of(given))
        target = torch.full((wanted.elements,), -1)
        write_runs(target, share.here, share.lengths, take_runs(has, share.there, share.lengths))
        there = set(has.tolist())
        assert target.tolist() == [element if element in there else -1 for element in wants.tolist()], (wanted, given)
        assert share.elements == len(there & set(wants.tolist()))


def test_many_uneven_runs_are_picked_one_by_one():
    places = torch.tensor([3 * n + n % 2 for n in range(200)])
    lengths = torch.tensor([1 + n % 2 for n in range(200)])
    flat = torch.arange(700)
    expected = torch.cat([flat[p : p + n] for p, n in zip(places.tolist(), lengths.tolist(), strict=True)])
    assert torch.equal(take_runs(flat, places, lengths), expected)
    target = torch.full((700,), -1)
    write_runs(target, places, lengths, expected)
    assert torch.equal(target[expected], expected)
    assert int((target >= 0).sum()) == len(expected)


def test_neighbouring_runs_are_one():
    assert len(runs_of(TensorRegion.of((6, 4), 1, (0, 4))).starts) == 1
    assert len(runs_of(TensorRegion.of((6, 4), 0, (1, 2, 2, 5))).starts) == 1
