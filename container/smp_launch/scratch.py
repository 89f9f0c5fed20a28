"""A job's private folders: removed when it ends, or by the next job when the launcher itself was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "smp-launch-"
_LOCK = "in-use"


@contextmanager
def private_dir(parent: Path) -> Iterator[Path]:
    """A new folder below ``parent`` for as long as this lasts.

    It holds a locked file, so that another launcher can tell a folder in use from one whose launcher was killed,
    also when they do not see each other's processes.
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
