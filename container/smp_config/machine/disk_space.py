"""A disk without room: which errors of the system mean it, and how much is free, in words."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

#: Errors of a write without space: on the disk, in the user's quota, or within the largest file that is allowed.
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "the file is larger than this process or file system allows",
}


def why_full(error: BaseException) -> str | None:
    """Return ``"the disk is full"``, or which other space ran out; None if the error has another cause.

    The failed write may also be another error's cause, or part of its text (``shutil.copytree``).
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _FULL:
            return _FULL[found.errno]
        found = found.__cause__
    if not isinstance(error, OSError):
        return None
    text = str(error)
    for number, reason in _FULL.items():
        if os.strerror(number) in text:
            return reason
    return None


def note_room(error: BaseException, folder: Path) -> None:
    """Keep the free space with the error of a full disk, before the incomplete output is removed."""
    if why_full(error):
        error.room = free_space(folder)  # type: ignore[attr-defined]


def has_room(folder: Path, needed: int) -> bool:
    """Return whether a folder's disk has so many free bytes for this user; True if that is not known."""
    try:
        about = os.statvfs(folder)
    except OSError:
        return True  # the write itself fails if there is no room
    has_bytes = about.f_bavail * about.f_frsize >= needed
    # A file system that does not count files, such as btrfs, reports 0 of 0.
    has_files = about.f_favail > 0 or not about.f_files
    return has_bytes and has_files


def free_space(folder: Path) -> str:
    """Describe the free space on a folder's disk, as ``"1,024 of 4,194,304 bytes are free"``.

    The folder need not exist yet.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return f"nobody knows how much is free ({error.strerror})"
    said = f"{about.f_bavail * about.f_frsize:,} of {about.f_blocks * about.f_frsize:,} bytes are free"
    if about.f_files and not about.f_favail:
        said += f", and none of its {about.f_files:,} files"
    return said


def full_disk(error: BaseException, path: Path) -> str | None:
    """Return an error text for a full disk: the path, why there is no space, and how much is free.

    Returns:
        None if the error has another cause.
    """
    why = why_full(error)
    if why is None:
        return None
    folder = path if path.is_dir() else path.parent
    room = getattr(error, "room", None) or free_space(folder)
    return f"{path} cannot be written: {why} ({room} on the disk of {folder})"


#: Errors of opening one file too many: for this process, and for the system.
_OPEN_FILES = {
    errno.EMFILE: "this process may have no more files open",
    errno.ENFILE: "the system has too many files open",
}


def no_more_files(error: BaseException) -> str | None:
    """Return the advice for an error of too many open files; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _OPEN_FILES:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"{_OPEN_FILES[error.errno]}, and the limit is {most:,}: raise it with 'ulimit -n 4096' before the job starts"
    )
