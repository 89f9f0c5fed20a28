"""How long test files take: measured in earlier runs and kept in ``durations.json``, estimated where nothing was measured."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runner.table import COLLECTED, MISSING, Line, outcomes

FILE = Path(__file__).with_name("durations.json")
#: Seconds of a test as long as nothing at all is measured.
UNKNOWN = 2.0


@dataclass(frozen=True)
class Duration:
    """Of one file in one environment."""

    tests: int
    #: The sum over its tests, as if they ran one after the other; None if none has run.
    seconds: int | None


class Durations:
    """By environment and file."""

    def __init__(self, known: dict[str, dict[str, Duration]]) -> None:
        self._known = known
        overall = _mean((d for files in known.values() for d in files.values()), UNKNOWN)
        self._mean = defaultdict(
            lambda: overall, {name: _mean(files.values(), overall) for name, files in known.items()}
        )

    @classmethod
    def read(cls, path: Path = FILE) -> Durations:
        """Return what a file holds, nothing if there is none."""
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return cls({name: {file: Duration(*pair) for file, pair in files.items()} for name, files in kept.items()})

    def write(self, path: Path = FILE) -> None:
        """Write them, a line per file."""
        blocks = []
        for name, files in self._known.items():
            pairs = [
                f"    {json.dumps(file)}: [{d.tests}, {json.dumps(d.seconds)}]" for file, d in sorted(files.items())
            ]
            blocks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(pairs) + "\n  }")
        path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")

    def seconds(self, environment: str, file: str, root: Path) -> float:
        """Return a file's seconds: measured, or its number of tests times a mean.

        The mean is that of the file in another environment, else that of all files in this one, else of all.
        """
        known = self._known.get(environment, {}).get(file)
        if known and known.seconds is not None:
            return known.seconds
        others = [files[file] for files in self._known.values() if file in files]
        tests = known.tests if known else max((other.tests for other in others), default=0)
        means = [other.seconds / other.tests for other in others if other.seconds is not None and other.tests]
        return (tests or _count(root / file)) * max(means, default=self._mean[environment])

    def updated(self, lines: Iterable[Line], environments: Iterable[str], root: Path) -> Durations:
        """Return these with what a table has measured, for environments and files that are still there."""
        measured = _measured(lines)
        names = [name for name in environments if name in self._known or name in measured]
        found: dict[str, dict[str, Duration]] = {}
        for name in names:
            merged = self._known.get(name, {}) | measured.get(name, {})
            found[name] = {file: duration for file, duration in merged.items() if (root / file).exists()}
        return Durations(found)


def _measured(lines: Iterable[Line]) -> dict[str, dict[str, Duration]]:
    """Return by environment and file what a table has; a file of which a part has run is taken to be like this part."""
    tests: dict[tuple[str, str], list[Line]] = {}
    for line in outcomes(lines).values():
        file = line.test.partition("::")[0]
        if line.outcome != MISSING and "::" in line.test:
            tests.setdefault((line.environment, file), []).append(line)
    found: dict[str, dict[str, Duration]] = {}
    for (environment, file), of_file in tests.items():
        ran = [line.seconds for line in of_file if line.outcome != COLLECTED]
        seconds = max(1, round(sum(ran) * len(of_file) / len(ran))) if ran else None
        found.setdefault(environment, {})[file] = Duration(len(of_file), seconds)
    return found


def _mean(durations: Iterable[Duration], default: float) -> float:
    """Return seconds per test."""
    measured = [(duration.tests, duration.seconds) for duration in durations if duration.seconds is not None]
    tests = sum(count for count, _ in measured)
    return sum(seconds for _, seconds in measured) / tests if tests else default


def _count(path: Path) -> int:
    """Return the number of test functions of a file, of whose matrices nothing is known."""
    return len(re.findall(r"^\s*(?:async )?def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
