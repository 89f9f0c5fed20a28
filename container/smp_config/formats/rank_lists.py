"""Lists of ranks as short texts, such as ``0-3,8-14/2,20``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


def ranks_text(members: Iterable[int]) -> str:
    """Abbreviate a list of ranks: ``0-3,8-14/2,20``."""
    return ",".join(_run_text(run) for run in _runs(members))


def _runs(members: Iterable[int]) -> list[list[int]]:
    """Cut a list of ranks into runs in which neighbors have the same distance."""
    runs: list[list[int]] = []
    for rank in members:
        run = runs[-1] if runs else []
        is_next = len(run) > 1 and rank - run[-1] == run[1] - run[0]
        if len(run) == 1 or is_next:
            run.append(rank)
        else:
            runs.append([rank])
    return runs


def _run_text(run: list[int]) -> str:
    if len(run) < 3:
        return ",".join(map(str, run))
    stride = run[1] - run[0]
    text = f"{run[0]}-{run[-1]}"
    return text if stride == 1 else f"{text}/{stride}"


def ranks_of(text: str) -> tuple[int, ...]:
    """Parse the output of :func:`ranks_text`; skip invalid words."""
    found: list[int] = []
    for word in text.split(","):
        run, _, stride = word.partition("/")
        first, _, last = run.partition("-")
        with contextlib.suppress(ValueError):
            begin = int(first)
            end = int(last) if last else begin
            step = int(stride) if stride else 1
            found += range(begin, end + 1, step)
    return tuple(found)
