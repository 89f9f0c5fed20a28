"""Writer and reader of one checkpoint, in a folder or in S3.

A checkpoint is whole or absent: its ``.metadata`` is written last, to a temporary name, and names the files that belong to it. Each
save writes files of new names, so a save that ends early leaves an older checkpoint of the same folder as it was. In a folder of
this machine, ``checksums_<save>.json`` has the checksums of the files. In S3, the store keeps checksums of what it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase
from torch.distributed.checkpoint.metadata import StorageMeta

from smp_config import Group
from smp_runtime.checkpoint.files.atomic_file import Records, write_text, written_file
from smp_runtime.checkpoint.files.checksums import checksum_of, kind_of
from smp_runtime.checkpoint.files.records import FileRecord
from smp_runtime.checkpoint.full.full_manifest import (
    FullManifest,
    damaged_files,
    find_full,
    manifest_name,
    read_full_manifest,
)
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_version2.checkpoint.locations import is_s3_uri
from smp_version2.moe.saved_experts import EXPERTS_FILE, FOLDER, ExpertRecord, SavedPart, check_parts, join
from smp_version2.split_parameters import SPLIT_FILE, SplitRecord
from smp_version2.state import state

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlan, Metadata, SavePlan, SavePlanner
    from torch.futures import Future

#: The file without which a folder is no checkpoint, and the ending of files with tensors.
METADATA = ".metadata"
DATA_ENDING = ".distcp"


#: An attribute of what describes a part of a file, on its way to the rank that writes the metadata.
_ATTRIBUTE = "smp_checksum"


class LocalFileSystem(FileSystem):
    """Folders of this machine, or of a file system that all hosts share.

    Attributes:
        records: of the files that were written, by name.
    """

    def __init__(self) -> None:
        self.records: Records = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield an opened file; of one that is written, the length and checksum are kept."""
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            stream = _HashedFile(file, self.records)
            yield stream
            self.records[Path(path).name] = stream.record()

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the paths of what lies in a folder."""
        return [str(found) for found in Path(path).iterdir()]


class _HashedFile:
    """File that is written once, sequentially, and hashed meanwhile; all else is the file's own."""

    def __init__(self, file: Any, records: Records) -> None:
        self._file = file
        self._written = written_file(file, records)

    def write(self, data: Any) -> int:
        return self._written.write(data)

    def record(self) -> FileRecord:
        """Return the length and checksum of what was written."""
        return FileRecord(self._written.length, self._written.checksum())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def path_to_file_system(
    path: str | os.PathLike[str], s3_region: str | None = None, s3client_config: Any = None
) -> FileSystemBase:
    """Return the file system of a path or of an address in S3.

    Raises:
        SMPUserError: the address is of another kind.
        PackageMissing: it is in S3, and boto3 is not installed.
    """
    if is_s3_uri(path):
        from smp_version2.checkpoint.s3_filesystem import S3FileSystem

        return S3FileSystem(s3_region, s3client_config)
    if "://" in os.fspath(path):
        raise SMPUserError(
            f"{os.fspath(path)!r} is neither a path nor an address in S3; write a path or s3://bucket/key",
            code="SMP402",
        )
    return LocalFileSystem()


class DistributedFileSystemWriter(FileSystemWriter):
    """Writes a checkpoint of several ranks into a folder or to S3.

    Args:
        path: folder, or ``s3://bucket/key``.
        pre_write_hooks: functions that are called with the writer, on each rank, before it writes.
        post_write_hooks: the same, after it has written; on the rank that writes the metadata, when the checkpoint is whole.
        s3_region: region of the bucket; None for that of the environment.
        s3client_config: an object whose ``part_size`` is the number of bytes of one part of an upload.
    """

    fs: Any  # one of this module's, instead of the base class's
    path: Any

    def __init__(
        self,
        path: str | os.PathLike[str],
        pre_write_hooks: Sequence[Callable[[Any], Any]] = (),
        post_write_hooks: Sequence[Callable[[Any], Any]] = (),
        *,
        s3_region: str | None = None,
        s3client_config: Any = None,
    ) -> None:
        self._client = (s3_region, s3client_config)
        # Objects in S3 are durable when they are written.
        super().__init__(path, sync_files=not is_s3_uri(path))
        self.reset(path)
        self.is_coordinator = False
        self._before, self._after = list(pre_write_hooks), list(post_write_hooks)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id:
            self.fs = path_to_file_system(checkpoint_id, *self._client)
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's role: one of the ranks writes the metadata."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give this save's files names that no other save has."""
        mark = self.save_id[:8]
        made = []
        for plan in super().prepare_global_plan(plans):
            named = dataclasses.replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{mark}_")
            made.append(dataclasses.replace(plan, storage_data=named))
        return made

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's tensors."""
        for hook in self._before:
            hook(self)
        written = super().write_data(plan, planner)
        if isinstance(self.fs, LocalFileSystem):
            attach(written.wait(), self.fs.records)
        if not self.is_coordinator:
            for hook in self._after:
                hook(self)
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the metadata, by which the checkpoint comes to be, and remove files of earlier saves to this folder."""
        self._write_records()
        mark, records = self.save_id[:8], detach(itertools.chain.from_iterable(results))
        is_local = isinstance(self.fs, LocalFileSystem)
        # Checksums before the metadata: a checkpoint that can be found has them. The metadata's own can only follow it.
        checksums = write_checksums(Path(self.path), mark, records) if is_local else None
        super().finish(metadata, results)
        if is_local:
            add_file(Path(self.path), mark, METADATA, records)
        written = {result.storage_data.relative_path for each in results for result in each}
        self._remove_former_files(written, checksums)
        for hook in self._after:
            hook(self)

    def _write_records(self) -> None:
        """Write how tensors are split and which experts the ranks have, for a job that does either."""
        if not state.is_joined:
            return
        ranks = state.joined
        contents = {
            SPLIT_FILE: SplitRecord.of(ranks).to_json(ranks),
            EXPERTS_FILE: ExpertRecord.of(ranks).to_json(ranks),
        }
        for name, text in contents.items():
            if text is not None:
                with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                    stream.write(text.encode())

    def _remove_former_files(self, written: Collection[str], checksums: str | None) -> None:
        """Remove what earlier saves have left in the folder.

        Args:
            written: names of this save's files of tensors.
            checksums: name of the file with this save's checksums.
        """
        prefix = manifest_name("").partition(".")[0]
        for found in self.fs.ls(self.path):
            name = str(found).rpartition("/")[2]
            has_former_checksums = name.startswith(prefix) and name != checksums
            has_former_tensors = name.endswith(DATA_ENDING) and name not in written
            if has_former_checksums or has_former_tensors:
                self.fs.rm_file(found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path can be written to."""
        return is_s3_uri(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)


class DistributedFileSystemReader(FileSystemReader):
    """Reads a checkpoint from a folder or from S3, for any number of ranks.

    Args:
        path: folder, or ``s3://bucket/key``.
        s3_region: region of the bucket; None for that of the environment.
        s3client_config: settings of the client.
    """

    fs: Any
    path: Any

    def __init__(
        self, path: str | os.PathLike[str], *, s3_region: str | None = None, s3client_config: Any = None
    ) -> None:
        self._client = (s3_region, s3client_config)
        super().__init__(path)
        self.reset(path)
        self.parts: list[SavedPart] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what describes the checkpoint as this rank sees it: that of all parts together, if it has other experts than they.

        Raises:
            CheckpointError: the checkpoints of other expert parallel ranks are needed, and not there.
            FileNotFoundError: there is no checkpoint.
        """
        if not self.parts:
            self.parts = self._find_parts()
        if not self.parts:
            if isinstance(self.fs, LocalFileSystem):
                refuse_damaged_metadata(Path(self.path))
            return super().read_metadata(*args, **kwargs)
        ranks = state.joined
        found = join(self.parts, ExpertRecord.of(ranks), ranks.size(Group.EP), ranks.rank_in(Group.EP))
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found

    def _find_parts(self) -> list[SavedPart]:
        """Return the parts of a checkpoint with other experts than this rank's; none if it is of this rank, or of no mixture."""
        if not state.is_joined:
            return []
        mine = (state.ep_size, state.ep_rank)
        name, parent = os.path.basename(os.fspath(self.path)), os.path.dirname(os.fspath(self.path))
        if self.fs.exists(self.fs.concat_path(self.path, METADATA)):
            alone = self._read_part(self.path, name)
            if alone.place == mine:
                return []
            if alone.place[0] == 1:
                return [dataclasses.replace(alone, folder="")]
            root = parent
        else:
            root = parent if FOLDER.fullmatch(name) else os.fspath(self.path)
        names = [os.path.basename(str(found).rstrip("/")) for found in self._list(root)]
        folders = sorted(found for found in names if FOLDER.fullmatch(found))
        parts = []
        for found in folders:
            path = self.fs.concat_path(root, found)
            if self.fs.exists(self.fs.concat_path(path, METADATA)):
                parts.append(self._read_part(path, found))
        if not parts:
            return []
        self.path = self.fs.init_path(root)
        return check_parts(root, parts)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Compare the checksums of what this rank will read: all ranks agree on the plan before any of them loads."""
        made = super().prepare_local_plan(plan)
        if isinstance(self.fs, LocalFileSystem):
            names = {self.storage_data[item.storage_index].relative_path for item in made.items}
            refuse_damaged(Path(self.path), names)
        return made

    def read_names(self, key: str) -> list[Any]:
        """Return the names in a list that each part has, such as those of an optimizer's group, without other ranks' experts."""
        others = ExpertRecord.of(state.joined).others
        found: dict[Any, None] = {}
        for part in self.parts:
            path = self.fs.concat_path(self.path, part.folder) if part.folder else self.path
            reader = _PartReader(path, s3_region=self._client[0], s3client_config=self._client[1])
            values: dict[str, Any] = {key: None}
            checkpoint.load(values, storage_reader=reader, no_dist=True)
            found |= dict.fromkeys(values[key])
        return [name for name in found if not any(str(name).startswith(f"{other}.") for other in others)]

    def _list(self, folder: str) -> list[str]:
        try:
            return list(self.fs.ls(folder))
        except OSError:
            return []

    def _read_part(self, path: Any, name: str) -> SavedPart:
        """Read what describes one part."""
        file, about = self.fs.concat_path(path, EXPERTS_FILE), {}
        if self.fs.exists(file):
            with self.fs.create_stream(file, "rb") as stream:
                about = json.loads(stream.read().decode())
        reader = DistributedFileSystemReader(path, s3_region=self._client[0], s3client_config=self._client[1])
        if isinstance(self.fs, LocalFileSystem):
            refuse_damaged_metadata(Path(path))
        return SavedPart(name, FileSystemReader.read_metadata(reader), about)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint."""
        if checkpoint_id:
            self.fs = path_to_file_system(checkpoint_id, *self._client)
            self.parts = []
        super().reset(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path can be read."""
        return is_s3_uri(checkpoint_id) or FileSystem.validate_checkpoint_id(checkpoint_id)


class _PartReader(DistributedFileSystemReader):
    """Reads one part of a checkpoint as it is."""

    def _find_parts(self) -> list[SavedPart]:
        return []


# -- checksums of files ------------------------------------------------------------------------------------------------


def attach(results: Iterable[Any], records: Records) -> None:
    """Let what this rank reports of its files carry their checksums."""
    for result in results:
        record = records.get(result.storage_data.relative_path)
        if record is not None:
            setattr(result.storage_data, _ATTRIBUTE, (record.bytes, record.checksum))


def detach(results: Iterable[Any]) -> Records:
    """Take the checksums of all ranks' files out of their reports again."""
    records: Records = {}
    for result in results:
        found = vars(result.storage_data).pop(_ATTRIBUTE, None)
        if found is not None:
            records[result.storage_data.relative_path] = FileRecord(*found)
    return records


def write_checksums(folder: Path, save: str, records: Records) -> str:
    """Write the checksums of a save beside its files, and return the name of the file that has them."""
    name = manifest_name(save)
    write_text(FullManifest(save, files=records).to_json(), folder / name)
    return name


def add_file(folder: Path, save: str, name: str, records: Records) -> None:
    """Add a file that was written last to the checksums of a save."""
    with open(folder / name, "rb") as file:
        kind = next((kind_of(record.checksum) for record in records.values()), "sha256")
        records[name] = FileRecord(os.fstat(file.fileno()).st_size, checksum_of(file, kind))
    write_checksums(folder, save, records)


def refuse_damaged_metadata(folder: Path) -> None:
    """Compare the checksum of what describes a checkpoint, if its save has left one; raise CheckpointError if it differs."""
    problems = []
    for file in find_full(folder, None)[0]:
        manifest = read_full_manifest(file)
        if manifest is None or METADATA not in manifest.files:
            continue
        problems.append(damaged_files(folder, manifest, [METADATA]))
    # A save that is killed at its very end leaves the previous save's checksums behind too, so one set that fits is enough.
    if problems and all(problems):
        raise CheckpointError(f"{folder}: {problems[0][0]}: load another checkpoint")


def refuse_damaged(folder: Path, names: Iterable[str]) -> None:
    """Compare the checksums of files that will be read, if their save has left any.

    Args:
        names: of the files in the folder, or below it.

    Raises:
        CheckpointError: a file is not as it was saved.
    """
    by_folder: dict[Path, set[str]] = {}
    for name in names:
        by_folder.setdefault((folder / name).parent, set()).add(Path(name).name)
    for each, wanted in by_folder.items():
        for file in find_full(each, None)[0]:
            manifest = read_full_manifest(file)
            if manifest is None:
                continue
            problems = damaged_files(each, manifest, sorted(wanted & manifest.files.keys()))
            if problems:
                raise CheckpointError(f"{each}: {'; '.join(problems)}: load another checkpoint")
