"""The table: a line of JSON for the outcome of one test in one environment at one commit. Needs the standard library only."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

#: Outcomes of tests. An expected failure, which pytest checks, is neither a pass nor a fault.
PASSED, FAILED, SKIPPED, XFAILED = "passed", "failed", "skipped", "xfailed"
#: The environment has this test; a line of its outcome follows when it has run.
COLLECTED = "collected"
#: The environment itself cannot run here; such a line names no test.
MISSING = "missing"
#: Of commits of a working tree with changes.
DIRTY = "-dirty"


@dataclass(frozen=True)
class Line:
    """One line."""

    #: As pytest names it; the file alone if the file was skipped, or could not be imported, as a whole.
    test: str
    environment: str
    outcome: str
    #: In full, with :data:`DIRTY` at its end if the working tree had changes.
    commit: str
    #: Of a skip, a failure, an expected failure, or a missing environment.
    reason: str = ""
    #: Of its set-up, itself and its tear-down.
    seconds: float = 0.0


def append(path: Path, lines: Iterable[Line]) -> None:
    """Append lines; those of several processes do not mix, as each call is one write to the file's end."""
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())


def mend(path: Path) -> None:
    """End the last line, in the middle of which a process may have been killed, so that the next one stands alone."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def read(path: Path) -> list[Line]:
    """Return the lines, the oldest first, without those in whose middle a process was killed."""
    found = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(Line(**json.loads(text)))
        except (ValueError, TypeError):
            continue
    return found


def outcomes(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return the newest line of each environment and test, that of its outcome if it has one.

    The line of a whole file counts until one of its tests has a line.
    """
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        file, separator, _ = line.test.partition("::")
        if separator:
            found.pop((line.environment, file), None)
        key = line.environment, line.test
        if line.outcome != COLLECTED or key not in found:
            found[key] = line
    return found


def current_commit(root: Path) -> str:
    """Return the commit of a working tree, marked if the tree has changes."""
    commit = _git(root, "rev-parse", "HEAD").strip()
    return commit + (DIRTY if _git(root, "status", "--porcelain").strip() else "")


def resolve(root: Path, revision: str) -> str:
    """Return the commit that a revision such as a branch names."""
    return _git(root, "rev-parse", f"{revision}^{{commit}}").strip()


def commits_since(root: Path, revision: str) -> set[str]:
    """Return a commit and those up to now that contain it."""
    later = _git(root, "rev-list", "--ancestry-path", f"{revision}..HEAD").split()
    return {resolve(root, revision), *later}


def count_commits(root: Path) -> int:
    """Return how many commits lead to the current one."""
    return int(_git(root, "rev-list", "--count", "HEAD"))


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout
