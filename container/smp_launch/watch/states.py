"""The system's view of a process: whether it runs, is stopped, or has ended, and whether it makes progress."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from smp_launch.machine.processes import all_processes, find_descendants_of

#: Of ``/proc/PID/stat``: stopped by a signal, or by a debugger.
_STOPPED = ("T", "t")
_ENDED = ("Z", "X")
#: In a system call that cannot be interrupted, such as a file system's that does not answer.
_ON_DISK = "D"

#: Share of a core's time from which a process counts as computing.
_BUSY = 0.3

#: Bytes a second that a process reads and writes, from which it counts as moving data; libraries exchange a little while they wait.
_MOVING_BYTES = 4096


@dataclass(frozen=True)
class State:
    """A process at one moment.

    Attributes:
        letter: the system's, such as ``R`` or ``S``; empty when it is gone.
        processor_seconds: that it has used, or has waited for while others had the processor.
        moved_bytes: that it has read and written.
    """

    letter: str
    processor_seconds: float = 0.0
    moved_bytes: int = 0

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped, so that it goes on only after it is resumed."""
        return self.letter in _STOPPED

    @property
    def has_ended(self) -> bool:
        """Return whether the process is gone."""
        return not self.letter or self.letter in _ENDED


def state_of(pid: int) -> State:
    """Return the state of a process of this machine."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return State("")
    # User and system time, counted behind the program's name, which may contain spaces.
    used = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    moved = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2]:  # rchar, wchar
            moved += int(line.partition(":")[2])
    return State(words[0].decode(), used + _delayed(pid), moved)


def _delayed(pid: int) -> float:
    """Return the seconds for which a process's threads could have run but waited for a processor.

    It is 0 if the system does not count them.
    """
    delayed = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
                delayed += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    return delayed / 1e9


def name_of(pid: int) -> str:
    """Return the name of the program that a process runs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone meanwhile"


def states_with_children(pids: Collection[int]) -> dict[int, State]:
    """Return the state of each process. Processor time and data of its child processes count as its own."""
    table = all_processes()
    found = {}
    for pid in pids:
        own = state_of(pid)
        parts = [own, *(state_of(child) for child in find_descendants_of([pid], table))]
        used = sum(part.processor_seconds for part in parts)
        found[pid] = State(own.letter, used, sum(part.moved_bytes for part in parts))
    return found


def is_active(before: State, after: State, seconds: float) -> bool:
    """Return whether a process has computed, moved data, or waited for the disk between two looks.

    Args:
        seconds: time between the two looks.
    """
    if before.letter == after.letter == _ON_DISK:
        return True
    computed = after.processor_seconds - before.processor_seconds
    return computed > _BUSY * seconds or after.moved_bytes - before.moved_bytes > _MOVING_BYTES * seconds
