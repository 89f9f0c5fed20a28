"""A job's results: ``model.tar.gz`` and ``output.tar.gz``, written whole or not at all, or its failure text."""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smp_config.machine.disk_space import note_room
from smp_estimator.local.files.tree import copy_folder, is_left_out
from smp_estimator.local.files.uris import bucket_and_key, is_s3_uri, path_of

logger = logging.getLogger(__name__)

#: Weights hardly compress, so the fastest level costs little space and saves much time.
_COMPRESSION_LEVEL = 1

#: Most of a failure file that an error message carries, in characters.
_REASON_CHARACTERS = 8000


def merged_files(directories: Sequence[Path]) -> dict[str, Path]:
    """Return the files (and empty folders) of several directories as one mapping: relative name → path.

    If two directories have different files of one name, the first directory's file is used and a warning is logged.
    """
    merged: dict[str, Path] = {}
    origins: dict[str, Path] = {}
    for directory in directories:
        for name, path in _walk(directory):
            if name not in merged:
                merged[name], origins[name] = path, directory
            elif path.is_file() and not _is_copy(path, merged[name]):
                logger.warning("two hosts wrote different %s; the one of %s is kept", name, origins[name])
    return merged


def _is_copy(path: Path, other: Path) -> bool:
    # Not shallow: hosts that write at the same time leave files of equal size and date.
    return other.is_file() and filecmp.cmp(path, other, shallow=False)


def pack(directories: Sequence[Path], name: str, destination: str) -> str:
    """Pack directories, merged by :func:`merged_files`, into a local archive ``name``; return its path."""
    folder = Path(destination)
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder: a file is renamed only within its file system.
    handle, partial = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=_COMPRESSION_LEVEL) as archive:
                for relative, path in sorted(merged_files(directories).items()):
                    _add(archive, path, relative)
            raw.flush()
            # On the disk before it has its name: a machine that crashes leaves a whole archive or none.
            os.fsync(raw.fileno())
        # Temporary files are for their owner alone.
        os.chmod(partial, 0o644)
        os.replace(partial, folder / name)
    except BaseException as error:
        note_room(error, folder)
        Path(partial).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(folder / name)  # the error of a write has the reason, but no path
        raise
    return str(folder / name)


def deliver(
    directories: Sequence[Path], name: str, destination: str, job_name: str, session: Any, *, compressed: bool
) -> str:
    """Put the hosts' files at the job's output path, and return the address of the archive (or folder).

    Args:
        directories: one per host.
        name: ``"model"`` or ``"output"``.
        destination: the ``file://`` or ``s3://`` output path.
        session: uploads to S3.
        compressed: False writes a folder ``name`` of plain files instead of ``name.tar.gz``.
    """
    target = artifact_address(destination, name, job_name, compressed=compressed)
    if not is_s3_uri(destination):
        folder = str(path_of(destination))
        if compressed:
            pack(directories, f"{name}.tar.gz", folder)
        else:
            _copy_plain(directories, Path(folder) / name)
        return target
    with tempfile.TemporaryDirectory() as staging:
        if compressed:
            session.upload_file(pack(directories, f"{name}.tar.gz", staging), target)
        else:
            for relative, path in merged_files(directories).items():
                if not is_left_out(path) and path.is_file():
                    session.upload_file(str(path), target + relative)
    return target


def artifact_address(destination: str, name: str, job_name: str, *, compressed: bool) -> str:
    """Return the address where :func:`deliver` puts an archive or folder; it is known before the job ends.

    Local paths are used as they are. S3 prefixes get the job's name, as in the SDK's local mode.
    """
    last = f"{name}.tar.gz" if compressed else f"{name}/"
    if is_s3_uri(destination):
        bucket, key = bucket_and_key(destination)
        parts = (bucket, key, job_name, last)
        return "s3://" + "/".join(part for part in parts if part)
    return f"file://{path_of(destination)}/{last}"


def failure_text(path: Path) -> str | None:
    """Return the text of a host's failure file, cut to a readable length; None if there is no text."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    if not text:
        return None
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} …"


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(directory):
        here = Path(folder)
        for name in files:
            path = here / name
            yield str(path.relative_to(directory)), path
        for name in folders:
            path = here / name
            is_whole_entry = path.is_symlink() or not any(path.iterdir())
            if is_whole_entry:
                yield str(path.relative_to(directory)), path


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add one entry under a neutral owner; replace a link that leaves the archive by its target."""

    def neutral(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    if path.is_symlink():
        target = os.readlink(path)
        leaves = os.path.isabs(target) or os.path.normpath(os.path.join(os.path.dirname(name), target)).startswith("..")
        if leaves:
            if not is_left_out(path):
                archive.add(path.resolve(), arcname=name, filter=neutral)
            return
    archive.add(path, arcname=name, recursive=False, filter=neutral)


def _copy_plain(directories: Sequence[Path], target: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=_made(target.parent)))
    try:
        for relative, path in merged_files(directories).items():
            if is_left_out(path):
                continue
            (partial / relative).parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                copy_folder(path, partial / relative)  # an empty folder, or a link to any
            else:
                shutil.copy2(path, partial / relative)
        os.chmod(partial, 0o755)
        if target.exists():
            # The folder may be the user's own and hold other things: files are replaced, nothing is removed.
            shutil.copytree(partial, target, dirs_exist_ok=True)
        else:
            os.replace(partial, target)
    except OSError as error:
        note_room(error, target.parent)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
