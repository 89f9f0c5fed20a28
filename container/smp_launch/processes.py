"""All processes below this one: found, and ended so that none is left."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36

#: Of a process that has begun to end, in the flags of its ``/proc/PID/stat`` (PF_EXITING in Linux's sched.h).
_EXITING = 0x4

#: Seconds to wait for processes to vanish after SIGKILL; only an uninterruptible system call outlives it.
_KILL_PATIENCE = 3.0


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies, so that none can escape; False if impossible."""
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def descendants(root: int | None = None, apart: Collection[int] = ()) -> list[int]:
    """Process ids of everything below ``root`` (default: this process), zombies and all below ``apart`` left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue
        state, parent = stat.rpartition(b")")[2].split()[:2]
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in apart]
        found += below
        todo += below
    return found


def kill_descendants(
    spare: int | None = None, patience: float = _KILL_PATIENCE, apart: Collection[int] = ()
) -> list[int]:
    """SIGKILL everything below this process until nothing is left.

    Args:
        spare: a process to let live.
        apart: processes to let live with everything below them.

    Returns:
        Those that are still there after ``patience`` seconds (normally none).
    """
    deadline = time.monotonic() + patience
    while (left := [pid for pid in descendants(apart=apart) if pid != spare]) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        # Killed processes vanish within a tick; new ones that a dying parent just started are seen next time.
        time.sleep(0.01)
    return left


def reap(keep: Collection[int] = ()) -> None:
    """Collect the exit status of adopted children; ``keep`` are children whose status somebody else collects."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        pid = int(entry.name)
        if fields[0] == b"Z" and int(fields[1]) == os.getpid() and pid not in keep:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def watch_end(pid: int) -> int | None:
    """A descriptor that becomes readable when the process has ended; None where the system has none to give.

    Raises:
        ProcessLookupError: it has ended already.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def is_ending(pid: int) -> bool:
    """Whether the process has begun to end: its connections close before its end can be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & _EXITING)
