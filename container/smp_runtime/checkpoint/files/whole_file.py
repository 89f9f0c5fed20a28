"""One file: written whole with its checksum, read without running code from it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smp_runtime.checkpoint.files.manifest import FileRecord
from smp_runtime.errors import CheckpointError

#: What reading a damaged file may raise.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)

_numpy: Any = getattr(np, "_core", None) or np.core
#: NumPy's own way of rebuilding arrays and numbers, which only makes data.
_NUMPY = [
    np.ndarray,
    np.dtype,
    _numpy.multiarray._reconstruct,  # noqa: SLF001 - what pickles of arrays name
    _numpy.multiarray.scalar,
    *{type(np.dtype(kind)) for kind in np.typecodes["All"].replace("O", "")},
]


@contextlib.contextmanager
def arrays_are_safe() -> Iterator[None]:
    """Inside, ``torch.load(weights_only=True)`` also reads arrays and numbers of NumPy."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(_NUMPY)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


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
    """Load a file that only holds tensors, arrays and plain objects; an empty file is None.

    Raises:
        CheckpointError: it is missing, cut or damaged, or holds other objects.
    """
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*"))[:20] if path.parent.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint file {path}; its folder holds {near or 'nothing'}: check the path and the tag"
        )
    if path.stat().st_size == 0:
        return None
    try:
        # Opened here, because PyTorch reads a path that ends in .safetensors as such a file.
        with arrays_are_safe(), open(path, "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=True)
    except UNREADABLE as error:
        # A damaged archive is no archive, or has other checksums: this one says what was saved.
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} holds an object that may run code when it is loaded ({refused_object(error)}); if you trust who "
                "wrote it, pass pickle_module=pickle, or save plain objects, for example vars(args) instead of args"
            ) from None
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({refused_object(error)}); it was cut, damaged or written "
            "by something else: resume from another tag"
        ) from error


def refused_object(error: Exception) -> str:
    """What PyTorch's safe loader has refused to make, or why it gave up, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if any(word in line for word in ("GLOBAL", "Unsupported", "Can only"))]
    return ((telling or lines or [""])[0] or type(error).__name__)[:200]
