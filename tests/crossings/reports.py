"""What reports of drawn cases add up to, and the shares of values that a draw has."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from crossings import case as version_1
from crossings import version2_case as version_2
from crossings.case import Case
from crossings.version2_case import Version2Case

ROOT = Path(__file__).parents[2]

#: Columns of the ledger.
_HEAD = ("commit", "seed", "cases", "equal", "refused, by reason", "wrong", "processor seconds a case")


def commit_of_this() -> str:
    """Return the commit of the code that runs, with a plus sign if files differ from it; empty outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


def read_reports(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of reports."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def ledger(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a table in Markdown: a row for each commit and seed, in the order of the reports, and one for all."""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    parts = dict.fromkeys((str(line.get("commit", "")), str(line["seed"])) for line in lines)
    for commit, seed in parts:
        chosen = [line for line in lines if (str(line.get("commit", "")), str(line["seed"])) == (commit, seed)]
        yield _row(commit, seed, chosen)
    if len(parts) > 1:
        yield _row("all", "", lines)


def _row(commit: str, seed: str, lines: Sequence[dict[str, Any]]) -> str:
    kinds = Counter(str(line["kind"]) for line in lines)
    reasons = Counter(str(line["detail"]) for line in lines if line["kind"] == "refused")
    wrong = {kind: times for kind, times in kinds.items() if kind not in ("equal", "refused")}
    timed = [float(line["processor_seconds"]) for line in lines if line.get("processor_seconds")]
    refused = "; ".join(f"{times} × {reason}" for reason, times in reasons.most_common())
    found = "; ".join(f"{times} {kind}" for kind, times in wrong.items())
    seconds = f"{sum(timed) / len(timed):.1f}" if timed else ""
    return f"| {commit} | {seed} | {len(lines)} | {kinds['equal']} | {refused or 0} | {found or 0} | {seconds} |"


def shares(cases: Sequence[Case | Version2Case]) -> Iterator[tuple[str, float]]:
    """Yield the share of each value of an axis, each event and each topology, among the cases of its version."""
    for number, kind, of in ((1, Case, version_1), (2, Version2Case, version_2)):
        chosen: list[Any] = [case for case in cases if isinstance(case, kind)]
        axes: dict[str, tuple[Any, ...]] = of.AXES
        found = Counter((name, value) for case in chosen for name in axes for value in _values(case, name))
        found.update(("event", event) for case in chosen for event in {event.kind for event in case.events})
        for name, choices in {**axes, "event": of.EVENTS}.items():
            for value in choices:
                yield f"version {number}: {name}={value}", found[name, value] / max(1, len(chosen))


def _values(case: Any, name: str) -> set[Any]:
    """Return the values of an axis; of topologies all that the training has."""
    value = getattr(case, name)
    return {value, *(e.goes_to for e in case.events if e.goes_to)} if name == "topology" else {value}
