"""Disk space: the size of a save, and an error that reports a full disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from smp_config.machine.disk_space import free_space, why_full
from smp_runtime.errors import CheckpointError


@contextlib.contextmanager
def naming_full_disk(path: Path, needed: int | None) -> Iterator[None]:
    """Turn a full disk inside the block into an error with the file's name and the free space.

    Args:
        path: of the file that is written.
        needed: its bytes, if known.

    Raises:
        CheckpointError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if (why := why_full(error)) is None:
            raise
        what = f"{needed:,} bytes" if needed is not None else "more bytes"
        raise CheckpointError(
            f"{path} cannot be written: {why} (it takes {what}, and {free_space(path.parent)} of its file system; "
            f"{error.strerror}); make room, keep fewer checkpoints with num_kept_partial_checkpoints, or save to a larger disk"
        ) from error


def bytes_of(content: Any) -> int:
    """Return the bytes that an object takes in a file, without the small overhead of its structure.

    Memory that tensors share counts once.
    """
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
