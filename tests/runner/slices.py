"""Deals all tests of all environments to slices of a limited time.

Nothing is collected for this, and no environment is needed: the same files and durations always give the same slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.durations import Durations
    from runner.environments import Environment, Selection

#: Seconds of a slice, as estimated: machines differ, and a slice must end within 15 minutes.
SECONDS = 600
#: Processes that run tests beside each other when durations are measured, as in the Makefile.
WORKERS = 3
#: Seconds in which pytest starts, and collects in all its workers.
START = 30


@dataclass(frozen=True)
class Part:
    """The tests of a file whose place in it, divided by ``of``, leaves ``number``."""

    file: str
    number: int
    of: int
    #: One test after the other.
    seconds: float


@dataclass(frozen=True)
class Run:
    """One call of pytest."""

    environment: str
    #: The place of the selection in the environment.
    selection: int
    parts: tuple[Part, ...]
    is_parallel: bool

    @property
    def seconds(self) -> float:
        """The estimated time on the clock; a part stays with one worker."""
        alone = sum(part.seconds for part in self.parts)
        if not self.is_parallel:
            return START + alone
        return START + max(alone / WORKERS, max(part.seconds for part in self.parts))


@dataclass(frozen=True)
class Slice:
    """Runs, one after the other."""

    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """The estimated time on the clock."""
        return sum(run.seconds for run in self.runs)


def deal(environments: Iterable[Environment], durations: Durations, root: Path, limit: float = SECONDS) -> list[Slice]:
    """Deal parts in the order of environments and files; one that does not fit any more begins the next slice.

    A single test that takes longer than ``limit`` makes a slice that is longer, too.
    """
    slices: list[Slice] = []
    current = Slice(())
    for environment in environments:
        for number, selection in enumerate(environment.selections):
            for part in _parts(environment, selection, durations, root, limit):
                one = Run(environment.name, number, (part,), selection.is_parallel)
                longer = _with(current, one)
                if longer.seconds > limit and current.runs:
                    slices.append(current)
                    longer = Slice((one,))
                current = longer
    return [*slices, current] if current.runs else slices


def _parts(
    environment: Environment, selection: Selection, durations: Durations, root: Path, limit: float
) -> Iterator[Part]:
    for file in selection.files(root):
        seconds = durations.seconds(environment.name, file, root)
        of = max(1, math.ceil(seconds / (limit - START)))
        yield from (Part(file, number, of, seconds / of) for number in range(of))


def _with(current: Slice, run: Run) -> Slice:
    """Return a slice with one run more, joined with its last one if one call of pytest can do both."""
    if not current.runs:
        return Slice((run,))
    last = current.runs[-1]
    is_same = (last.environment, last.selection) == (run.environment, run.selection)
    # A plan has one part per file.
    if not is_same or last.parts[-1].file == run.parts[0].file:
        return Slice((*current.runs, run))
    return Slice((*current.runs[:-1], replace(last, parts=last.parts + run.parts)))
