"""The checksums of a full checkpoint, in a file beside its files, by the rules of a partial checkpoint's manifest.

Files from elsewhere, and those of older releases, have none, and load. Nothing here needs a running job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smp_config.version import __version__
from smp_runtime.checkpoint.files.checksums import checksums_of, kind_of
from smp_runtime.checkpoint.files.manifest import PARTIAL, folders_in
from smp_runtime.checkpoint.files.opened_files import is_plain_name, open_regular, read_text
from smp_runtime.checkpoint.files.records import DIGEST, FileRecord, check_text, digest_of
from smp_runtime.checkpoint.full_transaction import finish_at
from smp_runtime.errors import CheckpointError

logger = logging.getLogger("smp")

#: Version of the layout; a reader refuses a newer one.
FORMAT = 1
_PREFIX, _ENDING = "checksums_", ".json"


@dataclass
class FullManifest:
    """What one save of a full checkpoint has written.

    Attributes:
        save: the id that the files have, too.
        files: by name, all files but this one.
    """

    save: str
    library: str = __version__
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of its file."""
        data = {
            "format": FORMAT,
            "save": self.save,
            "library": self.library,
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        return json.dumps({**data, DIGEST: digest_of(data)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> FullManifest:
        """Parse the text of its file.

        Raises:
            ValueError: it is something else, was changed, or has a newer format.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or "files" not in data:
                raise ValueError("it holds no checksums")
            if data.get("format") != FORMAT or isinstance(data["format"], bool):
                raise ValueError(
                    f"it has format {str(data.get('format'))[:20]}, of version {str(data.get('library'))[:20]} of this library, "
                    f"and this version, {__version__}, reads format {FORMAT}"
                )
            if data.get(DIGEST) != digest_of(data):
                raise ValueError("its content was changed after it was saved (its checksum differs)")
            records = {name: _record(name, found) for name, found in data["files"].items()}
            check_text(data["save"], "save")
            return cls(data["save"], str(data["library"]), records)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it lacks what such a file has ({error!r})"[:300]) from None


def _record(name: str, found: Mapping[str, Any]) -> FileRecord:
    if not is_plain_name(name):
        raise ValueError(f"{name[:80]!r} is no name of a file")
    record = FileRecord(found["bytes"], found["checksum"])
    record.check(f"files.{name}")
    return record


def manifest_name(tag: str) -> str:
    """Return the name of the file with the checksums of a full checkpoint."""
    return f"{_PREFIX}{tag}{_ENDING}"


def read_full_manifest(file: Path) -> FullManifest | None:
    """Return what the save of a full checkpoint has written; None if it left no checksums.

    Args:
        file: of the weights, by the name that it was saved as.

    Raises:
        CheckpointError: the file of checksums is damaged, or of a newer version.
    """
    path = file.with_name(manifest_name(file.name))
    try:
        return FullManifest.from_json(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; it is damaged or of another version: use another checkpoint, or remove it to load "
            "the files without comparing their checksums"
        ) from None


def refuse_damaged(file: Path, save: str | None, skipped: Container[str]) -> None:
    """Compare the checksums of the files that will be read, if their save has left any.

    Args:
        file: of the weights, by the name that it was saved as.
        save: the id of the save that the files have; None for files from elsewhere.
        skipped: names of files that will not be read.

    Raises:
        CheckpointError: a file is not as it was saved.
    """
    manifest = read_full_manifest(file)
    if manifest is None:
        return
    if save not in (None, manifest.save):  # an older release has replaced the files
        logger.warning("%s is of another save than %s; its files are not compared", manifest_name(file.name), file.name)
        return
    names = [name for name in manifest.files if name not in skipped]
    problems = damaged_files(file.parent, manifest, names, may_lack=True)
    if problems:
        raise CheckpointError(
            f"{file.parent}: {'; '.join(problems)}: use another checkpoint; if you have put another file there yourself, remove "
            f"{manifest_name(file.name)} to load it: then no file of this checkpoint is compared any more"
        )
    if any(not manifest.files[name].can_be_compared for name in names):
        logger.warning(
            "the checksums of %s are XXH3-128, and xxhash is not installed here: only lengths were compared", file
        )


def find_full(path: Path, tag: str | None) -> tuple[list[Path], bool]:
    """Return the full checkpoints that a path means, by the names that they were saved as, and whether it means no others.

    Args:
        path: a folder, or the file of one.
        tag: which one in the folder; None for all.
    """
    if not path.is_dir():
        return ([path], True) if path.is_file() else ([], False)
    found = [file.name[len(_PREFIX) : -len(_ENDING)] for file in path.glob(f"{_PREFIX}*{_ENDING}") if file.is_file()]
    names = sorted(name for name in found if tag in (None, name))
    has_partial = (path / f"{tag}{PARTIAL}").is_dir() if tag is not None else bool(folders_in(path))
    is_partial = path.name.endswith(PARTIAL)
    return [path / name for name in names], bool(names) and not has_partial and not is_partial


def damaged_files(folder: Path, manifest: FullManifest, names: Collection[str], *, may_lack: bool = False) -> list[str]:
    """Read files to their ends and return what is wrong with them; empty if nothing is.

    Args:
        names: of the files.
        may_lack: whether files may be absent.
    """
    problems: dict[str, str] = {}
    with contextlib.ExitStack() as opened:
        to_compare = []
        for name in names:
            record = manifest.files[name]
            try:
                file = opened.enter_context(os.fdopen(open_regular(folder / name), "rb"))
            except FileNotFoundError:
                if not may_lack:
                    problems[name] = f"{name} is missing"
                continue
            except (OSError, CheckpointError) as error:
                problems[name] = f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
                continue
            length = os.fstat(file.fileno()).st_size
            if length != record.bytes:
                problems[name] = f"{name} has {length:,} bytes, but {record.bytes:,} were saved"
            elif record.can_be_compared:
                to_compare.append((name, file, record))
        kinds = [(file, kind_of(record.checksum)) for _, file, record in to_compare]
        for (name, _, record), found in zip(to_compare, checksums_of(kinds), strict=True):
            if found != record.checksum:
                problems[name] = f"{name} has other content than was saved (its checksum differs)"
    return [problems[name] for name in names if name in problems]


def problems_of_full(file: Path) -> Iterator[str]:
    """Read a full checkpoint to its end and yield its problems.

    Args:
        file: of the weights, by the name that it was saved as.
    """
    try:
        finish_at(file)  # a job may have been killed before all files had their names
        manifest = read_full_manifest(file)
    except CheckpointError as error:
        yield str(error)
        return
    if manifest is None:
        yield f"there is no {manifest_name(file.name)}: an older release has saved it, or something else; nothing was compared"
        return
    yield from damaged_files(file.parent, manifest, list(manifest.files))
    if unread := [name for name, record in manifest.files.items() if not record.can_be_compared]:
        yield (
            f"{', '.join(unread)} cannot be compared with their checksums, which are XXH3-128: only their lengths were compared; "
            "install xxhash here (pip install xxhash)"
        )
