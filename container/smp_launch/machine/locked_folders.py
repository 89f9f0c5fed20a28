"""Folders with a locked file that proves that their owner lives: a job's private folders, and the leader's.

The system releases a lock however its holder ends. So no polling is needed, and a reused process id cannot be
mistaken for the owner. Hosts that do not see each other's processes still see each other's locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

#: Names the folder that the hosts of one machine share.
STATUS_VARIABLE = "SMP_LAUNCH_STATUS_DIR"

#: Files in a shared folder: locked while the leader runs, and how it ended.
_LEADER_LOCK = "leader.lock"
_STATUS = "leader.json"

#: Names of private folders, and of the file in them that is locked while they are used.
_PREFIX = "smp-launch-"
_LOCK = "in-use"


@contextmanager
def private_dir(parent: Path) -> Iterator[Path]:
    """Make a new folder below ``parent`` for the block, and remove it after.

    If a launcher is killed, its folder stays. The next launcher that makes one in ``parent`` removes it.
    """
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        hidden = path / f".{_LOCK}"
        with hidden.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Only now: a sweep takes a folder with an unlocked file of this name for one that was left behind.
            hidden.rename(path / _LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove this user's folders that no process holds."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.geteuid():
                continue
            with (path / _LOCK).open() as lock:
                # The system releases the lock of a process that ends, however it ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, or just being made or removed


@dataclass(frozen=True)
class LeaderStatus:
    """The outcome of the leader."""

    exit_code: int
    headline: str = ""


@dataclass(frozen=True)
class StatusDir:
    """The folder by which the hosts of one machine learn that their leader has ended, and how.

    The leader holds the lock from before its file has its name until it ends.
    """

    path: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StatusDir | None:
        """Return the folder that the environment names, or None if it names none."""
        given = environ.get(STATUS_VARIABLE)
        return cls(Path(given)) if given else None

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Be the leader in the block."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".{_LEADER_LOCK}.{os.getpid()}"
        # Before the lock has its name: a host that finds it must not read how a former leader ended.
        (self.path / _STATUS).unlink(missing_ok=True)
        # Python's descriptors are not inherited, so no rank can keep the lock.
        with temporary.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.replace(temporary, self.path / _LEADER_LOCK)
            yield

    @contextmanager
    def following(self, host: str) -> Iterator[None]:
        """Be a host that waits for its leader in the block."""
        self.path.mkdir(parents=True, exist_ok=True)
        # The system releases the lock if this process ends, however it ends.
        with self._host_lock(host).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_followed_by(self, host: str) -> bool:
        """Return whether a host waits for the leader now."""
        try:
            # A shared lock, so that two who ask at once do not take each other for the host.
            with self._host_lock(host).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no host has ever waited there
        return False

    def _host_lock(self, host: str) -> Path:
        return self.path / f"host-{host}.lock"

    def publish(self, status: LeaderStatus) -> None:
        """Write how the leader ends into the folder. Call it inside :meth:`leading`."""
        temporary = self.path / f".{_STATUS}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
        # This process may be killed at any moment: a host then finds the whole status or none.
        os.replace(temporary, self.path / _STATUS)

    def leader_started(self) -> bool:
        """Return whether a leader is running, or has run."""
        return (self.path / _LEADER_LOCK).exists()

    def wait_for_end(self) -> LeaderStatus | None:
        """Block until the leader has ended, and return how; None if it left no status."""
        with (self.path / _LEADER_LOCK).open() as lock:
            # Shared: all hosts get it at once when the leader's end releases it.
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            return LeaderStatus(**json.loads((self.path / _STATUS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
