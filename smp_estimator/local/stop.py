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
from dataclasses import dataclass
from pathlib import Path

#: Name of the environment variable that marks every process of a job.
TOKEN_VARIABLE = "SMP_JOB_TOKEN"

_PROC = Path("/proc")


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int


def job_processes(token: str, sessions: Iterable[int]) -> set[int]:
    """The living processes of a job (zombies left out).

    Args:
        token: value of :data:`TOKEN_VARIABLE` in the job's environment.
        sessions: process ids of the bootstraps, each the leader of its session.
    """
    sessions = set(sessions)
    everything = _proc_table() if (_PROC / "self" / "stat").exists() else _ps_table()
    found = {p.pid for p in everything if p.session in sessions or p.pid in sessions or _marked(p.pid, token)}
    children: dict[int, list[int]] = {}
    for process in everything:
        children.setdefault(process.parent, []).append(process.pid)
    frontier = list(found)
    while frontier:
        for child in children.get(frontier.pop(), ()):
            if child not in found:
                found.add(child)
                frontier.append(child)
    found.discard(os.getpid())
    return found


def kill_job(token: str, sessions: Iterable[int], deadline_seconds: float = 2.0) -> set[int]:
    """SIGKILL every process of a job, again and again until none is left.

    Returns:
        Process ids that were still alive at the deadline; empty except when the system refuses to let them die.
    """
    sessions = set(sessions)
    deadline = time.monotonic() + deadline_seconds
    pause = 0.01
    while left := job_processes(token, sessions):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if time.monotonic() > deadline:
            return job_processes(token, sessions)
        # The kernel needs a moment to take a process down; there is nothing to wait on, as they are not our children.
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
    return set()


def _proc_table() -> list[_Process]:
    table = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            stat = (_PROC / entry.name / "stat").read_text(errors="replace")
        except OSError:
            continue
        # The command in parentheses may itself hold spaces and parentheses.
        state, parent, _group, session = stat.rpartition(")")[2].split()[:4]
        if state not in "ZX":
            table.append(_Process(int(entry.name), int(parent), int(session)))
    return table


def _ps_table() -> list[_Process]:
    """Without /proc the process group stands in for the session; orphans outside it are then not found."""
    listing = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,pgid=,stat="], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    table = []
    for line in listing.splitlines():
        pid, parent, group, state = line.split()[:4]
        if not state.startswith("Z"):
            table.append(_Process(int(pid), int(parent), int(group)))
    return table


def _marked(pid: int, token: str) -> bool:
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in environment.split(b"\0")
