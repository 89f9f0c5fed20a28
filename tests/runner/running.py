"""Runs slices: starts pytest in each environment, and stops it when the time is over."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runner import table
from runner.recording import Plan
from runner.slices import Run, Slice
from runner.table import COLLECTED, DIRTY, FAILED, MISSING, PASSED, XFAILED, Line

if TYPE_CHECKING:
    from runner.environments import Environment, Selection

#: Seconds before the limit at which no further test begins: a test has 120 seconds if it does not ask for more.
MARGIN = 120
#: Seconds in which pytest must end after Ctrl-C, with its workers and their jobs.
ENDING = 20
#: Exit codes of pytest: all passed; no test was left to run.
_GOOD = (0, 5)


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    root: Path
    table: Path
    commit: str
    #: Options of pytest for runs whose tests may run beside each other.
    options: tuple[str, ...] = ()
    #: Seconds since the epoch at which a run is stopped; 0 for none.
    limit: float = 0.0
    build: bool = False

    @property
    def is_late(self) -> bool:
        """Whether no further test begins."""
        return bool(self.limit) and time.time() > self.limit - MARGIN


@dataclass(frozen=True)
class Result:
    """What became of one run."""

    run: Run
    #: Tests by outcome.
    counts: Mapping[str, int]
    #: Tests that were chosen and have no outcome.
    left: int
    #: Pytest's exit code; None if it was stopped at the limit or did not start.
    status: int | None
    #: Why the environment is missing.
    missing: str = ""
    #: Whether the time was over when it ended.
    is_late: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether a test failed, or pytest ended before its tests without a reason that is known."""
        if self.missing:
            return False
        if self.counts.get(FAILED):
            return True
        if self.is_late:
            return self.status not in (None, *_GOOD)
        return self.status not in _GOOD or bool(self.left)

    def __str__(self) -> str:
        if self.missing:
            return f"{self.run.environment}: missing, {self.missing}"
        if self.is_late and not self.counts and not self.left:
            return f"{self.run.environment}: not run, the time is over"
        if not self.counts and not self.left and self.status in _GOOD:
            return f"{self.run.environment}: no test is left to run"
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.counts.items())) or "no test"
        text = f"{self.run.environment}: {counts}"
        if self.left:
            reason = (
                "the time is over; the next run goes on there" if self.is_late else f"pytest ended with {self.status}"
            )
            text += f", {self.left} not run ({reason})"
        return text


def run_slice(chosen: Slice, environments: Mapping[str, Environment], setting: Setting) -> list[Result]:
    """Run a slice; what the table has as passed at this commit is not run again."""
    table.mend(setting.table)
    missing: dict[str, str] = {}
    results = []
    for run in chosen.runs:
        environment = environments[run.environment]
        if environment.name not in missing:
            missing[environment.name] = _note_missing(environment, setting)
        if reason := missing[environment.name]:
            results.append(Result(run, {}, 0, None, missing=reason))
        else:
            results.append(_run(_without_passed(run, setting), environment, setting))
        click.echo(f"=== {results[-1]}")
    return results


def collect(environment: Environment, setting: Setting) -> int:
    """Write the tests of an environment into the table without running them; returns the worst exit code of pytest."""
    worst = 0
    with tempfile.TemporaryDirectory(prefix="smp-tests-") as folder:
        for selection in environment.selections:
            files = selection.files(setting.root)
            plan = Plan(str(setting.table.resolve()), environment.name, setting.commit, dict.fromkeys(files, (0, 1)))
            plan.write(Path(folder) / "plan.json")
            options = ["--collect-only", "-qq", "-p", "no:xdist", "--run-plan", f"{folder}/plan.json"]
            command = _command(environment, selection, selection.paths, options, setting.root)
            done = subprocess.run(
                command, cwd=setting.root, env=environment.variables(setting.root), capture_output=True, text=True
            )
            if done.returncode not in _GOOD:
                click.echo(done.stdout[-3000:] + done.stderr[-3000:])
                worst = done.returncode
    return worst


def call_pytest(
    environment: Environment,
    selections: Iterable[Selection],
    options: Sequence[str],
    root: Path,
    record: Path | None = None,
) -> int:
    """Run selections in full, as the short targets of the Makefile do; returns the first bad exit code.

    Args:
        record: a table for the outcomes, so that a slice at the same commit leaves out what has passed.
    """
    with tempfile.TemporaryDirectory(prefix="smp-tests-") as folder:
        recorded = []
        if record:
            plan = Plan(str(record.resolve()), environment.name, table.current_commit(root), {}, is_all=False)
            plan.write(Path(folder) / "plan.json")
            recorded = ["--run-plan", f"{folder}/plan.json"]
        for selection in selections:
            chosen = [*(options if selection.is_parallel else ()), *recorded]
            command = _command(environment, selection, selection.paths, chosen, root)
            click.echo(shlex.join(command))
            status = subprocess.run(command, cwd=root, env=environment.variables(root)).returncode
            if status:
                return status
    return 0


def _note_missing(environment: Environment, setting: Setting) -> str:
    reason = environment.why_missing(setting.root, build=setting.build)
    if reason:
        table.append(setting.table, [Line("", environment.name, MISSING, setting.commit, reason)])
    return reason


def _without_passed(run: Run, setting: Setting) -> Run:
    """Leave out whole files whose tests have all passed, so that they need not be collected again.

    Of a file of which a short target ran a part it is not known which tests it has.
    """
    collected = {
        line.test.partition("::")[0]
        for line in table.read(setting.table)
        if (line.environment, line.commit, line.outcome) == (run.environment, setting.commit, COLLECTED)
    }
    tests: dict[str, list[Line]] = {}
    for (environment, _), line in _known(setting).items():
        if environment == run.environment:
            tests.setdefault(line.test.partition("::")[0], []).append(line)
    done = {file for file, lines in tests.items() if file in collected and all(map(_is_done, lines))}
    parts = tuple(part for part in run.parts if part.file not in done)
    return Run(run.environment, run.selection, parts, run.is_parallel)


def _known(setting: Setting) -> dict[tuple[str, str], Line]:
    """Return what the table has at this commit; nothing for a tree with changes, which may be others each time."""
    if setting.commit.endswith(DIRTY):
        return {}
    return table.outcomes(line for line in table.read(setting.table) if line.commit == setting.commit)


def _run(run: Run, environment: Environment, setting: Setting) -> Result:
    # Without a path pytest would run all tests.
    if setting.is_late or not run.parts:
        return Result(run, {}, 0, 0, is_late=setting.is_late)
    selection = environment.selections[run.selection]
    known = _known(setting).values()
    passed = [line.test for line in known if line.environment == run.environment and _is_done(line)]
    before = len(table.read(setting.table))
    with tempfile.TemporaryDirectory(prefix="smp-tests-") as folder:
        names = Path(folder) / "chosen.json"
        plan = Plan(
            str(setting.table.resolve()),
            environment.name,
            setting.commit,
            {part.file: (part.number, part.of) for part in run.parts},
            passed,
            setting.limit and setting.limit - MARGIN,
            str(names),
        )
        plan.write(Path(folder) / "plan.json")
        options = ["-q", "--run-plan", f"{folder}/plan.json", *(setting.options if run.is_parallel else ())]
        command = _command(environment, selection, list(plan.parts), options, setting.root)
        click.echo(f"=== {environment.name}: {len(plan.parts)} files, about {run.seconds:.0f} s")
        status = _wait(command, environment.variables(setting.root), setting)
        chosen = json.loads(names.read_text(encoding="utf-8")) if names.exists() else []
    found = {line.test: line for line in table.read(setting.table)[before:] if line.outcome != COLLECTED}
    counts = Counter(line.outcome for line in found.values() if line.environment == environment.name)
    return Result(run, counts, len(set(chosen) - found.keys()), status, is_late=setting.is_late)


def _is_done(line: Line) -> bool:
    return line.outcome in (PASSED, XFAILED)


def _command(
    environment: Environment, selection: Selection, paths: Iterable[str], options: Iterable[str], root: Path
) -> list[str]:
    return [environment.program(root), "-m", "pytest", *paths, *selection.options(), *options]


def _wait(command: list[str], variables: dict[str, str], setting: Setting) -> int | None:
    """Run a command to its end or the limit; returns its exit code, None if it was stopped."""
    # Its own session: what must be stopped is pytest with its workers and ranks, and not what called this.
    process = subprocess.Popen(command, cwd=setting.root, env=variables, start_new_session=True)
    try:
        return process.wait(max(0.1, setting.limit - time.time()) if setting.limit else None)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        pass
    process.wait()
