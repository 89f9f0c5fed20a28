"""One file: written whole with its checksum, read without running code from it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from smp_runtime.checkpoint.manifest import FileRecord
from smp_runtime.errors import CheckpointError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name when the block ends well, and disappears when not."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(content: Any, path: Path) -> None:
    """``torch.save`` that leaves either the whole file or the former one."""
    with whole_file(path) as temporary:
        torch.save(content, temporary)


def write_text(text: str, path: Path) -> None:
    """Write a small text file whole."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file whole."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)


def write_recorded(content: Any, path: Path) -> FileRecord:
    """Write a file of a checkpoint folder that is not in its place yet: tensors, or bytes as they are.

    Returns:
        Its length and checksum, computed while it was written.
    """
    with open(path, "wb") as file:
        stream = _Hashing(file)
        if isinstance(content, bytes):
            stream.write(content)
        else:
            torch.save(content, stream)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(stream.length, stream.digest.hexdigest())


class _Hashing:
    """A file that is written from its beginning to its end, with its checksum."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.length = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._file.write(data)
        written = memoryview(data).nbytes
        self.length += written
        return written

    def flush(self) -> None:
        self._file.flush()


def read_tensors(path: Path, map_location: Any = "cpu") -> Any:
    """Load a file that only holds tensors and plain objects; an empty file is None.

    Raises:
        CheckpointError: it is missing, cut or damaged.
    """
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*"))[:20] if path.parent.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint file {path}; its folder holds {near or 'nothing'}: check the path and the tag"
        )
    if path.stat().st_size == 0:
        return None
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({str(error).splitlines()[0]}); it was cut, damaged or written "
            "by something else: resume from another tag"
        ) from error
