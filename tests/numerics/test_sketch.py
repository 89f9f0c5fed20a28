"""A tensor's numbers add up over its parts, and say how far two tensors are apart."""

from __future__ import annotations

import math

import pytest
import torch

from smp_estimator.numerics.recorded_run import estimate_distance
from smp_records.numerics import PROJECTIONS, SMALL
from smp_runtime.checkpoint.files.tensor_regions import TensorRegion
from smp_tools.numerics.journal import part_name
from smp_tools.numerics.sketch import Sketch, bits_of, sketch_of


def projections(sketch: Sketch) -> list[float]:
    return sketch.numbers[2 : 2 + PROJECTIONS].tolist()


def added(parts: list[Sketch]) -> tuple[float, list[float], int]:
    square = sum(float(part.numbers[0]) for part in parts)
    sums = [sum(column) for column in zip(*map(projections, parts), strict=True)]
    return square, sums, sum(int(part.bits) for part in parts) % 2**64


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), (1, 9), ()])
def test_parts_of_a_tensor_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    whole = torch.randn(shape)
    expected = added([sketch_of(whole, TensorRegion.of(shape), precise=True)])
    slices: list[list[TensorRegion]] = [[TensorRegion.of(shape)]]
    for axis, length in enumerate(shape):
        slices.append(
            [TensorRegion.of(shape, axis, (0, length // 2)), TensorRegion.of(shape, axis, (length // 2, length))]
        )
        if length > 3:  # two runs on each rank, as queries and keys have
            slices.append([TensorRegion.of(shape, axis, (0, 1, 3, length)), TensorRegion.of(shape, axis, (1, 3))])
    for regions in slices:
        for count in (1, 3):  # and each slice shared out
            parts = []
            for region in regions:
                flat, size = region.cut(whole).reshape(-1), region.slice_elements
                for index in range(count):
                    first, last = index * size // count, (index + 1) * size // count
                    shard = TensorRegion(region.shape, region.axis, region.cuts, first, last)
                    parts.append(sketch_of(flat[first:last], shard, precise=True))
            square, sums, bits = added(parts)
            assert square == pytest.approx(expected[0], rel=1e-6)
            assert sums == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
            assert bits == expected[2]


def test_batches_add_up_however_they_are_divided() -> None:
    torch.manual_seed(3)
    for batch in (torch.randn(8, 5, 6), torch.randint(50, (8, 5)), torch.randn(8)):
        whole = added([sketch_of(batch)])
        parts = added([sketch_of(part) for part in (batch[5:], batch[:2], batch[2:5])])
        assert parts[0] == pytest.approx(whole[0], rel=1e-6)
        assert parts[1] == pytest.approx(whole[1], rel=1e-5, abs=1e-4)


def test_directions_are_of_mean_0_and_variance_1_and_do_not_repeat() -> None:
    shape = (200, 100)
    ones = torch.eye(100).repeat(2, 1)  # each row and column once or twice
    found = torch.tensor([projections(sketch_of(torch.randn(shape), TensorRegion.of(shape))) for _ in range(40)])
    assert float((found.square().mean() / (200 * 100)).sqrt()) == pytest.approx(1.0, abs=0.15)
    assert abs(float(torch.corrcoef(found.T).triu(1).abs().max())) < 0.7
    assert len(set(projections(sketch_of(ones, TensorRegion.of(shape))))) == PROJECTIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_projections_tell_how_far_tensors_are_apart(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    one = torch.randn(64, 96).to(dtype)
    other = one + (0.05 * torch.randn(64, 96)).to(dtype)
    region = TensorRegion.of((64, 96))
    expected = float((one.double() - other.double()).norm())
    found = estimate_distance(projections(sketch_of(one, region)), projections(sketch_of(other, region)))
    assert expected / 3 < found < 3 * expected
    assert float(sketch_of(one, region).numbers[0]) == pytest.approx(float(one.double().square().sum()), rel=1e-5)
    assert float(sketch_of(one, region).numbers[1]) == float(one.abs().max())


def test_permuted_elements_are_seen() -> None:
    whole = torch.randn(6, 8)
    for permuted in (whole.roll(1, 0), whole.roll(1, 1), whole.flip(0)):
        one, other = (projections(sketch_of(tensor, TensorRegion.of((6, 8)))) for tensor in (whole, permuted))
        assert estimate_distance(one, other) > 0.2 * float((whole - permuted).norm())


def test_bits_tell_a_single_changed_bit() -> None:
    whole = torch.randn(100)
    changed = whole.clone()
    changed.view(torch.int32)[17] += 1
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        one, other = whole.to(kind), changed.to(kind)
        expected = int(
            one.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]).sum(dtype=torch.int64)
        )
        assert int(bits_of(one)) == expected
        assert (int(bits_of(other)) == expected) == torch.equal(one, other)
    assert int(bits_of(whole)) + 1 == int(bits_of(changed))
    assert int(bits_of(torch.empty(0))) == 0


def test_numbers_that_are_not_finite_stay_so() -> None:
    for bad in (math.inf, math.nan):
        found = sketch_of(torch.tensor([1.0, bad, 2.0]), TensorRegion.of((3,)))
        assert not math.isfinite(float(found.numbers[0]))


def test_small_elements_are_counted_without_zeros() -> None:
    gradient = torch.tensor([1.0] * 96 + [0.0, 1e-2, 1e-4, 1e-7])
    counts = sketch_of(gradient, TensorRegion.of((100,)), counts_small=True).numbers[2 + PROJECTIONS :].tolist()
    assert dict(zip(SMALL, counts, strict=True)) == {1e-5: 1, 1e-3: 2, 1e-1: 3}


def test_names_of_parts() -> None:
    assert part_name(TensorRegion.of((4, 6))) == ""
    assert part_name(TensorRegion.of((4, 6), 1, (0, 3))) == "axis 1: 0,3"
    assert part_name(TensorRegion.of((4, 6), 1, (0, 3), (2, 5))) == "axis 1: 0,3[2:5]"
    assert part_name(TensorRegion.of((4, 6), None, None, (2, 5))) == "[2:5]"
    # Two ranks have copies exactly where they have the same part.
    assert part_name(TensorRegion.of((4, 6), 0, (0, 2))) != part_name(TensorRegion.of((4, 6), 1, (0, 2)))
