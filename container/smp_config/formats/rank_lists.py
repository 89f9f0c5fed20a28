"""Lists of ranks as short texts, such as ``0-3,8-14/2,20``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable


def ranks_text(members: Iterable[int]) -> str:
    """Abbreviate a list of ranks: ``0-3,8-14/2,20``."""
    runs: list[list[int]] = []
    for rank in members:
        run = runs[-1] if runs else []
        if len(run) == 1 or (len(run) > 1 and rank - run[-1] == run[1] - run[0]):
            run.append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        if len(run) < 3:
            words += [str(rank) for rank in run]
        else:
            stride = run[1] - run[0]
            words.append(f"{run[0]}-{run[-1]}" + (f"/{stride}" if stride != 1 else ""))
    return ",".join(words)


def ranks_of(text: str) -> tuple[int, ...]:
    """Parse the output of :func:`ranks_text`; skip invalid words."""
    found: list[int] = []
    for word in text.split(","):
        run, _, stride = word.partition("/")
        first, _, last = run.partition("-")
        with contextlib.suppress(ValueError):
            begin = int(first)
            found += range(begin, (int(last) if last else begin) + 1, int(stride) if stride else 1)
    return tuple(found)
