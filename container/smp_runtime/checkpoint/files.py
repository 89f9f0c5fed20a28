"""One file: written under a temporary name and renamed, read without running code from it."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from smp_runtime.errors import CheckpointError, SMPUserError


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


def write_user_content(content: Any, path: Path) -> None:
    """Write what a script hands over, after checking that it can be read back without running code.

    Raises:
        SMPUserError: it holds something other than plain containers, numbers, strings and tensors.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SMPUserError(
            "user_content holds an object that could not be loaded back safely "
            f"({str(error).splitlines()[0]}); keep to dictionaries, lists, numbers, strings and tensors, for "
            "example vars(args) instead of args"
        ) from None
    with whole_file(path) as temporary:
        temporary.write_bytes(buffer.getvalue())


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
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read ({str(error).splitlines()[0]}); it was cut, damaged or written "
            "by something else: resume from another tag"
        ) from error
