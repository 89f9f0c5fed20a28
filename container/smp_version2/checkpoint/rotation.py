"""Removes old checkpoints of a training."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp_config.errors import kind_of
from smp_runtime.errors import SMPUserError
from smp_version2.checkpoint.filesystem import DATA_ENDING, METADATA
from smp_version2.checkpoint.locations import is_s3_uri

logger = logging.getLogger("smp")


def sort_by_last_int(path: str | os.PathLike[str]) -> int:
    """Return the last whole number in the name of a folder, -1 if there is none."""
    found = re.findall(r"\d+", Path(path).name)
    return int(found[-1]) if found else -1


#: The default order of folders: ``llama-9steps`` is older than ``llama-10steps``.
SORT_BY_LAST_INT = sort_by_last_int


def limit_num_subdirs(
    dir: str | os.PathLike[str],
    max_num_subdirs: int,
    sort_fn: Callable[[Any], Any] = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: bool = True,
) -> None:
    """Remove the oldest checkpoints of a folder, until it has ``max_num_subdirs`` of them.

    The newest checkpoint stays, and the newest one that is complete.

    Args:
        dir: a checkpoint, or a folder inside it. The innermost folder of the path whose name matches ``regex`` is the checkpoint,
            and its parent is cleaned. If no name matches, ``dir`` itself is cleaned.
        max_num_subdirs: number of checkpoints that stay, at least 1.
        sort_fn: function of a checkpoint's path; the oldest has the smallest value.
        regex: pattern of the names of checkpoints; None for all names with a number.
        log: whether this rank removes and logs. Exactly one rank passes True.

    Raises:
        SMPUserError: a number below 1, or an address in S3.
    """
    if not isinstance(max_num_subdirs, int) or max_num_subdirs < 1:
        raise SMPUserError(
            f"limit_num_subdirs got max_num_subdirs={max_num_subdirs!r}, {kind_of(max_num_subdirs)}; pass a whole number of at "
            "least 1",
            code="SMP402",
        )
    if is_s3_uri(dir):
        raise SMPUserError(
            f"limit_num_subdirs got {os.fspath(dir)!r}; it removes folders only: use a lifecycle rule of the bucket",
            code="SMP402",
        )
    if not log:
        return
    folder, pattern = _find_folder(Path(dir), regex)
    if not folder.is_dir():
        return
    found = [each for each in folder.iterdir() if pattern.match(each.name) and each.is_dir() and not each.is_symlink()]
    found.sort(key=lambda each: sort_fn(str(each)))
    kept = set(found[-max_num_subdirs:])
    kept.update([each for each in found if is_complete(each)][-1:])
    for each in found:
        if each not in kept:
            _remove(each)


def _find_folder(path: Path, regex: str | None) -> tuple[Path, re.Pattern[str]]:
    """Return the folder that holds checkpoints, and the pattern of their names."""
    if regex is None:
        return path, re.compile(r".*\d")
    pattern = re.compile(regex)
    for each in (path, *path.parents):
        if pattern.match(each.name):
            return each.parent, pattern
    return path, pattern


def is_complete(folder: Path) -> bool:
    """Return whether each folder with tensors in it has the metadata that is written last."""
    with_data = {path.parent for path in folder.rglob(f"*{DATA_ENDING}")}
    if with_data:
        return all((each / METADATA).exists() for each in with_data)
    return any(path.is_file() for path in folder.rglob("*"))


def _remove(folder: Path) -> None:
    try:
        # First of all, so that a folder that is removed only in part is no checkpoint.
        for path in sorted(folder.rglob(METADATA)):
            path.unlink()
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("the old checkpoint %s was not removed: %s", folder, error)
    else:
        logger.info("removed the old checkpoint %s", folder)
