"""Files of numbers: appended to, read while they are written, and refused by name where they are something else."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_records.numerics import (
    PROJECTIONS,
    Guards,
    Head,
    RecordedMoment,
    RecordedValue,
    Trial,
    every_steps,
    head_line,
    moment_line,
    parse,
)

HEAD = Head(1, 0, 1, {"pp": 1, "tp": 1, "rdp": 1, "sharded": 1}, {"pp": 0, "tp": 0, "rdp": 0}, 1, 1, 1, 0.0)


def value(name: str = "layer", phase: str = "output", **more: object) -> RecordedValue:
    found = RecordedValue(phase, name, 0, 0, 0, "", "float32", 4, 8, 2.0, 1.0, 7, (0.5,) * PROJECTIONS, (), 1.0)
    return found._replace(**more)


def lines(*moments: RecordedMoment, head: Head = HEAD) -> list[str]:
    return [head_line(head), *map(moment_line, moments)]


def test_what_is_written_is_read() -> None:
    values = [
        value(),
        value(square=math.inf, projections=(math.nan, -math.inf, *(1.0,) * (PROJECTIONS - 2))),
        value(small=(1, 2, 3)),
    ]
    head, (moment,) = parse(lines(RecordedMoment(3, 1, values, "ab")), "file")
    assert head == HEAD
    assert (moment.step, moment.call, moment.random) == (3, 1, "ab")
    assert moment.values[0] == values[0]
    assert moment.values[2] == values[2]
    assert math.isinf(moment.values[1].square)
    assert math.isnan(moment.values[1].projections[0])
    assert not moment.values[1].is_finite


def test_every_line_is_plain_json() -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    text = moment_line(RecordedMoment(0, 0, [value(square=math.nan, greatest=math.inf)]))
    json.loads(text, parse_constant=refuse)


def test_a_line_that_is_being_written_is_left_out() -> None:
    whole = "".join(lines(RecordedMoment(0, 0, [value()]), RecordedMoment(1, 0, [value()])))
    for end in range(len(head_line(HEAD)), len(whole) + 1):
        _, moments = parse(whole[:end].splitlines(keepends=True), "file")
        assert len(moments) == whole[:end].count("\n") - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no first line"),
        ("[1, 2]\n", "line 1"),
        ("{}\n", "line 1"),
        (
            '{"numerics": 99, "rank": 0, "world": 1, "degrees": {}, "place": {}, "microbatches": 1, "owners": 1, "every": 1, '
            '"rounding": 0}\n',
            "version 99",
        ),
        ('{"numerics": 1, "rank": 0}\n', "line 1"),
        (head_line(HEAD) + '{"step": 0, "call": 0, "random": "", "values": [[1, 2]]}\n', "line 2"),
        (head_line(HEAD) + '{"step": "x", "call": 0, "random": "", "values": []}\n', "line 2"),
        (head_line(HEAD) + moment_line(RecordedMoment(0, 0, [value(phase="nonsense")])), "nonsense"),
    ],
    ids=["empty", "list", "nothing", "version", "fields", "short", "step", "phase"],
)
def test_other_files_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(text.splitlines(keepends=True), "folder/file.jsonl")
    assert "folder/file.jsonl" in str(caught.value)


def test_a_folder_without_files_and_one_of_two_jobs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SMP_RECORD_NUMERICS"):
        RecordedRun.read(str(tmp_path))
    for rank, world in ((0, 2), (1, 3)):
        head = Head(**{**HEAD.__dict__, "rank": rank, "world": world})
        (tmp_path / f"numerics-rank{rank:05}.jsonl").write_text(head_line(head))
    with pytest.raises(ConfigError, match="2 and 3 ranks"):
        RecordedRun.read(str(tmp_path))


def test_a_missing_rank_is_told() -> None:
    head = Head(**{**HEAD.__dict__, "world": 2})
    assert "no file of rank(s) [1]" in RecordedRun.of("here", [(head, [RecordedMoment(0, 0, [value()])])]).warnings[0]


def test_a_step_that_was_repeated_counts_once() -> None:
    """After a restart the same step is recorded again."""
    first, again = RecordedMoment(0, 0, [value(square=5.0)], "a"), RecordedMoment(0, 0, [value(square=3.0)], "b")
    run = RecordedRun.of("here", [parse([*lines(first), *lines(again)], "file")])
    assert [total.square for total in run.moments[0, 0].values()] == [3.0]


def test_words_of_the_variables() -> None:
    assert Guards.of("") == Guards()
    assert Guards.of("finite, spike=8,replicas=100") == Guards(finite=True, spike=8.0, replicas=100)
    for wrong in ("infinite", "spike", "spike=1", "spike=nan", "replicas=0", "replicas=-1", "finite=1"):
        with pytest.raises(ConfigError, match="SMP_NUMERICS_GUARDS"):
            Guards.of(wrong)
    assert every_steps({}) == 10
    assert every_steps({"SMP_RECORD_NUMERICS_EVERY": "3"}) == 3
    for wrong in ("0", "-1", "x", "1.5", "9999999999"):
        with pytest.raises(ConfigError, match="SMP_RECORD_NUMERICS_EVERY"):
            every_steps({"SMP_RECORD_NUMERICS_EVERY": wrong})
    assert Trial.from_environment({}) is None
    assert Trial.from_environment({"SMP_NUMERICS_TRIAL": Trial(steps=2).to_text()}) == Trial(steps=2)
    with pytest.raises(ConfigError, match="SMP_NUMERICS_TRIAL"):
        Trial.from_environment({"SMP_NUMERICS_TRIAL": '{"what": 1}'})


def test_damaged_files_are_read_or_refused() -> None:
    """Nothing that somebody has written into a file makes the reader do something else; drawn from a seed."""
    source = random.Random(27)
    good = "".join(
        lines(
            RecordedMoment(0, 0, [value(), value("b.weight", "gradient", small=(1, 2, 3))], "a"),
            RecordedMoment(1, 0, [value()]),
        )
    )
    hostile = [
        "-1",
        "1e999",
        "1" * 400,
        "null",
        "true",
        '"x"',
        "[]",
        "{}",
        "[[[",
        '"' + "a" * 300 + '"',
        "NaN",
        "\x00",
        "é",
        "9" * 20,
        "[" * 5000,
    ]
    refused = 0
    for _ in range(1500):
        text = good
        for _ in range(source.randint(1, 2)):
            begin = source.randrange(len(text))
            end = begin + source.choice([0, 1, 3, 8])
            text = text[:begin] + source.choice([*hostile, "", ",", "2", ":"]) + text[end:]
        try:
            RecordedRun.of("here", [parse(text.splitlines(keepends=True), "file")]).equal_batches()
        except ConfigError as error:
            refused += 1
            assert "file" in str(error) or "here" in str(error)
            assert len(str(error)) < 1500
    assert 300 < refused < 1500
