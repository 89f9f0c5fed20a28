"""Tests near a change: its own package, what imports it, and never more than fits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from runner.durations import Durations
from runner.environments import ROOT
from runner.near import changed_files, choose, distances

A, B, C, HUB = Path("a.py"), Path("b.py"), Path("c.py"), Path("hub.py")
TESTS = [Path(f"test_{number}.py") for number in range(8)]
#: ``test_0`` imports what it tries, the others a file that imports everything.
GRAPH = {A: set(), B: set(), C: {A}, HUB: {A, B}, TESTS[0]: {C}} | {test: {HUB} for test in TESTS[1:]}


def test_what_imports_a_change_is_nearer_than_what_everything_imports():
    found = distances([A], GRAPH)
    assert found.keys() == {A, C, HUB, *TESTS}
    assert found[A] < found[C] < found[TESTS[0]] < found[TESTS[1]] == found[TESTS[7]]
    assert TESTS[0] not in distances([B], GRAPH), "it cannot reach the change"


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("container/smp_runtime/sharding/flat_unit.py", "tests/sharding/test_flat_unit.py"),
        ("container/smp_runtime/optim/clipping.py", "tests/runtime/test_clipping.py"),
        ("smp_estimator/planning/batches.py", "tests/planning/test_arithmetic.py"),
        ("container/smp_launch/remote/ssh.py", "tests/launch/test_command.py"),
        ("tests/runner/test_near.py", "tests/runner/test_near.py"),
    ],
)
def test_a_change_has_the_tests_of_its_package(changed, test):
    chosen = choose([ROOT / changed], Durations.read(), 120)
    assert test in chosen.files
    assert "tests/test_house.py" in chosen.files
    assert ("tests/crossings/test_crossings.py" in chosen.files) == ("smp_runtime" in changed)
    assert not set(chosen.files) & set(chosen.left)
    assert all((ROOT / file).exists() for file in (*chosen.files, *chosen.left))
    assert not any(file.startswith("tests/clients/") for file in chosen.files), "these have environments of their own"


def test_more_time_takes_more_tests():
    change = [ROOT / "container/smp_runtime/nn/linear.py"]
    few, many = (choose(change, Durations.read(), seconds) for seconds in (60, 600))
    assert len(few.files) < len(many.files)
    assert {*few.files, *few.left} == {*many.files, *many.left}


def test_what_has_changed(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    git("init", "-q")
    write("old.py", "")
    write("page.md", "")
    git("add", ".")
    git("commit", "-qm", "one")
    second = write("second.py", "")
    git("add", ".")
    git("commit", "-qm", "two")
    assert changed_files(tmp_path, "HEAD") == [second], "of the last commit, if nothing else has changed"
    write("page.md", "more")
    new, old = write("new.py", ""), write("old.py", "more")
    assert set(changed_files(tmp_path, "HEAD")) == {new, old}
