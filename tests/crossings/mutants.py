"""Seeded mutants of the runtime, each against the same drawn cases until one finds it: ``make test-mutants``.

A mutant is one mistake in one file (``mutants.json``). Where only functions differ, their code is replaced in ranks that are forked
from a process which has imported the runtime. Any other one runs in a copy of the runtime, in its own processes (:class:`Trial`).
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from crossings.case import TOPOLOGIES, Case, draw
from crossings.outcome import AnyCase, Outcome, Runner, read_case
from crossings.patching import CannotPatchError, can_patch, patch, patch_rank
from crossings.version2_case import Version2Case, draw_version2
from support.ranks.rank_pool import RankFailed

if TYPE_CHECKING:
    from support.ranks.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "container"
LIST = Path(__file__).with_name("mutants.json")

#: Seconds for one case. The pool of ranks gives up after 60.
_DEADLINE = 90.0
#: The same of one that is put into ranks: they give up then unless they compute.
_PATIENCE = 30.0
#: Seconds until the processes of a mutant have imported it.
_START = 180.0
#: Of all mutants, how many must be caught.
_ENOUGH = 0.9


class NotAMutantError(Exception):
    """A mutant that does not fit the code, or cannot start."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: below ``container/smp_runtime``, or a package of version 2 below ``container``.
        old: text that the file has once.
        new: what stands there instead.
        kind: of mistake, in a few words.
        breaks: what goes wrong.
        first: words of the cases that should be tried first, see :func:`words_of`.
        version: of the cases.
    """

    id: str
    file: str
    old: str
    new: str
    kind: str
    breaks: str
    first: tuple[str, ...] = ()
    version: int = 1

    @property
    def place(self) -> str:
        """Return the file, below ``container``."""
        return self.file if self.file.startswith(("smp_version2", "torch_sagemaker")) else f"smp_runtime/{self.file}"

    @property
    def path(self) -> Path:
        """Return the file in this checkout."""
        return CONTAINER / self.place

    def text(self) -> str:
        """Return the mutated file.

        Raises:
            NotAMutantError: the file does not have the old text exactly once.
        """
        text = self.path.read_text(encoding="utf-8")
        if (times := text.count(self.old)) != 1:
            raise NotAMutantError(f"{self.id}: {self.file} has the old text {times} times, not once")
        return text.replace(self.old, self.new)

    def digest(self) -> str:
        """Return what differs whenever another text would be tried."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:12]


def read_mutants() -> list[Mutant]:
    """Return all mutants of the list."""
    return [Mutant(**{**each, "first": tuple(each["first"])}) for each in json.loads(LIST.read_text(encoding="utf-8"))]


def words_of(case: AnyCase) -> set[str]:
    """Return what a case has, in words that a mutant may ask for: values, ``True`` axes, events, and kinds of parallelism."""
    if isinstance(case, Version2Case):
        texts = {value for value in asdict(case).values() if isinstance(value, str)}
        has_shards = any(shard > 1 for _, shard, _, _ in case.degrees)
        facts = {"tp": case.splits, "ep": case.shares_experts, "sdp": has_shards, "stateful": case.optimizer != "sgd"}
        return texts | {event.kind for event in case.events} | {name for name, holds in facts.items() if holds}
    found = {case.topology, case.net, case.precision, case.optimizer, case.checkpointing, case.schedule, case.optimize}
    found |= {event.kind for event in case.events}
    found |= {name for name, value in asdict(case).items() if value is True}
    visited = [TOPOLOGIES[name] for name in (case.topology, *(e.goes_to for e in case.events if e.goes_to))]
    facts = {
        "pp": any(pp > 1 for _, pp, _, _, _ in visited),
        "tp": any(tp > 1 for _, _, tp, _, _ in visited),
        "sdp": any(sdp > 1 for _, _, _, sdp, _ in visited),
        "state": any(shards for _, _, _, _, shards in visited),
        "dp": any(world // pp // tp > 1 for world, pp, tp, _, _ in visited),
        "sharded": any(sdp > 1 or shards for _, _, _, sdp, shards in visited),
        "family": case.net in ("gpt2", "llama", "neox"),  # whose distributed forms are written by hand
        "running": case.net in ("images", "averaging"),
        "recomputes": case.checkpointing != "none",
        "stateful": case.optimizer != "sgd",
        "half": case.is_half,
        "clips": case.clipping != "none",
        "torch": case.clipping == "torch",
        "several": case.microbatches > 1,
        "passes": case.passes > 1,
        "own batch": not case.prescaled,
    }
    return found | {name for name, holds in facts.items() if holds}


def in_order(cases: Sequence[AnyCase], first: Sequence[str]) -> list[int]:
    """Return the numbers of all cases: those with most of the words first, and of these the quick ones in high precision."""

    def key(number: int) -> tuple[int, bool, bool, int, int]:
        case = cases[number]
        missing = len(set(first) - words_of(case))
        is_compiled = isinstance(case, Case) and case.compiled
        return missing, case.precision != "float64", is_compiled, case.world, number

    return sorted(range(len(cases)), key=key)


@contextlib.contextmanager
def mutated(mutant: Mutant | None) -> Iterator[Path]:
    """Give a folder with a copy of ``container``, and a mutant in it; nothing in this checkout changes."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        shutil.copytree(CONTAINER, folder / "container", symlinks=True)  # with times, so that what is compiled counts
        if mutant is not None:
            file = folder / "container" / mutant.place
            file.write_text(mutant.text(), encoding="utf-8")
            shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
        (folder / "tmp").mkdir()
        yield folder


class Trial:
    """Processes that run cases with one mutant; ended as a group, whatever state they are in.

    Raises:
        NotAMutantError: they cannot import it.
    """

    def __init__(self, folder: Path) -> None:
        self._answers, theirs = os.pipe()
        paths = os.pathsep.join((str(folder / "container"), str(ROOT / "tests")))
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "crossings.mutants", "serve", "--answers", str(theirs)],
                env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        os.close(theirs)
        self._buffer = b""
        found = self._answer(_START)
        if found is None or not all(Path(path).is_relative_to(folder) for path in found["paths"]):
            said = self._said() if found is None else f"it runs {found['paths']}"
            self.close()
            raise NotAMutantError(f"the copy in {folder.name} does not start: {said}")

    def run(self, case: AnyCase) -> Outcome:
        """Run a case; one without an outcome in time is a hang."""
        begin = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(case.to_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Outcome("error", self._said(), 0.0)
        found = self._answer(_DEADLINE)
        if found is not None:
            return Outcome(**found)
        kind = "hang" if self._process.poll() is None else "error"
        return Outcome(kind, self._said(), time.monotonic() - begin)

    def close(self) -> None:
        """End all processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line; None if there is none in time, or will be none."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._answers, 1 << 16) if ready else b""
            if not got:
                return None
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-2000:]


class Patched:
    """Ranks that have imported the runtime, with a mutant's functions in place of its own; the same here, where one process trains.

    Args:
        mutant: None for the runtime as it is.

    Raises:
        NotAMutantError: it cannot be put into them.
    """

    def __init__(self, mutant: Mutant | None) -> None:
        self._given = None if mutant is None else (str(mutant.path), mutant.text())
        try:
            self._undo = None if self._given is None else patch(*self._given)
        except CannotPatchError as error:
            raise NotAMutantError(str(error)) from error
        self._runner = Runner(repeats=False, prepare=self._prepare, timeout=_PATIENCE)

    def _prepare(self, pool: RankPool) -> None:
        if self._given is None:
            return
        try:
            pool.run(patch_rank, pool.size, *self._given, init=False)
        except RankFailed as error:  # which is no outcome of a case
            raise NotAMutantError(str(error)) from error

    def run(self, case: AnyCase) -> Outcome:
        """Run a case."""
        return self._runner.run(case)

    def close(self) -> None:
        """End the ranks, and take the mutant back."""
        self._runner.__exit__()
        if self._undo is not None:
            self._undo()


@contextlib.contextmanager
def trial_of(mutant: Mutant | None) -> Iterator[Patched | Trial]:
    """Give what runs cases with a mutant; with the runtime as it is without one."""
    with contextlib.ExitStack() as ending:
        trial: Patched | Trial
        if mutant is None or can_patch(mutant.path.read_text(encoding="utf-8"), mutant.text()):
            trial = Patched(mutant)
        else:
            trial = Trial(ending.enter_context(mutated(mutant)))
        ending.callback(trial.close)
        yield trial


class Unchanged:
    """The outcomes of cases with the runtime as it is, of which only those count that it passes."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}

    def kind_of(self, case: AnyCase) -> str:
        """Return the kind of a case's outcome."""
        name = case.to_json()
        if name not in self._kinds:
            with trial_of(None) as trial:
                self._kinds[name] = trial.run(case).kind
        return self._kinds[name]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        kind: of the outcome that has shown it; ``survived``, or ``broken`` where it cannot start.
        number: of the case that has shown it; -1 if none has.
        cases: how many were run.
        detail: the difference or error.
    """

    id: str
    kind: str
    number: int
    cases: int
    seconds: float
    detail: str

    @property
    def is_caught(self) -> bool:
        """Return whether a case has shown the mutant."""
        return self.number >= 0


def judge(mutant: Mutant, cases: Sequence[AnyCase], kind_of: Callable[[AnyCase], str], most: int) -> Verdict:
    """Run cases until one has another outcome than the runtime as it is, which passes it or refuses it by name.

    Args:
        kind_of: of a case's outcome without the mutant.
        most: cases to run.
    """
    begin, tried = time.monotonic(), 0

    def verdict(kind: str, number: int, detail: str) -> Verdict:
        return Verdict(mutant.id, kind, number, tried, round(time.monotonic() - begin, 1), detail[-600:])

    try:
        with trial_of(mutant) as trial:
            for number in in_order(cases, mutant.first)[:most]:
                outcome = trial.run(cases[number])
                tried += 1
                if outcome.kind == "hang":  # or the machine is busy
                    outcome = trial.run(cases[number])
                if outcome.kind == "equal":
                    continue
                before = kind_of(cases[number])
                if before in ("equal", "refused") and outcome.kind != before:
                    return verdict(outcome.kind, number, outcome.detail)
    except NotAMutantError as error:
        return verdict("broken", -1, str(error))
    return verdict("survived", -1, "")


@click.group()
def main() -> None:
    """Mistakes in the runtime, found by drawn cases."""
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", RES_OPTIONS="attempts:0")


@main.command()
@click.option("--only", multiple=True, help="id of a mutant; default: all")
@click.option(
    "--seed",
    default="5",
    help="of the cases; this one has more pairs of values among its first 120 than 197 others, and Muon on a divided GPT-2",
)
@click.option("--count", default=120, help="cases")
@click.option(
    "--most", type=int, help="give up on a mutant after so many cases, and leave it out of the report; default: all"
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="report, a line of JSON each; what it has is not run again"
)
def run(only: tuple[str, ...], seed: str, count: int, most: int | None, out: Path | None) -> None:
    """Run mutants; the exit code is 1 if less than nine in ten are caught."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes and folders go
    mutants = [mutant for mutant in read_mutants() if not only or mutant.id in only]
    digests = {mutant.id: mutant.digest() for mutant in mutants}  # says at once which do not fit the code
    cases: dict[int, list[AnyCase]] = {
        1: [draw(seed, number) for number in range(count)],
        2: [draw_version2(seed, number) for number in range(count)],
    }
    compileall.compile_dir(CONTAINER, quiet=2)
    verdicts = _read(out, seed, count, digests)
    unchanged = Unchanged()
    for mutant in mutants:
        if mutant.id not in verdicts:
            chosen = cases[mutant.version]
            verdicts[mutant.id] = found = judge(mutant, chosen, unchanged.kind_of, most or count)
            _tell(mutant, found)
            if out is not None and (found.is_caught or not most):
                line = {"seed": seed, "count": count, "digest": digests[mutant.id], **asdict(found)}
                with out.open("a", encoding="utf-8") as report:
                    report.write(json.dumps(line) + "\n")
    caught = [verdict for verdict in verdicts.values() if verdict.is_caught]
    needed = statistics.median(verdict.cases for verdict in caught) if caught else 0
    click.echo(f"{len(caught)} of {len(verdicts)} caught, half of them by {needed:g} cases or fewer")
    for mutant in mutants:
        if not verdicts[mutant.id].is_caught:
            click.echo(f"  {verdicts[mutant.id].kind}: {mutant.id} ({mutant.file}): {mutant.breaks}")
    sys.exit(len(caught) < _ENOUGH * len(verdicts))


@main.command(hidden=True)
@click.option("--answers", type=int)
def serve(answers: int) -> None:
    """Run the cases that standard input gives, one after the other."""
    with Runner(repeats=False) as runner, os.fdopen(answers, "w", encoding="utf-8") as told:

        def tell(found: dict[str, Any]) -> None:
            told.write(json.dumps(found) + "\n")
            told.flush()

        tell({"paths": [_home(), *runner._run(_home, 1)]})
        for line in sys.stdin:
            tell(asdict(runner.run(read_case(line))))


def _home() -> str:
    """Return where the runtime that runs here lies."""
    import smp_runtime

    return str(smp_runtime.__file__)


def _read(out: Path | None, seed: str, count: int, digests: dict[str, str]) -> dict[str, Verdict]:
    """Return the verdicts of a report that are of these cases and of mutants as they are."""
    found: dict[str, Verdict] = {}
    lines = out.read_text(encoding="utf-8").splitlines() if out is not None and out.exists() else []
    for line in map(json.loads, lines):
        key = (line.pop("seed"), line.pop("count"), line.pop("digest"))
        if key == (seed, count, digests.get(line["id"])):
            found[line["id"]] = Verdict(**line)
    return found


def _tell(mutant: Mutant, verdict: Verdict) -> None:
    by = f" by case {verdict.number}" if verdict.is_caught else ""
    click.echo(f"{mutant.id}: {verdict.kind}{by}, {verdict.cases} cases, {verdict.seconds:.0f} s")
    click.echo(f"  {verdict.detail.strip().splitlines()[-1] if verdict.detail.strip() else mutant.breaks}")


if __name__ == "__main__":
    main()
