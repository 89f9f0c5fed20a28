"""The matrix of Python and PyTorch: its table is that of its outcomes, and it says truly what became of a cell."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.documents import version_matrix as matrix
from support.documents.version_matrix import NOTEBOOK, Cell, Outcome

ROOT = Path(__file__).parent.parent
SETUP = (ROOT / "setup.cfg").read_text()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_table_is_that_of_the_outcomes() -> None:
    """If not: ``python tests/support/documents/version_matrix.py write``."""
    text = matrix.DOCUMENT.read_text()
    assert matrix.page(text, matrix.read()) == text
    assert {cell.python for cell in matrix.read() if cell.torch == NOTEBOOK} == set(matrix.PYTHONS)


def test_it_reaches_from_the_floors_to_what_is_said_to_be_tested() -> None:
    from smp_estimator.cloud.images import TORCH_FLOOR

    found = re.search(r"python_requires = >=(\S+)", SETUP)
    assert found is not None
    assert matrix.PYTHONS[0] == found[1]
    assert tuple(re.findall(r"Programming Language :: Python :: (3\.\d+)", SETUP)) == matrix.PYTHONS
    torchs = [numbers(torch) for torch in matrix.RUNTIME]
    assert torchs == sorted(torchs)
    assert torchs[0][:2] == TORCH_FLOOR
    assert re.search(rf"# .* Tested with PyTorch \S+ to {torchs[-1][0]}\.{torchs[-1][1]}\. 2\.4 works but for", SETUP)
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints/cpu.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in matrix.RUNTIME
    assert set(matrix.RUNTIME.values()) == set(matrix.PYTHONS)


def test_pins_are_those_of_the_python_and_leave_pytorch_its_own() -> None:
    old, usual = (matrix.constraints(Cell(python, NOTEBOOK)).splitlines() for python in ("3.10", "3.12"))
    assert "numpy==2.2.6" in old
    assert not any(line.startswith("numpy==2.4") for line in old)
    assert any(line.startswith("numpy==2.4") for line in usual)
    assert "boto3==1.44.5" in set(old) & set(usual)
    runtime = matrix.constraints(Cell("3.12", "2.8.0"))
    assert not re.search(r"^(torch|sympy|networkx)==", runtime, re.MULTILINE)


@pytest.mark.parametrize(
    ("said", "status", "kind", "reason"),
    [
        ("...\n= 3 passed, 1 skipped in 0.1s =", 0, "passed", ""),
        ("FAILED tests/a.py::b - assert\n= 1 failed, 3 passed, 1 skipped in 0.1s =", 1, "failed", "tests/a.py::b"),
        ("ERROR tests/a.py\n= 1 error in 0.1s =", 2, "failed", "tests/a.py"),
        ("= 4 skipped in 0.1s =", 0, "failed", "pytest ended with 0"),
        ("= 3 passed, 1 skipped in 0.1s =", 139, "failed", "pytest ended with 139"),
        (
            "".join(f"FAILED t.py::c{number} - x\n" for number in range(7)) + "= 7 failed in 1s =",
            1,
            "failed",
            "t.py::c0, t.py::c1, t.py::c2, t.py::c3, t.py::c4 and 2 more",
        ),
    ],
)
def test_what_pytest_says_is_understood(said: str, status: int, kind: str, reason: str) -> None:
    found = matrix.outcome(said, status, "Python 3.12.1")
    assert (found.kind, found.reason, found.versions) == (kind, reason, "Python 3.12.1")
    assert found.skipped == (1 if "1 skipped" in said else 4 if "4 skipped" in said else 0)


def test_the_table_says_what_became_of_each_cell() -> None:
    torch, python = next(iter(matrix.RUNTIME.items()))
    outcomes = {
        Cell(matrix.PYTHONS[0], NOTEBOOK): Outcome("passed", "", "Python 3.10.9", 1050, 17, "2026-11-23"),
        Cell(matrix.PYTHONS[1], NOTEBOOK): Outcome("failed", "t.py::a", "Python 3.11.7", 5, 0, "2026-11-23"),
        Cell(matrix.PYTHONS[2], NOTEBOOK): Outcome("skipped", "no Python 3.12 on the machine", day="2026-11-23"),
        Cell(python, torch): Outcome("passed", "", "Python 3.10.9", 9, 0, "2026-11-23"),
    }
    text = matrix.table(outcomes)
    assert "| notebook side | works | does not | could not be made | not run yet |" in text
    assert f"| PyTorch {torch} | works |  |  |  |" in text
    assert (
        "- Python 3.10, the notebook side: passed on 2026-11-23 (Python 3.10.9): 1,050 tests passed, 17 skipped" in text
    )
    assert "- Python 3.11, the notebook side: failed on 2026-11-23 (Python 3.11.7): t.py::a" in text
    assert "- Python 3.12, the notebook side: skipped on 2026-11-23: no Python 3.12 on the machine" in text
    with pytest.raises(SystemExit, match="lacks the lines between which the table stands"):
        matrix.page("no table here", outcomes)


def test_an_interpreter_must_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = "{}.{}".format(*sys.version_info)
    for folder, line in (
        ("shims", "echo 'not switched on' >&2; exit 127"),
        ("pyenv/versions/x", f'exec {sys.executable} "$@"'),
    ):
        (tmp_path / folder).mkdir(parents=True)
        name = "bin" if "pyenv" in folder else "."
        (tmp_path / folder / name).mkdir(exist_ok=True)
        program = tmp_path / folder / name / f"python{own}"
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    (tmp_path / "pyenv/versions/x").rename(tmp_path / f"pyenv/versions/{own}.99")
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert matrix.interpreter(own) == str(tmp_path / f"pyenv/versions/{own}.99/bin/python{own}")
    assert matrix.interpreter("3.99") is None
    assert matrix.run(Cell("3.99", NOTEBOOK)).reason == "no Python 3.99 on the machine"


def test_versions_that_the_matrix_lacks_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"2\.3\.1: Pythons are 3\.10, 3\.11, 3\.12, 3\.13, PyTorchs 2\.4\.0"):
        matrix.main(["run", "2.3.1"])
