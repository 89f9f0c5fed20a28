"""Removes old checkpoints of a training."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smp_config.errors import kind_of
from smp_runtime.checkpoint.saving.older_folders import remove
from smp_runtime.errors import SMPUserError
from smp_version2.checkpoint.filesystem import DATA_ENDING, METADATA
from smp_version2.checkpoint.locations import is_s3_uri

logger = logging.getLogger("smp")

#: End of the names of folders that are being removed; their names begin with a dot.
_HIDDEN = ".removed"
#: Longest wait for that at the end of a process, also of one that has failed; the next rotation removes the rest.
_SECONDS_AT_END = 5.0
#: The thread that removes folders, if there is one; of the rank that rotates, from its main thread.
_removals: list[threading.Thread] = []


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

    The newest checkpoint stays, and the newest one that is complete. Folders that go get hidden names at once, and a thread removes
    them while training goes on. If the job is killed meanwhile, the next call removes the rest.

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
    folders = [each for each in folder.iterdir() if each.is_dir() and not each.is_symlink()]
    left = [each for each in folders if _is_left_over(each.name, pattern)]
    found = [each for each in folders if pattern.match(each.name) and each not in left]
    found.sort(key=lambda each: sort_fn(str(each)))
    kept = set(found[-max_num_subdirs:])
    kept.update([each for each in found if is_complete(each)][-1:])
    hidden = [_hide(each) for each in found if each not in kept]
    _remove_later([*left, *(each for each in hidden if each is not None)])


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


def _is_left_over(name: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a name is that of a checkpoint which a killed job was removing."""
    is_hidden = name.startswith(".") and name.endswith(_HIDDEN)
    return is_hidden and pattern.match(name[1 : -len(_HIDDEN)]) is not None


def _hide(folder: Path) -> Path | None:
    """Give a folder a hidden name, since a half removed folder must not look like a checkpoint; None if that fails."""
    hidden = folder.with_name(f".{folder.name}{_HIDDEN}")
    try:
        if hidden.exists():  # from a job that was killed while it removed
            shutil.rmtree(hidden)
        folder.rename(hidden)
    except OSError as error:
        logger.warning("the old checkpoint %s was not removed: %s", folder, error)
        return None
    logger.info("removed the old checkpoint %s", folder)
    return hidden


def _remove_later(folders: Sequence[Path]) -> None:
    """Remove hidden folders on a thread, after those of the call before; freeing their blocks takes long."""
    for thread in _removals:
        thread.join()  # there is never room for more than are kept, and those of one removal
    _removals.clear()
    if folders:
        thread = threading.Thread(
            target=lambda: _warn_of_remains(remove(folders)),
            name="smp-remove-checkpoints",
            daemon=True,  # the end of the process waits for it, but not forever
        )
        thread.start()
        _removals.append(thread)


def wait_for_removals(seconds: float | None = None) -> None:
    """Block until all folders that were rotated out are gone, at most ``seconds``."""
    for thread in _removals:
        thread.join(seconds)


atexit.register(wait_for_removals, _SECONDS_AT_END)


def _warn_of_remains(problems: Sequence[str]) -> None:
    """Log which hidden folders could not be removed."""
    if problems:
        logger.warning("old checkpoints were not removed (%s): the next rotation tries again", "; ".join(problems))
