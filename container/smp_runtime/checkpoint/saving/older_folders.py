"""Folders of partial checkpoints beside a new one: their order, and which of them are removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from smp_runtime.checkpoint.files.manifest import (
    PARTIAL,
    folders_in,
    inspect_folder,
    name_of_former,
    newest_name,
    read_manifest,
)
from smp_runtime.checkpoint.files.opened_files import is_plain_name
from smp_runtime.checkpoint.folder_lock import LockHolder
from smp_runtime.errors import CheckpointError

#: File in a folder that is being written: who writes it.
OWNER = ".owner"
#: Seconds without a write after which a folder is left over, if it cannot be checked whether its job is alive.
_ABANDONED_SECONDS = 3600.0
#: Seconds between two saves, at least, in the order of checkpoints.
_TICK = 0.001
#: Times beyond it are none: of the year 5138.
_LATEST = 1e11


@dataclass(frozen=True)
class _FolderSnapshot:
    """A folder's state when it was last read; valid until an entry is added or removed.

    Attributes:
        stamp: device, number and time of the folder.
        saved: when its checkpoint was saved; None without a readable manifest.
        is_whole: whether all its files were there.
    """

    stamp: tuple[int, ...]
    saved: float | None
    is_whole: bool


class SeenFolders:
    """Folders that this job has looked into: a folder of thousands is not read anew at each save."""

    outlives_regrouping = True

    def __init__(self) -> None:
        self._seen: dict[Path, _FolderSnapshot] = {}
        #: By folder of checkpoints, the time of this job's last save.
        self._newest: dict[Path, float] = {}

    def look(self, folders: Iterable[Path]) -> dict[Path, _FolderSnapshot]:
        """Return a snapshot of each folder that still exists."""
        found = {folder: seen for folder in folders if (seen := self._look(folder)) is not None}
        self._seen = found
        return found

    def time_of_save(self, parent: Path) -> float:
        """Return the time of a save into a folder that ends now, by which checkpoints are ordered.

        It is later than that of the newest checkpoint, whatever the clock says: clocks are put back, and hosts' clocks differ.
        """
        former = self._newest.get(parent)
        if former is None:
            former = _time_of_newest(parent)
        self._newest[parent] = now = max(time.time(), former + _TICK)
        return now

    def _look(self, folder: Path) -> _FolderSnapshot | None:
        try:
            about = folder.stat()
        except OSError:
            return None
        stamp = (about.st_dev, about.st_ino, about.st_mtime_ns, about.st_ctime_ns)
        known = self._seen.get(folder)
        if known is not None and known.stamp == stamp:
            return known
        found = inspect_folder(folder)
        return _FolderSnapshot(stamp, None if found.manifest is None else found.manifest.saved, found.is_whole)


def _time_of_newest(parent: Path) -> float:
    """Return when the newest checkpoint in a folder was saved; 0 if there is none that can be read."""
    name = newest_name(parent)
    if name is None or not is_plain_name(name):
        return 0.0
    with contextlib.suppress(CheckpointError):
        saved = read_manifest(parent / name).saved
        return saved if saved < _LATEST else 0.0
    return 0.0


def find_surplus(parent: Path, keep: int, newest: str, seen: SeenFolders | None = None) -> list[Path]:
    """Return the oldest partial checkpoints, all but ``keep``.

    The newest always stays, and incomplete ones are removed first. Folders without a readable manifest stay, too.
    They are not ours, since a checkpoint gets its name together with its manifest.

    Args:
        seen: folders that earlier calls have inspected.
    """
    keep = max(1, keep)
    names = folders_in(parent)
    if len({*names.values()}) <= keep:  # whatever they hold
        return []
    looked = (seen or SeenFolders()).look(names)
    ours = {folder: each for folder, each in looked.items() if each.saved is not None}

    def value(folder: Path) -> tuple[bool, bool, float]:
        each = ours[folder]
        return names[folder] == newest, each.is_whole, each.saved or 0.0

    order = sorted(ours, key=value)
    oldest = list(dict.fromkeys(names[folder] for folder in order))
    surplus = max(0, len(oldest) - keep)
    doomed = set(oldest[:surplus])
    return [folder for folder in ours if names[folder] in doomed]


def find_leftovers(final: Path, separate: bool) -> list[Path]:
    """Return unfinished folders of killed jobs, and checkpoints that new ones have replaced.

    A job writes its checkpoints one at a time, so it writes nothing else while it publishes one. The lock should
    keep other jobs away. If another job writes here nevertheless, its folders stay as long as it may be running.

    Args:
        separate: whether hosts have folders of their own: then each lacks files that others have.
    """
    parent = final.parent
    replaced = []
    for folder in parent.glob(".*.old"):
        name = name_of_former(folder)
        if name is None:
            continue
        # The former one goes only if what has replaced it can be read.
        successor = inspect_folder(final.with_name(name))
        is_kept = successor.is_whole or separate or name == final.name
        if successor.manifest is not None and is_kept:
            replaced.append(folder)
    unfinished = [folder for folder in parent.glob(f".*{PARTIAL}*.tmp") if _is_left_over(folder)]
    return [*parent.glob(f".*{PARTIAL}*.removed"), *unfinished, *replaced]


def _is_left_over(folder: Path) -> bool:
    """Return whether no running job writes a checkpoint into the folder any more."""
    holder = LockHolder.read(folder / OWNER)
    if holder is None or holder.is_me:
        return True
    ended = holder.has_ended()
    if ended is None:
        newest = max((file.stat().st_mtime for file in [folder, *folder.iterdir()]), default=0.0)
        return time.time() - newest > _ABANDONED_SECONDS
    return ended


def hide(folders: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Give folders hidden names, since a half removed folder must not look like a checkpoint.

    Returns:
        The new paths, and descriptions of what failed.
    """
    hidden, problems = [], []
    for folder in folders:
        name = folder.name if folder.name.startswith(".") else f".{folder.name}"
        doomed = folder.with_name(name if name.endswith(".removed") else f"{name}.removed")
        try:
            if doomed != folder:
                if os.path.lexists(doomed):  # from a save that was killed while it removed
                    with contextlib.suppress(OSError):
                        _remove(doomed)
                folder.rename(doomed)
            hidden.append(doomed)
        except OSError as error:
            problems.append(f"{type(error).__name__}: {error}")
    return hidden, problems


def remove(folders: Iterable[Path]) -> list[str]:
    """Remove folders with all that they hold, and return descriptions of what failed."""
    problems = []
    for folder in folders:
        try:
            _remove(folder)
        except OSError as error:
            problems.append(f"{type(error).__name__}: {error}")
    return problems


def _remove(folder: Path) -> None:
    """Remove a folder, or the link to one that was moved elsewhere; that one stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)
