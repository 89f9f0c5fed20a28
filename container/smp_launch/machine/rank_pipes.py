"""Pipes through which the ranks of this machine write to the launcher, two for each rank.

What goes through mpirun is kept in its memory without a limit, takes quadratic time for a long line, and is lost where a rank ends
badly. A pipe with a name holds a rank up until its output is read, and keeps the output after the rank's end.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: Names a folder of the launcher's machine with these pipes. A failing rank also writes its whole record there, as
#: ``<rank>.json``.
REPORT_VARIABLE = "SMP_LAUNCH_REPORTS"

#: The launcher's end is of this descriptor of the rank.
DESCRIPTORS = (1, 2)


def make_pipes(folder: Path, ranks: int) -> None:
    """Make the pipes of ``ranks`` ranks in a folder of this user's own."""
    for rank in range(ranks):
        for descriptor in DESCRIPTORS:
            os.mkfifo(_path(folder, rank, descriptor), 0o600)


def open_pipe(folder: Path, rank: int, descriptor: int) -> int:
    """Open the launcher's end, which does not block; its end is seen after the rank has opened and closed its own."""
    return os.open(_path(folder, rank, descriptor), os.O_RDONLY | os.O_NONBLOCK)


def end_pipes(folder: Path, ranks: int) -> None:
    """Let the launcher see the end of pipes that no rank has opened: the program that would have started the ranks is gone."""
    for rank in range(ranks):
        for descriptor in DESCRIPTORS:
            with contextlib.suppress(OSError):  # the launcher has seen its end
                os.close(os.open(_path(folder, rank, descriptor), os.O_WRONLY | os.O_NONBLOCK))


def write_to(folder: Path, rank: int) -> list[int]:
    """Open a rank's ends of its pipes; return none without pipes, or if the launcher does not read them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for descriptor in DESCRIPTORS:
            # Without waiting for a reader: the launcher has opened its end before any rank starts.
            found.append(os.open(_path(folder, rank, descriptor), os.O_WRONLY | os.O_NONBLOCK))
            os.set_blocking(found[-1], True)
        return found
    for opened in found:
        os.close(opened)
    return []


def take_pipes(folder: Path, rank: int) -> None:
    """Redirect the output of this process, which is the rank, and of its children into the rank's pipes."""
    for descriptor, opened in zip(DESCRIPTORS, write_to(folder, rank), strict=False):
        # By descriptor: output of C libraries and of children goes there too.
        os.dup2(opened, descriptor)
        os.close(opened)


def _path(folder: Path, rank: int, descriptor: int) -> Path:
    return folder / f"{rank}.{descriptor}"
