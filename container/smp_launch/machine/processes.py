"""All processes below this one: found, and ended so that none is left."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

#: Of ``prctl``: orphans become children of this process.
_PR_SET_CHILD_SUBREAPER = 36

#: Of a process that has begun to end, in the flags of its ``/proc/PID/stat`` (PF_EXITING in Linux's sched.h).
_EXITING = 0x4

#: Seconds to wait for processes to vanish after SIGKILL; only an uninterruptible system call outlives it.
_KILL_PATIENCE = 3.0


def adopt_orphans() -> bool:
    """Become the parent of every descendant that loses its parent, so that none can escape.

    Returns False if the system cannot do this.
    """
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False  # not on Linux


@dataclass(frozen=True)
class Process:
    """One process of this machine; ``ended``: only its exit code is left."""

    pid: int
    parent: int
    session: int
    ended: bool


def all_processes() -> list[Process]:
    """Return every process of this machine, or an empty list without ``/proc``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if stat := _stat(int(entry.name)):
            state, parent, _group, session = stat[:4]
            found.append(Process(int(entry.name), int(parent), int(session), ended=state in (b"Z", b"X")))
    return found


def find_descendants_of(roots: Collection[int], table: Iterable[Process], apart: Collection[int] = ()) -> set[int]:
    """Return the ids of all living processes below ``roots``, without ``apart`` and all below them."""
    children: dict[int, list[int]] = {}
    for process in table:
        if not process.ended:
            children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        direct = set(children.get(todo.pop(), ())) - found - set(apart)
        found |= direct
        todo += direct
    return found


def find_descendants(apart: Collection[int] = ()) -> set[int]:
    """Return the ids of all living processes below this one, without ``apart`` and all below them."""
    return find_descendants_of([os.getpid()], all_processes(), apart)


def kill_descendants(spare: Collection[int] = (), apart: Collection[int] = ()) -> list[int]:
    """Kill everything below this process with SIGKILL until nothing is left, or some seconds have passed.

    Args:
        spare: processes to let live, but not their children.
        apart: processes to let live with everything below them.

    Returns:
        The processes that are left, normally none.
    """
    deadline = time.monotonic() + _KILL_PATIENCE
    while left := sorted(find_descendants(apart) - set(spare)):
        if time.monotonic() >= deadline:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        # Killed processes vanish within a tick; new ones that a dying parent just started are seen next time.
        time.sleep(0.01)  # the system would notify a parent, but not all of them are children
    return left


def reap(keep: Collection[int] = ()) -> None:
    """Collect the exit status of adopted children, except those in ``keep``, which another caller collects."""
    own = os.getpid()
    for process in all_processes():
        is_dead_child = process.ended and process.parent == own
        if not is_dead_child or process.pid in keep:
            continue
        # Another thread may have collected it since the list was read.
        try:
            os.waitpid(process.pid, os.WNOHANG)
        except ChildProcessError:
            pass


def watch_end(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, or None if the system has none.

    Raises:
        ProcessLookupError: the process is gone.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def is_ending(pid: int) -> bool:
    """Return whether the process has begun to end. Its connections close before its end can be seen."""
    stat = _stat(pid)
    return bool(stat and int(stat[6]) & _EXITING)


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` behind the process name, or an empty list if the process is gone.

    The name may hold blanks and parentheses.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
