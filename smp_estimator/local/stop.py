"""Ending everything that belongs to a job, whatever became of its parents.

A job's processes are found in three ways that complement each other: they carry the job's token in their
environment, they live in the session of one of its bootstraps, or they descend from one of these. mpirun moves its
ranks into process groups of their own and orphans lose their parent, so no single way finds them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from smp_launch.machine.processes import Process, all_processes, find_descendants_of

#: Name of the environment variable that marks every process of a job.
TOKEN_VARIABLE = "SMP_JOB_TOKEN"

#: For a job's processes to vanish after SIGKILL.
_KILL_SECONDS = 2.0


def job_processes(token: str, sessions: Iterable[int]) -> set[int]:
    """Return the living processes of a job, without zombies.

    Args:
        token: value of :data:`TOKEN_VARIABLE` in the job's environment.
        sessions: process ids of the bootstraps, each the leader of its session.
    """
    sessions = set(sessions)
    everything = [p for p in all_processes() or _ps_table() if not p.ended]
    found = {p.pid for p in everything if p.session in sessions or p.pid in sessions or _marked(p.pid, token)}
    return (found | find_descendants_of(found, everything)) - {os.getpid()}


def kill_job(token: str, sessions: Iterable[int]) -> set[int]:
    """Send SIGKILL to every process of a job until none is left; return those that cannot be ended in time."""
    sessions = set(sessions)
    deadline = time.monotonic() + _KILL_SECONDS
    pause = 0.01
    while left := job_processes(token, sessions):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has ended, and its number may be that of another user's process by now
        if time.monotonic() > deadline:
            return job_processes(token, sessions)
        # The kernel needs a moment to take a process down; there is nothing to wait on, as they are not our children.
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return set()


def _ps_table() -> list[Process]:
    """Return all processes listed by ``ps``, for systems without /proc.

    The process group is used in place of the session; orphans outside it are then not found.
    """
    # With a deadline: this runs while a job is being stopped, and must not block that.
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    rows = (line.split()[:4] for line in listing.splitlines())
    return [
        Process(int(pid), int(parent), int(group), ended=state.startswith("Z")) for pid, parent, group, state in rows
    ]


def _marked(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in environment.split(b"\0")
