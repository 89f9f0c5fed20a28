"""The lines of a stack that are the script's own: not the interpreter's, an installed package's, or this library's."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

#: Packages of this library, wherever they are installed.
_RUNTIME = frozenset(
    """smdistributed smp_integrations smp_runtime smp_tools smp_transformer_engine smp_version2 torch_sagemaker""".split()
)
_OURS = _RUNTIME | {"smp_config", "smp_emulation", "smp_estimator", "smp_launch", "smp_records"}

#: Folders of installed packages, whatever environment they belong to.
_INSTALLED = ("site-packages", "dist-packages")

_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_BESIDE = os.path.join(str(Path(__file__).parents[1]), "")
_ABOVE = os.path.join(str(Path(__file__).parents[2]), "smp_estimator", "")


@functools.lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Return whether a source file belongs to this library."""
    if file.startswith(_ABOVE):
        return True
    return file.startswith(_BESIDE) and file[len(_BESIDE) :].partition(os.sep)[0] in _OURS


def is_runtime_module(name: str) -> bool:
    """Return whether a Python module belongs to the runtime.

    The runtime is the engine, its tools, the adapters of other libraries, and the façade.
    """
    return name.partition(".")[0] in _RUNTIME


@functools.lru_cache(maxsize=4096)
def is_standard(file: str) -> bool:
    """Return whether a source file belongs to the interpreter, or is none (``<frozen runpy>``, ``<string>``)."""
    if file.startswith("<"):
        return True
    is_installed = any(folder in file for folder in _INSTALLED)
    return file.startswith(_STANDARD) and not is_installed


@functools.lru_cache(maxsize=4096)
def is_script_s(file: str) -> bool:
    """Return whether a source file is the user's own."""
    if is_ours(file) or is_standard(file):
        return False
    folders = file.split(os.sep)
    return not any(folder in _INSTALLED for folder in folders)


def script_line(depth: int = 1) -> tuple[str, int]:
    """Return file and line of the script that have led here, on this thread, or ``("", 0)`` if there is none.

    Args:
        depth: frames to leave out, the caller's own first.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - inspect.currentframe() and its f_back take several times as long
    while frame is not None:
        if is_script_s(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
