"""How simulated hosts learn that their leader has ended, and how: a locked file and a status file in one folder.

The leader holds a lock from before its file has its name until it ends, however it ends; so a worker that can lock
the file knows that the leader is gone, without asking again and again and without mistaking a reused process id.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

#: Names the folder that the hosts of one machine share.
STATUS_VARIABLE = "SMP_LAUNCH_STATUS_DIR"

_LOCK = "leader.lock"
_STATUS = "leader.json"


@dataclass(frozen=True)
class LeaderStatus:
    """How the leader ended."""

    exit_code: int
    headline: str = ""


@dataclass(frozen=True)
class StatusDir:
    """The shared folder."""

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
        temporary = self.path / f".{_LOCK}.{os.getpid()}"
        (self.path / _STATUS).unlink(missing_ok=True)
        # Python's descriptors are not inherited, so no rank can keep the lock.
        with temporary.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.replace(temporary, self.path / _LOCK)
            yield

    def publish(self, status: LeaderStatus) -> None:
        """Say how the leader ends; to be called while leading."""
        temporary = self.path / f".{_STATUS}.{os.getpid()}"
        temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
        os.replace(temporary, self.path / _STATUS)

    def leader_started(self) -> bool:
        """Whether a leader is there, or was."""
        return (self.path / _LOCK).exists()

    def wait_for_end(self) -> LeaderStatus | None:
        """Block until the leader has ended; None when it ended without a word."""
        with (self.path / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            return LeaderStatus(**json.loads((self.path / _STATUS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
