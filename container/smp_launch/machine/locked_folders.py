"""Folders with a locked file, by which others see that whoever made them lives: a job's private ones, and the leader's.

The system lets go of a lock however its holder ends. So nobody has to ask again and again, nor mistakes a reused process
id; and hosts see one another that do not see each other's processes.
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

_LEADER_LOCK = "leader.lock"
_STATUS = "leader.json"

_PREFIX = "smp-launch-"
_LOCK = "in-use"


@contextmanager
def private_dir(parent: Path) -> Iterator[Path]:
    """A new folder below ``parent`` for as long as this lasts.

    One whose launcher was killed is removed by the next launcher that makes one there.
    """
    _sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        hidden = path / f".{_LOCK}"
        with hidden.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            hidden.rename(path / _LOCK)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove our own user's folders that nobody holds."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if path.stat().st_uid != os.geteuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, or just being made or removed


@dataclass(frozen=True)
class LeaderStatus:
    """How the leader ended."""

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
        """The folder that the environment names; None where it names none."""
        given = environ.get(STATUS_VARIABLE)
        return cls(Path(given)) if given else None

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Be the leader while this lasts."""
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f".{_LEADER_LOCK}.{os.getpid()}"
        (self.path / _STATUS).unlink(missing_ok=True)
        # Python's descriptors are not inherited, so no rank can keep the lock.
        with temporary.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.replace(temporary, self.path / _LEADER_LOCK)
            yield

    @contextmanager
    def following(self, host: str) -> Iterator[None]:
        """Be a host that waits for its leader while this lasts."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._host_lock(host).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def is_followed_by(self, host: str) -> bool:
        """Whether a host waits for the leader now."""
        try:
            with self._host_lock(host).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _host_lock(self, host: str) -> Path:
        return self.path / f"host-{host}.lock"

    def publish(self, status: LeaderStatus) -> None:
        """Say how the leader ends; to be called while leading."""
        temporary = self.path / f".{_STATUS}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
        os.replace(temporary, self.path / _STATUS)

    def leader_started(self) -> bool:
        """Whether a leader is there, or was."""
        return (self.path / _LEADER_LOCK).exists()

    def wait_for_end(self) -> LeaderStatus | None:
        """Block until the leader has ended; None when it ended without a word."""
        with (self.path / _LEADER_LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            return LeaderStatus(**json.loads((self.path / _STATUS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
