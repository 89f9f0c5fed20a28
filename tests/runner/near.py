"""The tests that are near a change: of its own package first, then by the imports that lead to it, as many as fit into a time."""

from __future__ import annotations

import heapq
import math
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.import_graph import ROOT, imports

from runner.environments import find

if TYPE_CHECKING:
    from runner.durations import Durations

#: Combinations of features find what tests of a package do not; near whatever is in the runtime.
_CROSSINGS = ROOT / "tests" / "crossings" / "test_crossings.py"
_ENGINE = ROOT / "container" / "smp_runtime"
#: The rules of the repository hold for every file.
_RULES = (ROOT / "tests" / "test_house.py", ROOT / "tests" / "test_private_names.py")
#: Tests run beside each other.
_WORKERS = 2
#: Tests in a folder named like one of the change's are nearer by this factor, unless everything is in such a folder.
_NEARER, _TOO_WIDE = 4, {"runtime"}


@dataclass(frozen=True)
class Choice:
    """Test files that run, nearest first, and those that a change can reach as well, but for which no time is left."""

    files: tuple[str, ...]
    left: tuple[str, ...]
    seconds: float


def changed_files(root: Path, base: str) -> list[Path]:
    """Return the files of Python that differ from a commit, new ones included; those of that commit itself if none does."""
    listed = _git(root, "diff", "--name-only", base) + _git(root, "ls-files", "--others", "--exclude-standard")
    if not any(name.endswith(".py") for name in listed):
        listed = _git(root, "diff", "--name-only", f"{base}~1", base)
    return [root / name for name in listed if name.endswith(".py") and (root / name).exists()]


def distances(changed: Iterable[Path], graph: Mapping[Path, set[Path]]) -> dict[Path, float]:
    """Return how far each file that can reach a change is from it.

    A step from a file to one that imports it counts more the more files import it: through what everything imports,
    everything is reached.
    """
    importers = defaultdict(set)
    for path, imported in graph.items():
        for other in imported:
            importers[other].add(path)
    found: dict[Path, float] = {}
    queue = [(0.0, path) for path in changed]
    heapq.heapify(queue)
    while queue:
        distance, path = heapq.heappop(queue)
        if path not in found:
            found[path] = distance
            step = 1 + math.log2(1 + len(importers[path]))
            for other in importers[path] - found.keys():
                heapq.heappush(queue, (distance + step, other))
    return found


def choose(changed: Iterable[Path], durations: Durations, limit: float) -> Choice:
    """Return the tests of the newest environment that are near a change; ``limit``: seconds, of two workers."""
    changed = list(changed)
    known = {ROOT / file for selection in find("newest").sample for file in selection.files()}
    reached = distances(changed, imports())
    packages = {part.removeprefix("smp_") for path in changed for part in path.parent.parts} - _TOO_WIDE
    tests = {path: reached[path] for path in known & reached.keys()}
    farthest = max(tests.values(), default=0.0)
    for path in known:
        if path.parent.name in packages:  # also what reaches the change through a process of its own only
            tests[path] = tests.get(path, farthest) / _NEARER
    tests |= dict.fromkeys(known & set(changed), 0.0)
    always = {*_RULES, *([_CROSSINGS] if any(path.is_relative_to(_ENGINE) for path in changed) else [])}
    files, left, spent = [], [], 0.0
    for path in sorted(always | tests.keys(), key=lambda path: (-1.0 if path in always else tests[path], path)):
        name = path.relative_to(ROOT).as_posix()
        seconds = durations.seconds("newest", name, ROOT) / _WORKERS
        if path in changed or path in always or spent + seconds <= limit:
            files.append(name)
            spent += seconds
        else:
            left.append(name)
    return Choice(tuple(files), tuple(left), spent)


def _git(root: Path, *words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
