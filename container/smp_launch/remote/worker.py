"""A host that is not the leader: its ranks are started by the leader's mpirun, and it waits for the leader's end.

It must not end earlier: local mode stops all containers once the first has ended.
"""

from __future__ import annotations

import os
import selectors
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.recovery import FOLDER_VARIABLE
from smp_launch.errors import LaunchError
from smp_launch.failures.failure import Cause
from smp_launch.machine.locked_folders import STATUS_VARIABLE, LeaderStatus, StatusDir, private_dir
from smp_launch.machine.network import shared_memory_warning
from smp_launch.machine.processes import adopt_orphans, kill_descendants, reap
from smp_launch.remote.login import memory_of, records_of
from smp_launch.remote.remote_hosts import hosts_patience
from smp_launch.remote.ssh import login_program, serve_ssh, trusted_addresses
from smp_launch.supervision.memory_folder import memory_folder
from smp_launch.supervision.supervise import grace_seconds, write_own_line
from smp_launch.watch.hang_timeout import HangTimeout

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from smp_launch.machine.signals import StopRequests

#: Seconds that the leader may take to start after a worker on the same machine has.
LEADER_PATIENCE = 120.0

#: Seconds between two looks for what the leader leaves.
_LOOK_EVERY = 0.1

#: Seconds beyond the ranks' own grace, for the leader to end.
_EXTRA_GRACE = 5.0


def serve_leader(
    host: str, leader: str, stop: StopRequests, environ: Mapping[str, str], ranks: int
) -> tuple[int, Cause | None]:
    """Let the leader on another machine start its ranks here, and wait until it has ended.

    Returns:
        The leader's exit code, and why this host's job failed when it is not 0.

    Raises:
        LaunchError: this host cannot be reached through ssh.
        Stopped: a request to stop came before the leader's address was known.
    """
    if warning := shared_memory_warning(ranks):
        write_own_line(warning)
    patience = hosts_patience(environ)
    adopt_orphans()
    with ExitStack() as stack:
        folder = stack.enter_context(private_dir(Path(tempfile.gettempdir())))
        status_dir = StatusDir(folder / "leader")
        status_dir.path.mkdir()
        if HangTimeout.from_environment(environ).watches:
            records_of(str(status_dir.path)).mkdir()
        if told := stack.enter_context(memory_folder(environ)):
            memory_of(str(status_dir.path)).symlink_to(told[FOLDER_VARIABLE])
        trusted = trusted_addresses(leader, stop, environ, patience)
        try:
            with serve_ssh(folder, trusted, login_program(os.getpid(), host, status_dir.path), environ):
                return wait_for_leader(host, leader, stop, environ, status_dir, patience)
        finally:
            kill_descendants()
            reap()


def wait_for_leader(
    host: str,
    leader: str,
    stop: StopRequests,
    environ: Mapping[str, str],
    status_dir: StatusDir | None = None,
    patience: float = LEADER_PATIENCE,
) -> tuple[int, Cause | None]:
    """Wait until the leader has ended.

    Args:
        status_dir: where the leader can be seen; by default the folder that the environment names.
        patience: seconds that the leader may take to start.

    Returns:
        The leader's exit code, and why this host's job failed when it is not 0.

    Raises:
        LaunchError: there is no way to see the leader.
    """
    status_dir = status_dir or StatusDir.from_environment(environ)
    if status_dir is None:
        raise LaunchError(
            f"host {host!r} cannot follow its leader {leader!r}: {STATUS_VARIABLE} is not set, and without the folder that "
            "both see this host would have to guess when the job ends; start simulated hosts with fit(), or set the "
            "variable to one folder for all hosts",
            code="SMP203",
        )
    with status_dir.following(host):
        return _wait(host, leader, stop, environ, status_dir, patience)


def _wait(
    host: str, leader: str, stop: StopRequests, environ: Mapping[str, str], status_dir: StatusDir, patience: float
) -> tuple[int, Cause | None]:
    write_own_line(f"{host} waits for {leader}, which starts the ranks of every host")
    waiter = _Waiter(status_dir, patience)
    waiter.start()
    deadline: float | None = None
    stopped_by = ""
    started_by = time.monotonic() + patience
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        selector.register(waiter, selectors.EVENT_READ)
        if stop.lifeline is not None:
            selector.register(stop.lifeline, selectors.EVENT_READ)
        while not waiter.done:
            end = deadline if waiter.leader_started or deadline is not None else started_by
            for key, _ in selector.select(None if end is None else max(0.0, end - time.monotonic())):
                if key.fileobj is waiter:
                    waiter.drain()
                else:
                    cause = _stop_cause(key.fileobj, stop, selector)  # read even when it is not the first
                    stopped_by = stopped_by or cause
            now = time.monotonic()
            if stopped_by and deadline is None:
                deadline = now + grace_seconds(environ) + _EXTRA_GRACE
            if deadline is not None and now >= deadline:
                return 143, Cause(f"host {host} was stopped by {stopped_by}; its leader {leader} did not end in time")
            if not waiter.leader_started and now >= started_by:
                return 1, Cause(
                    f"the leader {leader} did not start within {patience:g} s of {host}; its own log says why"
                )
    return _outcome(waiter.status, host, leader)


def _stop_cause(source: FileDescriptorLike, stop: StopRequests, selector: selectors.BaseSelector) -> str:
    """Return what asks to stop, now that ``source`` can be read; empty if nothing does."""
    if source is stop:
        return next(iter(stop.read()), "")
    if not stop.lifeline_ended():
        return ""
    selector.unregister(source)
    return "the end of the parent process"


def _outcome(status: LeaderStatus | None, host: str, leader: str) -> tuple[int, Cause | None]:
    """Return the exit code and the cause of the leader's end, for a host that waited for it."""
    if status is None:
        return 1, Cause(f"the leader {leader} died without a word while {host} waited for it; it was probably killed")
    if status.exit_code == 0:
        return 0, None
    headline = status.headline or f"the leader {leader} ended with code {status.exit_code}"
    return status.exit_code, Cause(headline)


class _Waiter(threading.Thread):
    """Blocks on the leader's lock in a thread of its own and makes a pipe readable at each change."""

    def __init__(self, status_dir: StatusDir, patience: float) -> None:
        # A daemon, since the lock may be held as long as the leader lives.
        super().__init__(daemon=True, name="wait-for-leader")
        self.leader_started = False
        self.done = False
        self.status: LeaderStatus | None = None
        self._status_dir = status_dir
        self._patience = patience
        # Lets the main thread wait for this one and for signals in one select().
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def drain(self) -> None:
        os.read(self._read, 64)

    def run(self) -> None:
        give_up = time.monotonic() + self._patience
        while not self._status_dir.leader_started():
            if time.monotonic() >= give_up:
                return
            time.sleep(_LOOK_EVERY)
        self.leader_started = True
        os.write(self._write, b"s")
        self.status = self._status_dir.wait_for_end()
        self.done = True
        os.write(self._write, b"e")
