"""What the system says of a process: whether it runs, is stopped, or has ended, and whether it gets anywhere."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

#: Of ``/proc/PID/stat``: stopped by a signal, or by a debugger.
_STOPPED = ("T", "t")
_ENDED = ("Z", "X")

#: Share of a core's time from which a process counts as computing.
_BUSY = 0.3

#: Bytes a second that a process reads and writes, from which it counts as moving data; libraries exchange a little while they wait.
_MOVING_BYTES = 4096


@dataclass(frozen=True)
class State:
    """A process at one moment.

    Attributes:
        letter: the system's, such as ``R`` or ``S``; empty when it is gone.
        processor_seconds: that it has used.
        moved_bytes: that it has read and written.
    """

    letter: str
    processor_seconds: float = 0.0
    moved_bytes: int = 0

    @property
    def is_stopped(self) -> bool:
        """Whether it goes on only when somebody lets it."""
        return self.letter in _STOPPED

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return not self.letter or self.letter in _ENDED


def state_of(pid: int) -> State:
    """The state of a process of this machine."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return State("")
    ticks = os.sysconf("SC_CLK_TCK")
    moved = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2]:  # rchar, wchar
            moved += int(line.partition(":")[2])
    return State(words[0].decode(), (int(words[11]) + int(words[12])) / ticks, moved)


def name_of(pid: int) -> str:
    """What a process runs, in a word."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone meanwhile"


def is_active(before: State, after: State, seconds: float) -> bool:
    """Whether a process has computed, or moved data, in the ``seconds`` between two looks."""
    computed = after.processor_seconds - before.processor_seconds
    return computed > _BUSY * seconds or after.moved_bytes - before.moved_bytes > _MOVING_BYTES * seconds
