"""One job saves into a folder at a time: a lock that other jobs see, and that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_runtime.checkpoint.files.opened_files import read_text
from smp_runtime.comm.control import host_name
from smp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

#: The lock of a folder of partial checkpoints.
LOCK = ".smp-saving"
#: Errors of ``flock`` if a file system, or the way it is mounted, does not support locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
#: Seconds between two heartbeats on file systems without locks. A holder without one for ``_DEAD_SECONDS`` has ended.
_BEAT_SECONDS = 5.0
#: Seconds for which a lock is waited for: the job before this one may be about to end.
_PATIENCE_SECONDS = 3.0
#: Seconds within which two jobs that find no lock have both written theirs.
_RACE_SECONDS = 0.5
_DEAD_SECONDS = 20.0
#: Most folders with a kept lock, such as those of the latest and the best checkpoint. Scripts that save every
#: checkpoint into its own folder have many folders, and remove them.
_MOST_FOLDERS = 2
#: Descriptors of locks of this process; guarded by the interpreter's own lock, a set's operations being whole.
_held: set[int] = set()


def _let_go() -> None:
    """Close inherited locks in a forked child, such as a data loader worker, so that they end with the parent."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class LockHolder:
    """The job that saves into a folder, for the message of the other job.

    Attributes:
        machine: kernel and process id namespace that ``process`` belongs to; empty if unknown.
        started: when the process began, in the kernel's ticks; 0 if unknown.
        since: when the folder was locked, in seconds since 1970.
        beats: number of heartbeats, on file systems without locks.
    """

    host: str
    process: int
    machine: str
    started: int
    job: str
    since: float
    beats: int = 0

    @classmethod
    def of_this_process(cls) -> LockHolder:
        """Return the holder that describes this process."""
        job = os.environ.get("TRAINING_JOB_NAME", "")
        return cls(host_name(), os.getpid(), _machine(), _started(os.getpid()), job, time.time())

    @classmethod
    def read(cls, path: Path) -> LockHolder | None:
        """Read the holder from a lock's file; None if the file does not describe one."""
        try:
            data = json.loads(read_text(path, most=1 << 16))
            found = cls(**data)
        except (OSError, ValueError, TypeError, RecursionError, CheckpointError):
            return None
        types = {name: type(value) for name, value in asdict(found).items()}
        wanted = {"host": str, "process": int, "machine": str, "started": int, "job": str, "since": float, "beats": int}
        return found if types == wanted else None

    def to_json(self) -> str:
        """Return the text that :meth:`read` reads."""
        return json.dumps(asdict(self))

    def has_ended(self) -> bool | None:
        """Return whether the process is gone; None if it belongs to another machine."""
        if not self.machine or self.machine != _machine():
            return None
        return _started(self.process) != self.started

    @property
    def is_me(self) -> bool:
        """Return whether it is this process."""
        return self.process == os.getpid() and self.has_ended() is False

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(self.since, 0.0), 1e10)))
        return f"process {self.process} on {self.host}{f' of job {self.job}' if self.job else ''}, since {since}"


class FolderLock:
    """A lock that keeps other jobs from saving into the same folder until it is released or its process ends.

    It is the kernel's lock on a file, which some file systems share among hosts (NFS 4, Lustre mounted with
    ``flock``). If there is none, the file itself is the lock. Its holder changes it every few seconds; a holder
    that stops doing so has ended.

    Args:
        path: of the file; made, and removed when the lock is released.

    Raises:
        CheckpointError: another job has it; the message names the job.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._me = LockHolder.of_this_process()
        self._descriptor = -1
        self._over = threading.Event()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                self._lock(descriptor, deadline)
            except BaseException:
                os.close(descriptor)
                raise

    def _lock(self, descriptor: int, deadline: float) -> None:
        """Take the lock of an opened file; close the file if it is no longer the one at ``path``."""
        has_locks = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise self._taken() from None
            os.close(descriptor)
            time.sleep(0.05)  # the system can wait for a lock, but not with a deadline
            return
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            has_locks = False
            self._take_over()
        if not _is_at(descriptor, self.path):  # its former holder has removed it meanwhile
            os.close(descriptor)
            return
        try:
            self._write(self._me, descriptor)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        if not has_locks:
            time.sleep(_RACE_SECONDS)  # another job may write the file at the same time: the last one wins
            if LockHolder.read(self.path) != self._me:  # another job came at the same time, and wrote last
                raise self._taken()
            threading.Thread(target=self._beat, name="smp-saving", daemon=True).start()
        self._descriptor = descriptor
        _held.add(descriptor)

    def _take_over(self) -> None:
        """Check that the holder in the file has ended, on file systems without locks.

        Raises:
            CheckpointError: it has not.
        """
        holder = LockHolder.read(self.path)
        if holder is None or holder.is_me:
            return
        ended = holder.has_ended()
        deadline = time.monotonic() + _DEAD_SECONDS
        while ended is None and time.monotonic() < deadline:
            time.sleep(min(0.2, _DEAD_SECONDS))  # poll: a file does not notify about its holder's heartbeats
            if LockHolder.read(self.path) != holder:  # a heartbeat: the holder is alive
                ended = False
        if ended is False:
            raise self._taken()

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(_BEAT_SECONDS):
            beats += 1
            with contextlib.suppress(OSError):  # the next one may succeed; others wait for several
                self._write(dataclasses.replace(self._me, beats=beats), self._descriptor)

    def _write(self, holder: LockHolder, descriptor: int) -> None:
        # In one call, and with blanks over a former content, since a reader may come at any time.
        os.pwrite(descriptor, holder.to_json().encode().ljust(1024) + b"\n", 0)

    def _taken(self) -> CheckpointError:
        holder = LockHolder.read(self.path)
        return CheckpointError(
            f"another job saves into {self.path.parent} ({holder or 'it does not say who it is'}; it holds {self.path.name}), and "
            "two would mix and remove each other's checkpoints: give each job a folder of its own, or end the other one first"
        )

    @property
    def is_held(self) -> bool:
        """Return whether the lock is still valid; its file or the folder may have been removed."""
        return self._is_mine and _is_at(self._descriptor, self.path)

    @property
    def _is_mine(self) -> bool:
        return self._descriptor >= 0 and self._me.process == os.getpid()

    def release(self) -> None:
        """Let other jobs save there; does nothing in a process that was forked."""
        self._over.set()
        if not self._is_mine:
            return
        if _is_at(self._descriptor, self.path):
            self.path.unlink(missing_ok=True)
        _held.discard(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1


class SavingLocks:
    """The folders that this job saves into: other jobs are kept out of them until it ends."""

    outlives_regrouping = True

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}

    @classmethod
    def of(cls, session: Session) -> SavingLocks:
        """Return the locks of a session; always the same object."""

        def make() -> SavingLocks:
            made = cls()
            session.at_leave.append(made.release)
            return made

        return session.ranks.keep(cls, make)

    def hold(self, folder: Path) -> None:
        """Lock the folder for this job, from now on; raise as :class:`FolderLock`."""
        place = folder.resolve()
        lock = self._locks.pop(place, None)
        if lock is None or not lock.is_held:
            if lock is not None:
                lock.release()
            lock = FolderLock(place / LOCK)
        self._locks[place] = lock
        while len(self._locks) > _MOST_FOLDERS:
            self._locks.pop(next(iter(self._locks))).release()

    def release(self) -> None:
        """Let other jobs save."""
        for lock in self._locks.values():
            with contextlib.suppress(OSError):  # the folder may be gone
                lock.release()
        self._locks.clear()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _machine() -> str:
    """Return an id of this kernel and process id namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> int:
    """Return when a process began, in ticks since the kernel started; 0 if there is none."""
    try:
        # After the name in brackets, which may hold anything; a zombie has ended.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(fields[18])
