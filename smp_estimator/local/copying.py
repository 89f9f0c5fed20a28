"""Copies of folders whose links and special files may be anything."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)


def copy_folder(source: Path, target: Path, leave_out: Callable[[Path], bool] = lambda _: False) -> None:
    """Copy a directory with what its links point to, and without what :func:`is_left_out` names.

    Args:
        source: a directory.
        target: written to; may exist.
        leave_out: what else is not copied, by its path.

    Raises:
        shutil.Error: files that cannot be read or written, as a list of (from, to, reason).
    """

    def ignore(directory: str, names: list[str]) -> set[str]:
        around = _around(Path(directory), source)
        paths = (Path(directory, name) for name in names)
        return {path.name for path in paths if leave_out(path) or _is_odd(path, around)}

    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)


def is_left_out(path: Path) -> bool:
    """Whether a path cannot be copied, said as a warning.

    These are links that lead back into a folder around them (the copy would have no end), links to
    nothing, and what is neither file nor directory: pipes, sockets, devices.
    """
    return _is_odd(path, _around(path.parent, path.parent))


def _is_odd(path: Path, around: set[str]) -> bool:
    if not path.exists():
        logger.warning("the link %s points to nothing and is left out", path)
    elif not path.is_file() and not path.is_dir():
        logger.warning("%s is neither a file nor a directory and is left out", path)
    elif path.is_symlink() and path.is_dir() and os.path.realpath(path) in around:
        logger.warning("the link %s leads back to %s, which holds it, and is left out", path, os.path.realpath(path))
    else:
        return False
    return True


def _around(directory: Path, top: Path) -> set[str]:
    """Every folder that holds ``directory``, along the way from ``top`` as well as where its links really lead."""
    way = [directory, *(parent for parent in directory.parents if parent.is_relative_to(top))]
    real = {Path(os.path.realpath(folder)) for folder in way}
    return {str(folder) for one in real for folder in (one, *one.parents)}
