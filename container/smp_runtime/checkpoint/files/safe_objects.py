"""Data objects that files may hold besides tensors and plain containers; reading them runs no code from the file."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pathlib
import re
import types
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import torch

_numpy: Any = getattr(np, "_core", None) or np.core
#: NumPy's own way of rebuilding arrays and numbers, and classes of the standard library that only hold values.
_DATA = [
    np.ndarray,
    np.dtype,
    _numpy.multiarray._reconstruct,  # noqa: SLF001 - what pickles of arrays name
    _numpy.multiarray.scalar,
    *{type(np.dtype(kind)) for kind in np.typecodes["All"].replace("O", "")},
    argparse.Namespace,
    types.SimpleNamespace,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
]
#: Full names of the classes of Transformers' configurations.
_CONFIGURATION = re.compile(
    r"(transformers\.models\.\w+\.configuration_\w+|transformers\.generation\.configuration_utils)\.(\w+)"
)


@contextlib.contextmanager
def safe_objects(file: IO[bytes]) -> Iterator[None]:
    """Let ``torch.load(file, weights_only=True)`` also read data objects inside the block.

    These are NumPy's arrays and numbers, namespaces, paths, and configurations of Transformers. Each is made by
    its own class and filled with the values in the file. Other threads treat these classes as safe, too, while
    the block runs.

    Args:
        file: the file to read, positioned where reading begins.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([*_DATA, *_configurations(file)])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _configurations(file: IO[bytes]) -> Iterator[type]:
    """Yield the classes of Transformers' configurations that a file names."""
    named = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # since PyTorch 2.6
    start = file.tell()
    names: list[str] = []
    with contextlib.suppress(Exception):  # reading a damaged file reports the damage later
        names = named(file) if named is not None else []
    file.seek(start)
    for name in names:
        if not (match := _CONFIGURATION.fullmatch(name)):
            continue
        with contextlib.suppress(ImportError, AttributeError):
            import transformers

            found = getattr(importlib.import_module(match[1]), match[2])
            bases = (transformers.PretrainedConfig, transformers.GenerationConfig)
            if isinstance(found, type) and issubclass(found, bases):
                yield found
