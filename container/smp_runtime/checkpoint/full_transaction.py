"""The files of a full checkpoint: written aside, published by one rename, and then moved to their names, by whoever is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from smp_runtime.checkpoint.files.atomic_file import make_folder, sync_folder, write_text
from smp_runtime.checkpoint.files.disk_space import naming_full_disk
from smp_runtime.checkpoint.files.opened_files import is_plain_name, read_text
from smp_runtime.checkpoint.folder_lock import FolderLock
from smp_runtime.errors import CheckpointError

#: The published folder's list of earlier files that do not belong to the new checkpoint.
_REMOVED = "removed.json"
_ENTRIES = "files"


class FullTransaction:
    """Several files beside each other that appear together or not at all.

    They are written into a hidden folder, which gets another hidden name when all are there: from then on the checkpoint is
    the new one. Its files are then moved to their names; where a job is killed meanwhile, the next one that reads or saves
    under this tag moves the rest (:func:`finish`).

    Args:
        folder: of the checkpoints, which exists.
        tag: names the checkpoint; other tags are not in the way.

    Attributes:
        writing: where the files are written, under the names that they will have.

    Raises:
        CheckpointError: another job saves under this tag.
    """

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder = folder
        self._tag = tag
        self._lock = FolderLock(folder / f".{tag}.saving")
        try:
            finish(folder, tag)
            # This process holds the lock, so no other one writes. Published files are in place: the rest is left over.
            for left_over in (*_folders(folder, tag, "tmp"), *_folders(folder, tag, "new")):
                shutil.rmtree(left_over, ignore_errors=True)
            self._aside = folder / f".{tag}.{secrets.token_hex(8)}.tmp"
            self.writing = self._aside / _ENTRIES
            self.writing.mkdir(parents=True)
        except BaseException:
            self._lock.release()
            raise

    def commit(self, replaced: Iterable[str]) -> None:
        """Publish the written files.

        Args:
            replaced: known names of files of an earlier checkpoint of this tag. Files that were not written again are
                removed.

        Raises:
            OSError: it cannot be published; the earlier files stay.
            CheckpointError: there is a folder where a file should be.
        """
        names = {file.name for file in self.writing.iterdir()}
        if blocked := sorted(name for name in names if (self._folder / name).is_dir()):
            raise CheckpointError(
                f"{self._folder / blocked[0]} is a folder, where the checkpoint has a file: remove it, or save with another tag"
            )
        write_text(json.dumps(sorted(set(replaced) - names)), self._aside / _REMOVED)
        for folder in (self.writing, self._aside):
            sync_folder(folder)
        published = self._aside.with_name(self._aside.name.removesuffix(".tmp") + ".new")
        os.rename(self._aside, published)
        sync_folder(self._folder)
        self._aside = published
        finish(self._folder, self._tag)

    def close(self) -> None:
        """Remove what was not published, and let others save."""
        try:
            if self._aside.name.endswith(".tmp"):
                shutil.rmtree(self._aside, ignore_errors=True)
        finally:
            self._lock.release()


@contextlib.contextmanager
def full_transaction(folder: Path, tag: str) -> Iterator[FullTransaction]:
    """Yield a transaction and close it at the end of the block, whether it was committed or not."""
    with naming_full_disk(folder / tag, None):
        make_folder(folder)
        transaction = FullTransaction(folder, tag)
    try:
        yield transaction
    finally:
        transaction.close()


def finish(folder: Path, tag: str | None) -> None:
    """Move files of published checkpoints to their final names, if a killed job has not done so.

    Several processes may call it at once. Each step succeeds only once, and the folder belongs to a single save.

    Args:
        tag: of the checkpoints; None for all.

    Raises:
        CheckpointError: they cannot be moved, so that the files with these names are of two saves.
    """
    for published in _folders(folder, tag, "new"):
        try:
            _finish(folder, published)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"a checkpoint in {folder} was saved by a job that was stopped before all of its files had their names, and "
                f"the rest in {published} cannot be moved ({error}); make {folder} writable, or move the files of "
                f"{published / _ENTRIES} into it"
            ) from error


def _finish(folder: Path, published: Path) -> None:
    try:
        removed = json.loads(read_text(published / _REMOVED, most=1 << 24))
    except FileNotFoundError:  # another process has come to the end
        return
    if not isinstance(removed, list) or not all(is_plain_name(name) for name in removed):
        raise ValueError(f"{_REMOVED} holds no names of files")
    attic = published / "former"
    _if_there(attic.mkdir)
    for name in removed:
        # A rename into the attic fails once another process has removed the attic. Deleting would not fail:
        # a late process could delete files that a later save has written.
        _if_there(lambda name=name: os.rename(folder / name, attic / name))  # type: ignore[misc]
    with contextlib.suppress(FileNotFoundError):
        for file in sorted((published / _ENTRIES).iterdir()):
            _if_there(lambda file=file: os.replace(file, folder / file.name))  # type: ignore[misc]
    with contextlib.suppress(FileNotFoundError):
        sync_folder(folder)
    # Removed after all moves: without this file, other processes know that nothing is left to do.
    (published / _REMOVED).unlink(missing_ok=True)
    shutil.rmtree(published, ignore_errors=True)


def _if_there(step: Callable[[], object]) -> None:
    """Do what another process may have done already."""
    with contextlib.suppress(FileNotFoundError, FileExistsError):
        step()


def finish_at(path: Path) -> None:
    """Call :func:`finish` for a file of weights, or for all tags in a folder of Transformers.

    Raises as :func:`finish`.
    """
    if path.is_dir():
        finish(path, None)
    else:
        finish(path.parent, path.name)


def _folders(folder: Path, tag: str | None, ending: str) -> list[Path]:
    """Return the folders that saves under a tag, or under any tag, have left; oldest first."""
    pattern = re.compile(rf"\.{'.+' if tag is None else re.escape(tag)}\.[0-9a-f]{{16}}\.{ending}")
    try:
        found = [
            path
            for path in folder.iterdir()
            if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    except OSError:
        return []
