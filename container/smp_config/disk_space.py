"""A disk without room: which errors of the system mean it, and how much is free, in words."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: What a write says where there is no room: the disk's, the user's share of it, or the largest file of this process.
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "the file is larger than this process or file system allows",
}


def why_full(error: BaseException) -> str | None:
    """``"the disk is full"``, or which other room there was none of; None for an error that means something else.

    A write that failed may have been told on as another error's cause, or in the text of one (``shutil.copytree``).
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _FULL:
            return _FULL[found.errno]
        found = found.__cause__
    text = str(error) if isinstance(error, OSError) else ""
    return next((said for number, said in _FULL.items() if os.strerror(number) in text), None)


def free_space(folder: Path) -> str:
    """``"1,024 of 4,194,304 bytes are free"`` on the disk of a folder, which need not be there yet."""
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
    """What was to be written where, why there is no room, and how much there is; None where room is not what is missing."""
    if (why := why_full(error)) is None:
        return None
    folder = path if path.is_dir() else path.parent
    return f"{path} cannot be written: {why} ({free_space(folder)} on the disk of {folder})"
