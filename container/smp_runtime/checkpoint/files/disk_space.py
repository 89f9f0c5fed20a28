"""Room on the disk: how much a save needs, and an error that says so where there is none."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from smp_runtime.errors import CheckpointError

#: What a write says where there is no room: the disk's, the user's share of it, or the largest file of this process.
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EFBIG: "the file is larger than this process or file system allows",
}


@contextlib.contextmanager
def naming_full_disk(path: Path, needed: int | None) -> Iterator[None]:
    """Inside, a write for which there is no room is an error that names the file and the room.

    Args:
        path: of the file that is written.
        needed: its bytes, as far as known.

    Raises:
        CheckpointError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        what = f"{needed:,} bytes" if needed is not None else "more bytes"
        raise CheckpointError(
            f"{path} cannot be written: {_FULL[error.errno]} (it takes {what}, and {_free(path.parent)} of its file system; "
            f"{error.strerror}); make room, keep fewer checkpoints with num_kept_partial_checkpoints, or save to a larger disk"
        ) from error


def _free(folder: Path) -> str:
    """How much room there is, in words."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return f"nobody knows how much is free ({error.strerror})"
    return f"{about.f_bavail * about.f_frsize:,} of {about.f_blocks * about.f_frsize:,} bytes are free"


def bytes_of(content: Any) -> int:
    """Bytes that an object takes in a file, without the little that its structure takes; memory that tensors share counts once."""
    if isinstance(content, bytes):
        return len(content)
    storages: dict[int, int] = {}
    # Without recursion, and each container once: content may be deep, and hold the same thing in many places.
    waiting, seen = [content], set[int]()
    while waiting:
        found = waiting.pop()
        if isinstance(found, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without storage
                storage = found.untyped_storage()
                storages[storage.data_ptr() or id(storage)] = storage.nbytes()
        elif isinstance(found, Mapping | list | tuple | set) and id(found) not in seen:
            seen.add(id(found))
            waiting.extend(found.values() if isinstance(found, Mapping) else found)
    return sum(storages.values())
