"""Slices have each test once, in a limited time, and are always the same; durations come from earlier runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from runner.durations import UNKNOWN, Duration, Durations
from runner.environments import ENVIRONMENTS, ROOT, Environment, Selection, find
from runner.slices import SECONDS, START, Slice, deal
from runner.table import COLLECTED, PASSED, SKIPPED, Line

LIMIT = 100


def fake(name: str, *selections: Selection) -> Environment:
    return Environment(name, "python", "", selections)


def parts(slices: list[Slice]) -> Counter[tuple[str, int, str, int, int]]:
    """Return how often each part is in a slice."""
    return Counter(
        (run.environment, run.selection, part.file, part.number, part.of)
        for each in slices
        for run in each.runs
        for part in run.parts
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("one", "two"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        for number in range(9):
            (tmp_path / f"tests/{folder}/test_{number}.py").write_text("def test_a(): ...\nasync def test_b(): ...\n")
    return tmp_path


@pytest.fixture
def environments() -> list[Environment]:
    alone = Selection(("tests/two",), is_parallel=False)
    return [fake("a", Selection(("tests",), ignored=("tests/two",)), alone), fake("b", Selection(("tests",)))]


def measured(seconds: int) -> Durations:
    files = {
        f"tests/{folder}/test_{number}.py": Duration(20, seconds + number)
        for folder in ("one", "two")
        for number in range(9)
    }
    return Durations({"a": files, "b": files})


@pytest.mark.parametrize("seconds", [1, 30, 60, 69, 200])
def test_each_test_is_in_one_slice_within_the_limit(root: Path, environments: list[Environment], seconds: int) -> None:
    slices = deal(environments, measured(seconds), root, LIMIT)
    found = parts(slices)
    assert set(found.values()) == {1}
    wholes = Counter((environment, selection, file, of) for environment, selection, file, _, of in found)
    assert all(count == of for (*_, of), count in wholes.items())
    assert {(environment, file) for environment, _, file, _ in wholes} == {
        (name, f"tests/{folder}/test_{number}.py") for name in "ab" for folder in ("one", "two") for number in range(9)
    }
    assert max(each.seconds for each in slices) <= LIMIT
    for each in slices:
        for run in each.runs:
            assert len({part.file for part in run.parts}) == len(run.parts), "a plan has one part per file"


def test_slices_are_the_same_for_the_same_durations(root: Path, environments: list[Environment]) -> None:
    path = root / "durations.json"
    durations = measured(30)
    durations.write(path)
    assert deal(environments, Durations.read(path), root, LIMIT) == deal(environments, durations, root, LIMIT)


def test_a_file_that_is_longer_than_a_slice_is_split(root: Path) -> None:
    durations = Durations({"a": {"tests/one/test_0.py": Duration(50, 3 * (LIMIT - START))}})
    environment = fake("a", Selection(("tests/one/test_0.py",)))
    assert [part[2:] for part in parts(deal([environment], durations, root, LIMIT))] == [
        ("tests/one/test_0.py", number, 3) for number in range(3)
    ]


def test_what_was_not_measured_is_estimated(root: Path) -> None:
    file = "tests/one/test_0.py"
    assert Durations({}).seconds("a", file, root) == 2 * UNKNOWN
    known = {"a": {"tests/one/test_1.py": Duration(10, 50)}}
    assert Durations(known).seconds("a", file, root) == 2 * 5
    assert Durations(known | {"b": {file: Duration(100, None)}}).seconds("b", file, root) == 100 * 5
    assert Durations(known | {"b": {file: Duration(100, 30)}}).seconds("a", file, root) == 30
    other = {"b": {"tests/one/test_1.py": Duration(10, 10)}}
    assert Durations(known | other).seconds("b", file, root) == 2 * 1
    assert Durations(known | other).seconds("c", file, root) == 2 * 3


def test_durations_are_taken_from_the_table(root: Path) -> None:
    one, two = "tests/one/test_0.py", "tests/one/test_1.py"
    lines = [
        *(Line(f"{one}::test_{number}", "a", COLLECTED, "c") for number in range(4)),
        Line(f"{one}::test_0", "a", PASSED, "c", "", 60.0),
        Line(f"{one}::test_0", "a", PASSED, "d", "", 6.0),
        Line(f"{one}::test_1", "a", SKIPPED, "d", "no", 0.2),
        Line(f"{two}::test_0", "b", COLLECTED, "d"),
        Line(two, "c", SKIPPED, "d", "the whole file"),
        Line("tests/gone/test_0.py::test_0", "a", PASSED, "d", "", 6.0),
    ]
    before = Durations({"a": {two: Duration(7, 70), one: Duration(9, 90)}, "gone": {two: Duration(1, 1)}})
    after = before.updated(lines, ["a", "b", "c"], root)
    after.write(root / "durations.json")
    assert (root / "durations.json").read_text() == (
        '{\n  "a": {\n    "tests/one/test_0.py": [4, 12],\n    "tests/one/test_1.py": [7, 70]\n  },\n'
        '  "b": {\n    "tests/one/test_1.py": [1, null]\n  }\n}\n'
    )


def test_every_test_file_has_a_slice() -> None:
    slices = deal(ENVIRONMENTS, Durations.read(), ROOT)
    found = parts(slices)
    assert set(found.values()) == {1}
    assert {file for _, _, file, _, _ in found} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert max(each.seconds for each in slices) <= SECONDS


def test_no_case_is_left_out_where_it_can_run() -> None:
    """Whole matrices too; the Makefile's targets run samples of the same."""
    assert [selection.options() for selection in find("newest").selections] == [[]]
    for name in ("sdk-3", "clients-4", "clients-5"):
        assert find(name).selections[0].options() == []
        assert find(name).sample[0].options() == ["-m", "not full"]
    with pytest.raises(ValueError, match="no environment 'older'"):
        find("older")


def test_the_makefile_has_the_environments() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for environment in ENVIRONMENTS:
        assert f"$(SHORT) {environment.name}" in makefile
        assert all((ROOT / path).exists() for each in environment.selections for path in each.paths)
