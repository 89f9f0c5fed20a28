"""A skip is not a pass, and a test that passes in no environment fails the check."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from runner import command, table
from runner.environments import Environment
from runner.report import Report
from runner.table import COLLECTED, FAILED, MISSING, PASSED, SKIPPED, XFAILED, Line

TEST = "tests/test_a.py::test_a"


def report(*lines: Line) -> Report:
    return Report.of(lines, sorted({line.environment for line in lines}))


def line(outcome: str, environment: str = "one", test: str = TEST, reason: str = "") -> Line:
    return Line(test, environment, outcome, "c", reason)


@pytest.mark.parametrize(
    ("lines", "is_good"),
    [
        ([], False),
        ([line(PASSED)], True),
        ([line(COLLECTED), line(PASSED), line(COLLECTED)], True),
        ([line(XFAILED)], True),
        ([line(SKIPPED)], False),
        ([line(COLLECTED)], False),
        ([line(SKIPPED), line(PASSED, "two")], True),
        ([line(SKIPPED), line(FAILED, "two")], False),
        ([line(PASSED), line(FAILED, "two")], False),
        ([line(FAILED), line(PASSED)], True),
        ([line(PASSED), line(SKIPPED)], False),
        ([line(PASSED), line(SKIPPED, test="tests/test_b.py")], False),
        ([line(PASSED), line(SKIPPED, test="tests/test_a.py")], True),
        ([line(PASSED), line(SKIPPED, test="tests/test_a.py::test_b")], False),
        ([line(FAILED, test="tests/test_a.py"), line(COLLECTED), line(PASSED)], True),
        ([line(PASSED), line(FAILED, test="tests/test_a.py")], False),
        ([line(PASSED), line(MISSING, "two", "")], True),
        ([line(MISSING, "two", "")], False),
    ],
)
def test_what_is_good(lines: list[Line], is_good: bool) -> None:
    assert report(*lines).is_good == is_good


def test_it_lists_each_kind() -> None:
    other = "tests/test_b.py::test_b"
    text = report(
        line(SKIPPED, reason="no Docker"),
        line(FAILED, test=other, reason="assert 1 == 2"),
        line(COLLECTED, test="tests/test_b.py::test_c"),
        line(MISSING, "two", "", "no network"),
    ).text()
    assert [row.split() for row in text.splitlines()[:3]] == [
        ["environment", "passed", "failed", "skipped", "xfailed", "not", "run"],
        ["one", "0", "1", "1", "0", "1"],
        ["two", "missing", "no", "network"],
    ]
    assert "skipped, by reason: 1\n  1 in one: no Docker\n" in text
    assert f"failed: 1\n  one: {other}: assert 1 == 2\n" in text
    assert f"passed in no environment: 3\n  {TEST} (skipped in one)\n  {other} (failed in one)\n" in text
    assert "  tests/test_b.py::test_c (not run in one)" in text


def test_an_environment_of_which_nothing_is_known() -> None:
    """It may have tests that pass nowhere."""
    found = Report.of([line(PASSED)], ["one", "two"])
    assert (found.is_good, found.unknown()) == (False, ["two"])
    assert "two            unknown  the table has nothing of it" in found.text()


def test_an_environment_that_came_later_is_missing_no_more() -> None:
    assert report(line(MISSING, "two", ""), line(PASSED, "two")).missing == {}


def test_long_lists_are_shortened() -> None:
    lines = [line(SKIPPED, test=f"{TEST}[{number}]", reason=str(number)) for number in range(50)]
    assert "  and 30 more (--whole lists them)" in report(*lines).text()
    assert "more (" not in report(*lines).text(whole=True)


def test_a_line_in_whose_middle_a_process_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    table.append(path, [line(PASSED)])
    with path.open("a") as file:
        file.write('{"test": "tests/test_')
    assert table.read(path) == [line(PASSED)]
    table.mend(path)
    table.append(path, [line(SKIPPED)])
    assert table.read(path) == [line(PASSED), line(SKIPPED)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Three commits, and one on another branch; the third is the current one."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

    def commit() -> str:
        git("commit", "-q", "--allow-empty", "-m", "a")
        return git("rev-parse", "HEAD").strip()

    git("init", "-q")
    first, second = commit(), commit()
    git("checkout", "-q", "-b", "other")
    other = commit()
    git("checkout", "-q", "--detach", second)
    (folder / "later").touch()
    git("add", "-A")
    return folder, [first, second, commit(), other]


@pytest.fixture
def commits(repository: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits of the repository that the commands work in."""
    monkeypatch.setattr(command, "ROOT", repository[0])
    monkeypatch.setattr(command, "ENVIRONMENTS", (Environment("one", "python", "", ()),))
    return repository[1]


@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (2, [], 0),
        (1, [], 1),
        (1, ["--at-commit", "HEAD~1"], 0),
        (2, ["--at-commit", "HEAD~1"], 1),
        (1, ["--since-commit", "HEAD~1"], 0),
        (2, ["--since-commit", "HEAD~2"], 0),
        (0, ["--since-commit", "HEAD~1"], 1),
        (3, ["--since-commit", "HEAD~1"], 1),
        (3, ["--any-commit"], 0),
    ],
)
def test_the_commits_that_count(tmp_path: Path, commits: list[str], number: int, options: list[str], code: int) -> None:
    path = tmp_path / "table.jsonl"
    table.append(path, [Line(TEST, "one", PASSED, commits[number])])
    done = CliRunner().invoke(command.main, ["report", "--table", str(path), *options])
    assert (done.exit_code, "Traceback" in done.output) == (code, False), done.output


def test_a_tree_with_changes_is_no_commit(tmp_path: Path, commits: list[str]) -> None:
    path = tmp_path / "table.jsonl"
    table.append(path, [Line(TEST, "one", PASSED, commits[2])])
    later = command.ROOT / "later"
    later.write_text("changed")
    try:
        current = table.current_commit(command.ROOT)
        assert _exit_code(path) == 1
        table.append(path, [Line(TEST, "one", PASSED, current)])
        assert _exit_code(path) == 0
    finally:
        later.write_text("")
    assert current == f"{commits[2]}-dirty"


def _exit_code(path: Path) -> int:
    return CliRunner().invoke(command.main, ["report", "--table", str(path)]).exit_code


@pytest.mark.parametrize("asked", ["0", "4", "1/2", "a", "-1"])
def test_a_slice_that_there_is_not(asked: str) -> None:
    with pytest.raises(command.click.BadParameter, match="there are 3 slices"):
        command._numbers(asked, 3)


def test_slices_that_there_are(commits: list[str]) -> None:
    assert command._numbers("", 3) == [1, 2, 3]
    assert command._numbers("2", 3) == command._numbers("2/3", 3) == [2]
    assert command._numbers("commit", 2) == [3 % 2 + 1]
    assert command._numbers("commit", 3) == [3 % 3 + 1]
