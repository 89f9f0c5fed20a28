"""The time of each module's own code, from several runs of the tracing step.

A single run is not reliable: the first one fills caches and memory pools, and a machine that starts many
ranks at once interrupts any of them. So the step runs several times, and the median counts for a module.
Modules that do the same work (of one class, on arguments and parameters of the same shapes, with as many
operations) share their times, so that equal blocks are equal to the partition. A module that is clearly
slower than its like keeps its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

#: Runs that count; the one before them warms up.
RUNS = 7

#: Seconds after which no further run begins. A first run that takes longer counts itself, and is the only one.
SECONDS = 10.0

#: A module does other work than its like if its fastest run takes more than ``APART`` times their median, and more than
#: ``APART_SECONDS`` longer.
APART = 2.0
APART_SECONDS = 1e-4

_Round = TypeVar("_Round")


def run_repeatedly(
    run: Callable[[], _Round],
    *,
    runs: int = RUNS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[_Round]:
    """Run at most ``runs`` times after a warm-up run, and begin no run after ``seconds`` of the clock.

    Returns:
        The results of the runs that count: without the first, unless there was no time for another.
    """
    begun, rounds = clock(), [run()]
    while len(rounds) <= runs and clock() - begun < seconds:
        rounds.append(run())
    return rounds[1:] or rounds


def median_times(rounds: Sequence[Mapping[str, float]], kinds: Mapping[str, Hashable]) -> dict[str, float]:
    """Return the median seconds of each module, by path.

    Args:
        rounds: of every run, the seconds of each module's own code by path; a module that did not run is not in it.
        kinds: the same for modules that do the same work, by path.
    """
    taken: dict[str, list[float]] = {}
    for one in rounds:
        for path, seconds in one.items():
            taken.setdefault(path, []).append(seconds)
    alike: dict[Hashable, list[str]] = {}
    for path in taken:
        alike.setdefault(kinds[path], []).append(path)
    found: dict[str, float] = {}
    for paths in alike.values():
        for group in _groups(paths, taken):
            together = median([seconds for path in group for seconds in taken[path]])
            found.update(dict.fromkeys(group, together))
    return found


def _groups(paths: Sequence[str], taken: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Split modules of one kind into groups, so that clearly slower modules are separate."""
    groups: list[list[str]] = []
    for path in sorted(paths, key=lambda path: median(taken[path])):
        former: list[float] = []
        for other in groups[-1] if groups else ():
            former += taken[other]
        limit = max(APART * median(former), median(former) + APART_SECONDS) if former else 0.0
        if former and min(taken[path]) <= limit:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups
