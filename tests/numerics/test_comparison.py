"""What two files of numbers say: sentences, hints, the table, the picture, and the command."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.platform.command_line import call, flat
from support.training.recorded_steps import HEAD, STEP, changed, value

from smp_estimator.figures.error_growth import save_picture
from smp_estimator.numerics.comparison import _Judge, compare
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.report import write_verdict
from smp_records.numerics import NUMBERS_OF_CALL, PROJECTIONS, RecordedMoment, RecordedValue, head_line, moment_line


def run(values: Iterable[RecordedValue] = STEP, steps: int = 2, name: str = "A", **head: Any) -> RecordedRun:
    return RecordedRun.of(
        name, [(replace(HEAD, **head), [RecordedMoment(step, 0, list(values), "r") for step in range(steps)])]
    )


def first(values: Iterable[RecordedValue]) -> tuple[str, str]:
    found = compare(run(), run(values, name="B")).first
    assert found is not None
    return found.key.phase, found.key.name


def test_equal_runs() -> None:
    found = compare(run(), run(name="B"))
    assert found.is_equal
    assert write_verdict(found) == [f"equal within rounding: {2 * len(STEP)} tensors of 2 step(s)"]


@pytest.mark.parametrize("wrong", [(v.phase, v.name) for v in STEP])
def test_each_tensor_can_be_the_one_that_differs(wrong: tuple[str, str]) -> None:
    assert first(changed(wrong)) == wrong


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        # Forward in the order of the calls, backward the other way round.
        ([("output", "a"), ("output", "b")], ("output", "a")),
        ([("output gradient", "a"), ("output gradient", "b")], ("output gradient", "b")),
        ([("gradient", "a.weight"), ("gradient", "b.weight")], ("gradient", "b.weight")),
        ([("update", "a.weight"), ("gradient", "a.weight")], ("gradient", "a.weight")),
        ([("loss", ""), ("output gradient", "b")], ("loss", "")),
        ([("weight", "b.weight"), ("output", "a")], ("weight", "b.weight")),
    ],
)
def test_the_cause_goes_before_what_it_causes(wrong: list[tuple[str, str]], expected: tuple[str, str]) -> None:
    assert first(changed(*wrong)) == expected


@pytest.mark.parametrize("phase", ["output", "output gradient"])
@pytest.mark.parametrize(("wrong", "expected"), [(1, "a"), (2, "b"), (3, "a")])
def test_a_module_that_is_called_twice_in_a_pipeline_differs_when_its_call_does(
    phase: str, wrong: int, expected: str
) -> None:
    """It is called before and behind another one; an error begins in one of the three calls, and is in those that follow."""
    modules = [("a", 0, 1.0), ("b", 0, 3.0), ("a", NUMBERS_OF_CALL, 2.0)]

    def calls(first: int) -> list[RecordedValue]:
        return [
            value(phase, name, size * (1.1 if at >= first else 1.0), nth=nth, time=float(at))
            for at, (name, nth, size) in enumerate(modules, 1)
        ]

    degrees = {**HEAD.degrees, "pp": 2}
    found = compare(run(calls(9), 1), run(calls(wrong), 1, "B", degrees=degrees)).first
    assert found is not None
    assert found.key.name == expected


def test_rounding_is_no_finding_and_a_little_more_is() -> None:
    for dtype, rounding in (("float32", 2.0**-24), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        typed = [v._replace(dtype=dtype) for v in STEP]
        for times, is_equal in ((2.0, True), (400.0 if dtype == "float32" else 40.0, False)):
            other = [
                value(v.phase, v.name, 1 + times * rounding, time=v.time)._replace(dtype=dtype)
                if v.phase == "output"
                else v
                for v in typed
            ]
            assert compare(run(typed), run(other, name="B")).is_equal is is_equal, (dtype, times)


def test_a_number_that_is_not_finite_in_one_run_only() -> None:
    bad = [v._replace(square=math.nan, projections=(math.nan,) * PROJECTIONS) if v.name == "b" else v for v in STEP]
    found = compare(run(), run(bad, name="B"))
    assert "output of b; not finite in one of the runs" in write_verdict(found)[0]
    assert compare(run(bad), run(bad, name="B")).is_equal  # and alike in both


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("wrong", [(v.phase, v.name) for v in STEP])
def test_any_tensor_may_have_numbers_that_are_not_finite(wrong: tuple[str, str], number: float) -> None:
    bad = [v._replace(square=number, projections=(number,) * PROJECTIONS) if v[:2] == wrong else v for v in STEP]
    for one, other in ((STEP, bad), (bad, STEP)):
        found = compare(run(one, 1), run(other, 1, "B"))
        assert found.first is not None
        assert (found.first.key.phase, found.first.key.name, found.first.error) == (*wrong, math.inf)
        assert not any("times the norm" in line for line in write_verdict(found))
    assert compare(run(bad, 1), run(bad, 1, "B")).is_equal


@pytest.mark.parametrize("wrong", [(v.phase, v.name) for v in STEP])
def test_a_sum_of_squares_alone_may_be_no_number(wrong: tuple[str, str]) -> None:
    bad = [v._replace(square=math.nan) if v[:2] == wrong else v for v in STEP]
    for one, other in ((STEP, bad), (bad, STEP)):
        found = compare(run(one, 1), run(other, 1, "B")).first
        assert found is not None
        assert (found.key.phase, found.key.name) == wrong


def test_other_weights_are_apart_as_far_where_one_is_no_number_in_both_runs() -> None:
    def apart(bad: str) -> float:
        steps = [
            [
                v._replace(square=math.nan, projections=(math.nan,) * PROJECTIONS) if v[:2] == ("weight", bad) else v
                for v in each
            ]
            for each in (STEP, changed(("weight", "b.weight")))
        ]
        one, other = (run(each, 1).moments[0, 0] for each in steps)
        return _Judge(run(), run())._relative_weights((one, other), list(one))

    assert 0.0 < apart("") < apart("a.weight") < math.inf


def test_from_a_step_on_nothing_is_finite_in_both_runs() -> None:
    bad = [v._replace(square=math.nan, projections=(math.nan,) * PROJECTIONS) for v in STEP]

    def diverged(name: str) -> RecordedRun:
        steps = (STEP, STEP, bad, bad)
        return RecordedRun.of(name, [(HEAD, [RecordedMoment(at, 0, list(each), "r") for at, each in enumerate(steps)])])

    found = compare(diverged("A"), diverged("B"))
    assert found.is_equal, write_verdict(found)


def test_the_piece_whose_numbers_are_not_finite_is_named() -> None:
    pieces = [value("output", "a", 1.0, microbatch=at, time=float(at)) for at in range(3)]
    bad = [
        v._replace(square=math.nan, projections=(math.nan,) * PROJECTIONS) if v.microbatch == 1 else v for v in pieces
    ]
    found = compare(run(pieces, 1), run(bad, 1, "B")).first
    assert found is not None
    assert found.microbatches == (1,)


def test_hints() -> None:
    summed = [value(v.phase, v.name, 4.0, time=v.time) if "gradient" in v.phase else v for v in STEP]
    said = write_verdict(compare(run(), run(summed, name="B")))
    assert said[0].startswith("differs first at step 0, rank(s) 0: output gradient of b; relative error 0.75")
    assert "the second run has 4 times the norm" in said[1]
    assert "1/4 of the norm" in write_verdict(compare(run(summed), run(name="B")))[1]
    assert "without a seed" in write_verdict(compare(run(), run(changed(("weight", "a.weight")), name="B")))[1]
    assert "mean over tokens" in write_verdict(compare(run(), run(changed(("loss", "")), name="B")))[1]
    assert (
        "the optimizer has other settings"
        in write_verdict(compare(run(), run(changed(("update", "a.weight")), name="B")))[1]
    )


def test_missing_parts_and_other_batches() -> None:
    half = [v._replace(elements=8) if v.phase == "gradient" and v.name == "b.weight" else v for v in STEP]
    assert "gradient of b.weight; 16 elements in A, 8 in B" in write_verdict(compare(run(), run(half, name="B")))[0]
    more = [v._replace(elements=32) if v.phase == "input" else v for v in STEP]
    assert "16 numbers of the batch in A, 32 in B" in write_verdict(compare(run(), run(more, name="B")))[0]
    parts = [v._replace(elements=8) if (v.phase, v.name) == ("output", "b") else v for v in STEP]
    found = compare(run(), run(parts, name="B"))
    assert found.is_equal
    assert [key.name for key in found.alone] == ["b"]


def test_copies_that_differ_are_found_in_one_run() -> None:
    wrong = changed(("weight", "b.weight"))
    heads = [replace(HEAD, rank=rank, world=2) for rank in (0, 1)]
    files = [(head, [RecordedMoment(0, 0, values, "r")]) for head, values in zip(heads, (STEP, wrong), strict=True)]
    drifting = RecordedRun.of("B", files)
    said = write_verdict(compare(drifting, drifting))
    assert said == [
        "copies differ first in B at step 0: weight of b.weight is not the same on ranks 0 and 1, which should have copies; "
        "relative distance 0.29"
    ]


def test_ranks_and_microbatches_with_the_error_are_told() -> None:
    def split(factor: float) -> list[RecordedValue]:
        parts = [value("output", "b", 1.0, microbatch=mb, elements=4, time=2.0) for mb in range(4)]
        parts[2] = value("output", "b", factor, microbatch=2, elements=4, time=2.0)
        return [v for v in STEP if (v.phase, v.name) != ("output", "b")] + parts

    found = compare(run(split(1.0)), run(split(1.5), name="B")).first
    assert found is not None
    assert found.microbatches == (2,)


def test_random_states_are_noted_for_the_same_degrees() -> None:
    other = RecordedRun.of("B", [(HEAD, [RecordedMoment(0, 0, STEP, "s")])])
    assert "random numbers differ from step 0 on, first on rank 0" in compare(run(), other).notes[0]


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_command_and_its_picture(tmp_path: Path, ending: str) -> None:
    for name, values in (("a", STEP), ("b", changed(("output", "b")))):
        (tmp_path / name).mkdir()
        text = head_line(HEAD) + moment_line(RecordedMoment(0, 0, list(values), "r"))
        (tmp_path / name / "numerics-rank00000.jsonl").write_text(text)
    a, b, picture = str(tmp_path / "a"), str(tmp_path / "b"), tmp_path / f"growth.{ending}"
    said = flat(call("diff", a, b, "--picture", str(picture), code=1))
    assert "differs first at step 0, rank(s) 0: output of b" in said
    assert picture.stat().st_size > 5_000
    assert "equal within rounding: 12 tensors" in flat(call("diff", a, a))
    assert "holds no numerics-rank" in flat(call("diff", a, str(tmp_path / "none"), code=1))
    assert "cannot be written" in flat(call("diff", a, a, "--picture", str(tmp_path / "no" / "folder.svg"), code=1))
    assert "the ending says the format" in flat(call("diff", a, a, "--picture", str(tmp_path / "x.word"), code=1))


def test_a_run_without_common_steps_is_no_equal_run(tmp_path: Path) -> None:
    other = RecordedRun.of("B", [(HEAD, [RecordedMoment(9, 0, STEP, "r")])])
    assert "nothing was compared" in write_verdict(compare(run(), other))[0]
    assert save_picture(compare(run(), other), str(tmp_path / "empty.svg")).exists()
