"""The other hosts of a job, seen from the leader: one ssh connection to each, from before the first rank to the end.

A host that accepts the leader is ready. If its connection ends, the host is gone. The leader's last message reports
how the job ended. If the leader ends without a message, the host knows that it died.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING

from smp_launch.errors import LaunchError, Stopped
from smp_launch.remote.login import FOLLOW, READY
from smp_launch.remote.ssh import Client, read_port
from smp_launch.sagemaker.environment import seconds_of
from smp_launch.watch.other_hosts import OtherHost

if TYPE_CHECKING:
    from smp_launch.machine.locked_folders import LeaderStatus
    from smp_launch.machine.signals import StopRequests

#: Seconds for all hosts to let the leader in, from its start; they may first have to install requirements.
PATIENCE_VARIABLE = "SMP_LAUNCH_HOSTS_PATIENCE"
DEFAULT_PATIENCE = 600.0

#: Seconds between two attempts to reach a host.
_RETRY_AFTER = 0.2

#: Seconds for a connection to end after its output has ended, so that its reason is known.
_END_PATIENCE = 0.2

#: Read from a pipe at once.
_READ_BYTES = 1 << 16

#: Kept bytes of a line without an end, and characters of a host's output that the error shows.
_KEPT_BYTES = 1024
_SHOWN_CHARACTERS = 200

#: Seconds for the hosts to receive the last message.
_LAST_WORD_PATIENCE = 5.0


@dataclass
class _Connection:
    """An attempt to reach one host, or the connection once it is there."""

    host: str
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    retry_at: float = 0.0
    last_error: str = "no attempt yet"
    _heard: bytes = b""
    _said: bool = False

    def start(self, client: Client) -> IO[bytes]:
        """Begin an attempt and return its output, which becomes readable with the host's answer."""
        process = subprocess.Popen(
            client.command(self.host, FOLLOW),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C reaches the leader only: it ends the job in order, and then the hosts.
            start_new_session=True,
        )
        self.process = process
        if process.stdout is None:
            raise AssertionError("the connection has no output")
        self._heard, self._said = b"", False
        return process.stdout

    def hear(self) -> bool:
        """Read the host's output without waiting. It may begin with other text, such as a banner.

        Returns:
            Whether there is nothing more to read: the host is ready, or :meth:`retry` is due.
        """
        process = self.process
        if process is None or process.stdout is None:
            return True
        data = os.read(process.stdout.fileno(), _READ_BYTES)
        *lines, rest = (self._heard + data).split(b"\n")
        self._heard = rest[-_KEPT_BYTES:]
        is_ready = any(line.strip() == READY.encode() for line in lines)
        if is_ready:
            self.ready = True
            return True
        last = _last_line(rest) or _last_line(b"\n".join(lines))
        if last:
            self._said = True
            self.last_error = f"it said {last!r}, but not that it is ready"
        return self.ready or not data

    def retry(self) -> None:
        """End an attempt that failed."""
        process = self.process
        if process is not None and process.stderr is not None:
            # ssh writes why it failed before it ends: read sooner, the reason might be missing.
            try:
                process.wait(_END_PATIENCE)
            except subprocess.TimeoutExpired:
                pass  # then without the reason
            self._kill(process)
            if said := _last_line(_available(process.stderr)):
                self.last_error = said
            elif not self._said:
                self.last_error = "it ended the connection without a word"
        self.close()
        self.retry_at = time.monotonic() + _RETRY_AFTER

    def close(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # what was still buffered has no reader any more
        self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        """Kill the process and its helpers, which would keep its output open.

        The process leads their group until it is waited for.
        """
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                process.kill()
        # Not before: the number of a process that was waited for may belong to another.
        process.wait()


def _available(pipe: IO[bytes]) -> bytes:
    """Return the bytes that can be read now."""
    os.set_blocking(pipe.fileno(), False)
    try:
        return os.read(pipe.fileno(), _READ_BYTES)
    except BlockingIOError:
        return b""


def _last_line(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SHOWN_CHARACTERS] if lines else ""


@dataclass
class RemoteHosts:
    """All other hosts; a context manager that ends the connections.

    Attributes:
        agent: the command with which mpirun reaches a host.
        lost_when: when :meth:`lost` first named a host, in seconds of ``time.time()``.
    """

    agent: str
    lost_when: float | None = None
    _connections: list[_Connection] = field(default_factory=list)

    @classmethod
    def reach(cls, hosts: Sequence[str], client: Client, stop: StopRequests, environ: Mapping[str, str]) -> RemoteHosts:
        """Connect to all ``hosts``.

        Raises:
            LaunchError: one is not there in time.
            Stopped: a request to stop came meanwhile.
        """
        followers = cls(client.agent, _connections=[_Connection(host) for host in hosts])
        try:
            followers._reach(client, stop, hosts_patience(environ), read_port(environ))
        except BaseException:  # also a stop: hosts that were reached must not wait for a leader that gives up
            followers.__exit__()
            raise
        return followers

    def _reach(self, client: Client, stop: StopRequests, patience: float, number: str) -> None:
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            selector.register(stop, selectors.EVENT_READ)
            while missing := [c for c in self._connections if not c.ready]:
                now = time.monotonic()
                if now >= deadline:
                    said = "; ".join(f"{c.host}: {c.last_error}" for c in missing[:4])
                    raise LaunchError(
                        f"{len(missing)} of {len(self._connections)} other host(s) could not be reached within {patience:g} s "
                        f"({said}); the leader asks them through ssh on port {number}; see why they did not start in their "
                        f"own logs, or set {PATIENCE_VARIABLE} to more seconds",
                        code="SMP203",
                    )
                for connection in missing:
                    if connection.process is None and now >= connection.retry_at:
                        selector.register(connection.start(client), selectors.EVENT_READ, connection)
                waits = [c.retry_at - now for c in missing if c.process is None]
                for key, _ in selector.select(max(0.0, min([deadline - now, *waits]))):
                    if key.data is not None:
                        if key.data.hear():
                            selector.unregister(key.fileobj)
                            if not key.data.ready:
                                key.data.retry()
                    elif names := stop.read():
                        raise Stopped(names[0])

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    @property
    def pids(self) -> frozenset[int]:
        """Return the processes that hold the connections."""
        return frozenset(c.process.pid for c in self._connections if c.process is not None)

    def drop(self, hosts: Sequence[str]) -> None:
        """Go on without these hosts."""
        kept = []
        for connection in self._connections:
            if connection.host in hosts:
                connection.close()
            else:
                kept.append(connection)
        self._connections = kept
        self.lost_when = None

    def ranks(self, ranks_of: Mapping[str, Collection[int]]) -> list[OtherHost]:
        """Return the ranks of each host, for the watch over them.

        Args:
            ranks_of: by host, the numbers of its ranks; spare hosts have none.
        """
        found = []
        for connection in self._connections:
            ranks = ranks_of.get(connection.host)
            process = connection.process
            if ranks is None or process is None:
                continue
            if process.stdin and process.stdout:
                found.append(OtherHost(process.stdin, process.stdout, ranks))
        return found

    def lost(self) -> list[str]:
        """Return the hosts that have lost their connection."""
        hosts = [c.host for c in self._connections if c.process is None or c.process.poll() is not None]
        if hosts and self.lost_when is None:
            self.lost_when = time.time()
        return hosts

    def publish(self, status: LeaderStatus) -> None:
        """Send all hosts how the job ended, and wait until they have received it."""
        words = (json.dumps(asdict(status)) + "\n").encode()
        open_connections = [c.process for c in self._connections if c.process is not None]
        for process in open_connections:
            if process.stdin is not None:
                try:
                    os.write(process.stdin.fileno(), words)
                    process.stdin.close()
                except OSError:
                    pass  # that host is gone
        deadline = time.monotonic() + _LAST_WORD_PATIENCE
        for process in open_connections:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass  # the deadline is one for all hosts


def hosts_patience(environ: Mapping[str, str]) -> float:
    """Return how many seconds the hosts of a job wait for each other at the start."""
    return seconds_of(environ, PATIENCE_VARIABLE, DEFAULT_PATIENCE)
