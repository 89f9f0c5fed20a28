"""A Python without the packages that every rank needs: one line says what to bring, whatever has started the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_config.machine import packages

ROOT = Path(packages.__file__).parents[2]
SCRIPT = "import smdistributed.modelparallel.torch as smp\nsmp.init()\nprint('joined')\nsmp.shutdown()\n"
#: Stands first on the path, and hides what the variable names from Python's import.
HIDE = """
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""
WHEELS = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")
#: The words around the script, by launcher, and the exit code.
LAUNCHERS = {
    "plain": ([], 1),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"], 1),
    "smp-launch": (["-m", "smp_launch", "run"], 2),
}


@pytest.fixture
def run(tmp_path):
    """``run(hidden, *words)``: runs the script with this Python, without the packages of these names."""
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(hidden, *words):
        others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SMP_", "OMPI_", "PMI")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        path = os.pathsep.join([str(tmp_path / "hooks"), str(ROOT)])
        return subprocess.run(
            [sys.executable, *words, str(tmp_path / "script.py")],
            env={**inherited, "PYTHONPATH": path, "HIDDEN": hidden, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=90,
        )

    return start


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_line_names_the_wheels(run, launcher):
    words, code = LAUNCHERS[launcher]
    ended = run("pydantic pydantic_core", *words)
    assert ended.returncode == code, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "pydantic" in line]
    assert all(wheel in line for wheel in WHEELS)
    assert "pip install 'pydantic>=2.7'" in line
    assert "PYTHONPATH" in line
    assert "[SMP206]" in line
    if launcher != "torchrun":  # which reports the end of a rank in its own words
        assert ended.stderr.count("\n") == 1


def test_the_other_packages_of_this_environment_are_not_needed(run):
    ended = run("rich safetensors mpi4py transformers accelerate cloudpickle", *LAUNCHERS["smp-launch"][0])
    assert (ended.returncode, "joined" in ended.stdout) == (0, True), ended.stderr


def test_the_command_line_of_the_launcher_needs_one_more(run):
    ended = run("click", *LAUNCHERS["smp-launch"][0])
    assert ended.returncode == 2
    assert "has no click: run" in ended.stderr
    assert "pip install 'click>=8.1';" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_script_may_catch_the_error_and_others_look_as_before(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: shown.append(failure))
    with pytest.raises(ImportError, match="has no no-such-wheel: run"):
        packages.require_packages({"no-such-wheel": {"no_such_module": "no-such-wheel"}})
    error = ValueError("of the script")
    sys.excepthook(ValueError, error, None)
    assert shown == [(ValueError, error, None)]


def test_requirements_are_those_of_the_package():
    declared = (ROOT.parent / "setup.cfg").read_text()
    assert all(f"\n    {requirement}\n" in declared for requirement in packages.LAUNCHER_PACKAGES)
