"""Runs of a small project: parts of files, runs that go on, a killed pytest, a crashed worker, what is missing."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from support.compiling import compile_files

from runner import running, table
from runner.budget import Budget
from runner.environments import ROOT, Environment, Selection
from runner.report import Report
from runner.running import Result, Setting, collect, run_slice
from runner.slices import Part, Run, Slice
from runner.table import COLLECTED, FAILED, MISSING, PASSED, SKIPPED, XFAILED

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from runner.recording import add_option as pytest_addoption, register as pytest_configure
"""
TESTS = """
import os, pathlib, signal
import pytest

here = pathlib.Path(__file__).parent

def ran(name):
    with open(here / "ran", "a") as file:
        file.write(name + " ")

@pytest.mark.parametrize("number", range(3))
def test_good(number):
    ran(f"good{number}")

@pytest.mark.skipif("OTHER" not in os.environ, reason="needs the other environment")
def test_other():
    ran("other")

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    assert False

@pytest.fixture
def bad_end():
    yield
    assert not (here / "end badly").exists()

def test_ending(bad_end):
    ran("ending")

def test_killing():
    ran("killing")
    if (here / "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
"""
FILE = "tests/test_some.py"
OPTIONS = ("-p", "no:cacheprovider")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with tests of two files; one is skipped as a whole."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # to start sooner
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / FILE).write_text(TESTS)
    (tmp_path / "tests" / "test_whole.py").write_text(
        "import pytest\npytest.skip('all of it', allow_module_level=True)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / ".gitignore").write_text("*\n!.gitignore\n")
    (tmp_path / "there").touch()
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def environment(name: str = "one", **given: Any) -> Environment:
    fields: dict[str, Any] = {"python": sys.executable, "target": "", "selections": (Selection(("tests",)),), **given}
    return Environment(name, **fields)


def setting(project: Path, *options: str) -> Setting:
    return Setting(project, project / "table.jsonl", table.current_commit(project), (*OPTIONS, *options))


def run(given: Setting, *, part: tuple[int, int] = (0, 1), files: tuple[str, ...] = (FILE,), **of: Any) -> Result:
    one = environment(**of)
    parts = tuple(Part(file, *part, seconds=1.0) for file in files)
    (result,) = run_slice(Slice((Run(one.name, 0, parts, is_parallel=True),)), {one.name: one}, given)
    return result


def outcomes(project: Path, name: str = "one") -> dict[str, str]:
    lines = table.outcomes(table.read(project / "table.jsonl")).values()
    return {line.test.partition("::")[2] or line.test: line.outcome for line in lines if line.environment == name}


def names(project: Path) -> Counter[str]:
    """How often tests ran."""
    return Counter((project / "tests" / "ran").read_text().split())


GOOD = dict.fromkeys(("test_good[0]", "test_good[1]", "test_good[2]", "test_ending", "test_killing"), PASSED)
ALL = GOOD | {"test_other": SKIPPED, "test_known": XFAILED}


def test_two_environments_have_all_tests_together(project: Path) -> None:
    """In parts, each test once; what one environment skips passes in the other; a file is skipped in both."""
    given = setting(project)
    files = (FILE, "tests/test_whole.py")
    halves = [run(given, part=(number, 2), files=files) for number in range(2)]
    assert [(half.is_fault, sum(half.counts.values())) for half in halves] == [(False, 5), (False, 4)]
    assert outcomes(project) == ALL | {"tests/test_whole.py": SKIPPED}
    assert set(names(project).values()) == {1}
    assert Report.of(table.read(given.table), ["one", "two"]).passed_nowhere().keys() == {
        f"{FILE}::test_other",
        "tests/test_whole.py",
    }
    assert not run(given, files=files, name="two", other_pythons=(("OTHER", "there"), ("NOT", "not there"))).is_fault
    found = Report.of(table.read(given.table), ["one", "two"])
    assert found.passed_nowhere().keys() == {"tests/test_whole.py"}
    assert found.skips() == {
        ("one", "needs the other environment"): 1,
        ("one", "all of it"): 1,
        ("two", "all of it"): 1,
    }
    # All has passed there, so pytest need not start.
    assert run(given, name="two", python="no such program").missing
    assert names(project)["good1"] == 2
    assert str(run(given, name="two")) == "two: no test is left to run"
    assert names(project)["good1"] == 2


def test_a_run_goes_on_where_pytest_was_killed(project: Path) -> None:
    given = setting(project)
    (project / "tests" / "kill").touch()
    killed = run(given)
    assert (killed.is_fault, killed.status, killed.left) == (True, -9, 1)
    assert outcomes(project) == ALL | {"test_killing": COLLECTED}
    assert "1 not run (pytest ended with -9)" in str(killed)
    (project / "tests" / "kill").unlink()
    assert not run(given).is_fault
    assert outcomes(project) == ALL
    assert names(project) == {"good0": 1, "good1": 1, "good2": 1, "ending": 1, "killing": 2}
    # What passed at one commit says nothing of another.
    run(replace(given, commit="another"))
    assert names(project)["good0"] == 2


@pytest.mark.parametrize(
    ("of", "is_fault"),
    [
        ({"status": 0}, False),
        ({"status": 5, "counts": {}}, False),
        ({"status": 1}, True),
        ({"status": 1, "counts": {FAILED: 1}}, True),
        ({"status": 0, "left": 1}, True),
        ({"status": -9}, True),
        ({"status": 0, "left": 1, "is_late": True}, False),
        ({"status": None, "left": 1, "is_late": True}, False),
        ({"status": None, "counts": {FAILED: 1}, "is_late": True}, True),
        ({"status": 2, "is_late": True}, True),
        ({"status": None, "missing": "no network"}, False),
    ],
)
def test_what_is_a_fault(of: dict[str, Any], is_fault: bool) -> None:
    given: dict[str, Any] = {"counts": {PASSED: 2}, "left": 0, **of}
    assert Result(Run("one", 0, (), is_parallel=True), **given).is_fault == is_fault


def test_workers(project: Path) -> None:
    """One that crashes fails its test, the others run, and a test counts once for its worst phase."""
    given = setting(project, "-p", "xdist.plugin", "-n", "1", "--dist", "loadfile")
    (project / "tests" / "kill").touch()
    (project / "tests" / "end badly").touch()
    crashed = run(given)
    assert (crashed.is_fault, crashed.counts[FAILED], crashed.left) == (True, 2, 0)
    assert outcomes(project) == ALL | {"test_killing": FAILED, "test_ending": FAILED}
    collected = [line.test for line in table.read(given.table) if line.outcome == COLLECTED]
    assert len(collected) == len(set(collected)) == len(ALL)
    reasons = {line.test.partition("::")[2]: line.reason for line in table.read(given.table) if line.outcome == FAILED}
    assert "crashed" in reasons["test_killing"]
    assert reasons["test_ending"].startswith("AssertionError")


def test_after_the_deadline_no_test_begins(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The time is over when pytest has started: at its first test, well before it would be stopped.
    answers = iter([False])
    monkeypatch.setattr(Setting, "is_late", property(lambda _: next(answers, True)))
    monkeypatch.setattr(running, "MARGIN", 700)
    late = run(replace(setting(project), limit=time.time() + 600))
    assert (late.is_fault, late.status, late.left, late.is_late) == (False, 0, 7, True)
    assert "7 not run (the time is over" in str(late)
    assert set(outcomes(project).values()) == {COLLECTED}


def test_after_the_deadline_no_run_begins(project: Path) -> None:
    late = run(replace(setting(project), limit=time.time() + 60))
    assert (late.is_fault, str(late)) == (False, "one: not run, the time is over")
    assert outcomes(project) == {}


def test_what_hangs_is_stopped_at_the_limit(project: Path) -> None:
    begun = time.time()
    # Both hold the lock until they have ended, as workers of pytest and their ranks would.
    lock = project / "lock"
    code = f"import fcntl, os, signal, time; file = open({str(lock)!r}, 'w'); fcntl.flock(file, 2); os.fork(); time.sleep(600)"
    given = replace(setting(project), limit=begun + 2)
    assert running._wait([sys.executable, "-c", code], {}, given) is None
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for ever if one of them goes on


def test_a_tree_with_changes_runs_again(project: Path) -> None:
    (project / ".gitignore").write_text("*\n")
    given = setting(project)
    assert given.commit.endswith("-dirty")
    table.append(given.table, [table.Line(f"{FILE}::test_good[0]", "one", PASSED, given.commit)])
    assert running._known(given) == {}
    clean = replace(given, commit=given.commit.removesuffix("-dirty"))
    table.append(given.table, [table.Line(f"{FILE}::test_good[0]", "one", PASSED, clean.commit)])
    assert len(running._known(clean)) == 1


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"python": "nothing/bin/python"}, "there is no nothing/bin/python"),
        ({"target": "nothing"}, "not built: make nothing"),
        ({"needs_image": True}, "SMP_TEST_IMAGE names no image"),
    ],
)
def test_a_missing_environment_is_no_pass(
    project: Path, monkeypatch: pytest.MonkeyPatch, of: dict[str, Any], reason: str
) -> None:
    monkeypatch.delenv("SMP_TEST_IMAGE", raising=False)
    missing = run(setting(project), **of)
    assert (missing.missing, missing.is_fault) == (reason, False)
    (line,) = table.read(project / "table.jsonl")
    assert (line.outcome, line.reason, line.environment) == (MISSING, reason, "one")
    assert not Report.of([line], ["one"]).is_good


def test_an_environment_is_built_or_says_why_not(project: Path) -> None:
    (project / "Makefile").write_text("built:\n\ttouch built\nbroken:\n\techo 'no network' >&2; exit 1\n")
    assert environment(target="built").why_missing(project) == "not built: make built"
    assert environment(target="built").why_missing(project, build=True) == ""
    assert environment(target="built").why_missing(project) == ""
    assert environment(target="broken").why_missing(project, build=True) == "make broken fails: no network"


def test_tests_are_collected_without_running(project: Path) -> None:
    given = setting(project)
    assert collect(environment(), given) == 0
    assert outcomes(project) == dict.fromkeys(ALL, COLLECTED) | {"tests/test_whole.py": SKIPPED}
    assert not (project / "tests" / "ran").exists()
    (project / "tests" / "test_whole.py").write_text("import no_such_module\n")
    assert collect(environment(), given) != 0
    assert outcomes(project)["tests/test_whole.py"] == FAILED


_CONFTEST = """
from runner import budget

def pytest_configure(config):
    limits = budget.Budget(0.05, {"test_slow.py::test_known": "it waits"})
    config.pluginmanager.register(budget.Watch(limits, is_worker=False, slowness=lambda: %s))
"""
_SLOW = """
import pathlib, time

def ran(name):
    with open(pathlib.Path(__file__).with_name("ran"), "a") as file:
        file.write(name + " ")
    time.sleep(0.2)

def test_known(): ran("known")
def test_always(): ran("always")

def test_fails():
    ran("fails")
    assert False
"""


@pytest.mark.parametrize(("slowness", "times"), [("1.0", 2), ("1000.0", 1)])
def test_a_test_that_is_far_above_the_budget_twice_fails_the_run(tmp_path, slowness, times):
    (tmp_path / "conftest.py").write_text(_CONFTEST % slowness)
    (tmp_path / "test_slow.py").write_text(_SLOW)

    def run(*names: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
        tests = Path(__file__).parents[1]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tests)}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    code, said = run("test_slow.py::test_known", "test_slow.py::test_always")
    assert (tmp_path / "ran").read_text().split() == ["known"] + times * ["always"]
    assert ("s  test_slow.py::test_always" in said) == bool(code) == (times == 2), said
    assert "s  test_slow.py::test_known" not in said
    code, said = run("test_slow.py::test_fails")
    assert code == 1
    assert "1 failed" in said
    assert (tmp_path / "ran").read_text().split().count("fails") == 1
    assert run("test_slow.py")[0] == 1
    (tmp_path / "test_slow.py").write_text(_SLOW.replace("test_known", "test_renamed"))
    assert "names what is no test: test_slow.py::test_known" in run("test_slow.py")[1], "an old reason"


def test_reasons_of_slow_tests_name_tests():
    budget = Budget.read()
    assert budget.seconds == 3
    assert all(reason for reason in budget.reasons.values())
    assert all((Path(__file__).parents[2] / name.partition("::")[0]).exists() for name in budget.reasons)
    longer = (Path(__file__).parents[1] / "longer-tests.txt").read_text(encoding="utf-8").splitlines()
    assert not budget.reasons.keys() & set(longer), "the longer run has no budget"


def test_what_passed_in_a_short_target_is_not_run_again_and_the_rest_is(project: Path) -> None:
    """A short target knows only a part of a file, from which the file may not be taken to be done."""
    given = setting(project)
    short = Selection(("tests",), keyword="good or ending")
    for _ in range(2):  # such a target itself leaves nothing out
        assert running.call_pytest(environment(), [short], OPTIONS, project, given.table) == 0
    assert names(project) == Counter(good0=2, good1=2, good2=2, ending=2)
    assert outcomes(project).keys() == GOOD.keys() - {"test_killing"}
    result = run(given)
    assert (result.is_fault, result.counts) == (False, {PASSED: 1, SKIPPED: 1, XFAILED: 1})
    assert names(project) == Counter(good0=2, good1=2, good2=2, ending=2, killing=1)


def test_what_a_worker_compiles_is_what_pytest_and_python_take(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    test, other = tmp_path / "test_a.py", tmp_path / "other.py"
    test.write_text("def test_a(x):\n    assert x == 1\n")
    other.write_text("here = 1\n")
    compile_files(request.config, [test, other])
    (taken,) = (tmp_path / "__pycache__").glob(f"test_a{rewrite.PYC_TAIL}")
    code = rewrite._read_pyc(test, taken)
    assert code is not None, "pytest would compile it"
    assert "@pytest_ar" in code.co_names, "with what it adds to assertions"
    (taken,) = (tmp_path / "__pycache__").glob("other.*.pyc")
    stamp, size = (int.from_bytes(taken.read_bytes()[place : place + 4], "little") for place in (8, 12))
    assert (stamp, size) == (int(other.stat().st_mtime), other.stat().st_size)
    # What is newer is compiled again, and nothing else.
    test.write_text("def test_b():\n    pass\n")
    os.utime(test, (time.time() + 5, time.time() + 5))
    before = taken.stat().st_mtime_ns
    compile_files(request.config, [test, other])
    (renewed,) = (tmp_path / "__pycache__").glob(f"test_a{rewrite.PYC_TAIL}")
    code = rewrite._read_pyc(test, renewed)
    assert code is not None
    assert "test_b" in code.co_names
    assert taken.stat().st_mtime_ns == before
