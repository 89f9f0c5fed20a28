"""What a partial checkpoint holds: files with checksums, parameters with shapes, and which file has which piece.

Plain Python and JSON: nothing here needs torch or a running job, so a checkpoint can be looked at anywhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from smp_config.version import __version__
from smp_runtime.checkpoint.files.checksums import kind_of, together
from smp_runtime.checkpoint.files.opened_files import MANIFEST as MANIFEST
from smp_runtime.checkpoint.files.opened_files import CheckpointFiles, Identity, is_plain_name, read_text
from smp_runtime.checkpoint.files.records import DIGEST, are_texts, check, check_count, check_text, digest_of
from smp_runtime.checkpoint.files.records import FileRecord as FileRecord
from smp_runtime.checkpoint.files.records import OptimizerRecord as OptimizerRecord
from smp_runtime.checkpoint.files.records import TensorPiece as Piece
from smp_runtime.checkpoint.files.records import TensorRecord as TensorRecord
from smp_runtime.errors import CheckpointError

#: Version of the layout; a reader refuses a newer one. Manifests of 1 may lack the checksum of themselves, later ones may not;
#: those before 3 have checksums of whole files only; those before 4 do not name the hash of a checksum.
FORMAT = 4
_READ = (1, 2, 3, FORMAT)
_BEFORE_NAMED_HASHES = 3
_WITHOUT_DIGEST = 1

NEWEST = "newest"
PARTIAL = "_partial"
USER_CONTENT = "user_content.pt"
PARTITION = "partition.json"
#: The job's positions in its data sets.
POSITIONS = "data.json"

#: State keys that are no optimizer's: weights and buffers as the model has them, and float32 weights.
MODULE = "module"
MASTER = "master"
#: Objects of modules that have a state of their own making (``get_extra_state``).
EXTRA = "extra"

#: A checkpoint that one of the same tag takes the place of: ``.100_partial.old``, ``.100_partial.2.old``, …
_FORMER = re.compile(rf"\.(.+{PARTIAL})(?:\.\d+)?\.old")


@dataclass
class Manifest:
    """Everything about a partial checkpoint except the tensors.

    Attributes:
        saved: when it was complete, in seconds since 1970; orders checkpoints.
        topology: ``world_size``, ``pipeline``, ``tensor``, ``sharded``, ``shard_optimizer_state``, ``placement``.
        precision: ``"fp32"`` (the model's own types), ``"bf16"`` or ``"fp16"``.
        files: by name, all files but the manifest itself.
        parameters: by global name, those of the wrapped model; tied ones once.
        buffers: by global name.
        pieces: by file, by state key (:data:`MODULE`, :data:`MASTER`, :data:`EXTRA`, an optimizer state), by
            global name.
        optimizer: None when the checkpoint has none.
        translations: distributed Hugging Face models, by their name in ``smp.nn.huggingface``. Their parameters
            have the names of the distributed modules.
        save: an id, the same on every host and different for every save; distinguishes saves under one tag.
        steps: optimizer steps that the training had made; 0 if they were not counted.
        has_content: whether the script has saved user content, other than None.
        is_older: whether it was written before manifests had a checksum of themselves.
    """

    tag: str
    saved: float = 0.0
    library: str = ""
    topology: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    files: dict[str, FileRecord] = field(default_factory=dict)
    parameters: dict[str, TensorRecord] = field(default_factory=dict)
    buffers: dict[str, TensorRecord] = field(default_factory=dict)
    pieces: dict[str, dict[str, dict[str, Piece]]] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    translations: list[str] = field(default_factory=list)
    save: str = ""
    steps: int = 0
    has_content: bool = True
    is_older: bool = False

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the text of ``manifest.json``."""
        data = {
            "format": FORMAT,
            "save": self.save,
            "steps": self.steps,
            "has_content": self.has_content,
            **{key: getattr(self, key) for key in ("tag", "saved", "library", "topology", "precision", "translations")},
            "files": {name: asdict(record) for name, record in self.files.items()},
            "parameters": {name: asdict(record) for name, record in self.parameters.items()},
            "buffers": {name: asdict(record) for name, record in self.buffers.items()},
            "optimizer": None if self.optimizer is None else asdict(self.optimizer),
            "pieces": {
                file: {key: {name: piece.to_list() for name, piece in found.items()} for key, found in keys.items()}
                for file, keys in self.pieces.items()
            },
        }
        return json.dumps({**data, DIGEST: digest_of(data)}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse the text of ``manifest.json``.

        Raises:
            ValueError: it is no manifest, was changed, contains an impossible value, or has a newer format.
        """
        try:
            data = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply for a manifest") from None
        if not isinstance(data, dict) or "files" not in data or "pieces" not in data:
            raise ValueError("it is no manifest")
        version = data.get("format")
        if isinstance(version, bool) or version not in _READ:
            raise ValueError(
                f"it has format {str(version)[:20]}, of version {str(data.get('library'))[:20]} of this library, and this version, "
                f"{__version__}, reads formats 1 to {FORMAT}"
            )
        older = version <= _BEFORE_NAMED_HASHES
        if (version != _WITHOUT_DIGEST or DIGEST in data) and data.get(DIGEST) != digest_of(data):
            raise ValueError("its content was changed after it was saved (its checksum differs)")
        try:
            manifest = cls(
                **{key: data[key] for key in ("tag", "saved", "library", "topology", "precision", "translations")},
                files={
                    name: FileRecord.from_older(record) if older else FileRecord(**_tupled(record))
                    for name, record in data["files"].items()
                },
                parameters={name: TensorRecord(**_tupled(record)) for name, record in data["parameters"].items()},
                buffers={name: TensorRecord(**_tupled(record)) for name, record in data["buffers"].items()},
                optimizer=None if data["optimizer"] is None else OptimizerRecord(**data["optimizer"]),
                pieces={
                    file: {
                        key: {name: Piece.from_list(values) for name, values in found.items()}
                        for key, found in keys.items()
                    }
                    for file, keys in data["pieces"].items()
                },
                save=data.get("save", ""),
                steps=data.get("steps", 0),
                has_content=bool(data.get("has_content", True)),
                is_older=version == _WITHOUT_DIGEST,
            )
            manifest.check()
        except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"it lacks what a manifest has ({error!r})"[:300]) from None
        return manifest

    def check(self) -> None:
        """Check that every value has its type and is within its bounds.

        Raises:
            ValueError: a value is wrong; the message names it.
        """
        for key in ("tag", "library", "precision", "save"):
            check_text(getattr(self, key), key)
        check_count(self.steps, "steps")
        saved = self.saved
        check(isinstance(saved, int | float) and math.isfinite(saved) and saved >= 0, "saved", saved)
        check(are_texts(self.translations), "translations", self.translations)
        check(isinstance(self.topology, dict), "topology", self.topology)
        for key in ("world_size", "pipeline", "tensor", "sharded"):
            check_count(self.topology.get(key, 1), f"topology.{key}")
        for name, record in self.files.items():
            check(is_plain_name(name), "files", name)
            record.check(f"files.{name}")
        tensors = {**self.parameters, **self.buffers}
        for name, tensor in tensors.items():
            tensor.check(name)
        for file, keys in self.pieces.items():
            check(is_plain_name(file), "pieces", file)
            for key, pieces in keys.items():
                for name, piece in pieces.items():
                    piece.check(f"pieces.{file}.{key}.{name}", tensors.get(name))
        if self.optimizer is not None:
            self.optimizer.check()

    # -- questions -------------------------------------------------------------------------------------------------

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a tensor by its global name."""
        record = self.parameters.get(name) or self.buffers[name]
        return (name, *record.aliases)

    def holders(self, key: str, name: str) -> Iterator[tuple[str, Piece]]:
        """Yield the files that have parts of a tensor's ``key``, with the parts."""
        for file, keys in self.pieces.items():
            piece = keys.get(key, {}).get(name)
            if piece is not None:
                yield file, piece


def _tupled(record: Mapping[str, Any]) -> dict[str, Any]:
    tupled: dict[str, Any] = {}
    for key, value in record.items():
        tupled[key] = tuple(value) if isinstance(value, list) else value
    return tupled


# -- folders -----------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it is damaged: the folder is no whole checkpoint.
    """
    return _manifest_in(CheckpointFiles(folder))


def _manifest_in(files: CheckpointFiles) -> Manifest:
    file = files.folder / MANIFEST
    try:
        return Manifest.from_json(files.text(MANIFEST))
    except OSError:
        raise CheckpointError(
            f"the folder {files.folder} has no {MANIFEST}: it was not saved to its end, is not copied completely, or was written "
            "by another library; use another checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; the checkpoint is damaged or of another version, use another one"
        ) from None


def missing_files(
    folder: Path | CheckpointFiles, manifest: Manifest, files: Iterable[str] | None = None, *, read: bool = False
) -> list[str]:
    """Return descriptions of files that are absent, have another length, or are not regular files.

    Args:
        files: names to check; default: all.
        read: whether to read each file to its end as well and compare its checksum.
    """
    opened = folder if isinstance(folder, CheckpointFiles) else CheckpointFiles(folder)
    names = list(manifest.files if files is None else files)
    if read:
        found = together(lambda name: _problem_of(opened, manifest, name, read=True), names)
    else:
        found = [_problem_of(opened, manifest, name, read=False) for name in names]
    return [problem for problem in found if problem is not None]


def _problem_of(opened: CheckpointFiles, manifest: Manifest, name: str, *, read: bool) -> str | None:
    """Return what is wrong with a file; None if nothing is."""
    record = manifest.files[name]
    try:
        found = opened.size(name)
        if found == 0 and may_be_empty(manifest, name):
            return None
        # Copies of other hosts may be of another length.
        if found != record.bytes and not record.copies:
            return f"{name} has {found:,} bytes, but {record.bytes:,} were saved"
        if read and record.can_be_compared and not _has_content(opened, name, record):
            return f"{name} has other content than was saved (its checksum differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    except CheckpointError as error:
        return str(error)
    except ValueError as error:
        return f"{name} has other content than was saved ({error})"
    return None


def _has_content(opened: CheckpointFiles, name: str, record: FileRecord) -> bool:
    """Return whether a file has the checksum that was saved, or that of a copy on another host; raise as its ``checksum``."""
    failure: ValueError | None = None
    for kind in dict.fromkeys(map(kind_of, record.checksums)):  # hosts may have used different hashes
        try:
            if opened.checksum(name, kind) in record.checksums:
                return True
        except ValueError as error:
            failure = error
    if failure is not None:
        raise failure
    return False


def not_comparable(manifest: Manifest, files: Iterable[str] | None = None) -> str | None:
    """Return why checksums of files cannot be compared in this process; None if all can.

    Args:
        files: names to check; default: all.
    """
    names = [name for name in (manifest.files if files is None else files) if not manifest.files[name].can_be_compared]
    if not names:
        return None
    more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} cannot be compared with their checksums, which are XXH3-128: only their lengths were compared; install "
        "xxhash here (pip install xxhash)"
    )


def may_be_empty(manifest: Manifest, name: str) -> bool:
    """Return whether the file may be empty without a loss.

    Scripts empty the user content's file, and lose nothing if it held None.
    """
    if name != USER_CONTENT:
        return False
    return manifest.is_older or not manifest.has_content


def verify(folder: Path | CheckpointFiles, manifest: Manifest, files: Iterable[str] | None = None) -> list[str]:
    """Read every file to its end and return descriptions of the problems; empty if there are none.

    Args:
        files: names to check; default: all.
    """
    return missing_files(folder, manifest, files, read=True)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint folder found under a path.

    Attributes:
        name: such as ``"100_partial"``.
        manifest: None if it has no readable one.
        problems: descriptions of why it is incomplete; empty if all names and lengths agree.
        identity: of the folder that was inspected; None if it was not inspected.
    """

    name: str
    folder: Path
    manifest: Manifest | None
    problems: tuple[str, ...] = ()
    identity: Identity | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether all files are present with the lengths that were saved."""
        return not self.problems

    @property
    def save(self) -> str | None:
        """Return the id of the save, the same on any host; None without a readable manifest."""
        if self.manifest is None:
            return None
        # Older manifests have no id, but the time is the same in those of all hosts.
        return self.manifest.save or str(self.manifest.saved)

    @property
    def is_former(self) -> bool:
        """Return whether another checkpoint has replaced it under its name, or was about to."""
        return self.folder.name.startswith(".")


def inspect_folder(folder: Path, name: str | None = None) -> FoundCheckpoint:
    """Return a checkpoint folder with its manifest and its problems."""
    name = name or folder.name
    try:
        files = CheckpointFiles(folder)
        manifest = _manifest_in(files)
    except CheckpointError as error:
        return FoundCheckpoint(name, folder, None, (str(error),))
    problems = tuple(missing_files(files, manifest))
    return FoundCheckpoint(name, folder, manifest, problems, files.identity())


def _is_partial(folder: Path) -> bool:
    # Hidden folders are saves under way, and checkpoints that are replaced or removed.
    is_hidden = folder.name.startswith(".")
    if is_hidden or not folder.name.endswith(PARTIAL):
        return False
    return folder.is_dir()


def folders_in(path: Path) -> dict[Path, str]:
    """Return the folders of partial checkpoints under a path, with the checkpoint's name.

    Replaced checkpoints under hidden names count, too. No folder is opened.
    """
    if not path.is_dir():
        return {}
    folders = {}
    for folder in path.iterdir():
        if _is_partial(folder):
            folders[folder] = folder.name
    for folder in path.glob(".*.old"):
        name = name_of_former(folder) if folder.is_dir() else None
        if name is not None:
            folders[folder] = name
    return folders


def checkpoints_in(path: Path, formers: bool = False) -> list[FoundCheckpoint]:
    """Return all partial checkpoints under a path, complete or not, newest first.

    A job that was killed while it replaced a checkpoint of the same tag leaves the former one under a hidden
    name. That one counts as well.

    Args:
        formers: whether to include former checkpoints if another one has their name by now.
    """

    def age(checkpoint: FoundCheckpoint) -> tuple[float, str]:
        saved = checkpoint.manifest.saved if checkpoint.manifest else 0.0
        return saved, checkpoint.name

    found = [inspect_folder(folder, name) for folder, name in folders_in(path).items()]
    found.sort(key=age, reverse=True)
    if formers:
        return found
    shown: dict[str, FoundCheckpoint] = {}
    # Of two with one name, the one that is not a former checkpoint comes first, and stays.
    for each in sorted(found, key=lambda checkpoint: checkpoint.is_former):
        shown.setdefault(each.name, each)
    return [each for each in found if shown[each.name] is each]


def name_of_former(folder: Path) -> str | None:
    """Return the name that a hidden folder had before another checkpoint took it; None for any other folder."""
    match = _FORMER.fullmatch(folder.name)
    return match[1] if match else None


def whole_checkpoints(path: Path) -> list[FoundCheckpoint]:
    """Return the complete checkpoints among :func:`checkpoints_in`."""
    return [found for found in checkpoints_in(path) if found.is_whole]


def newest_name(path: Path) -> str | None:
    """Return the name in the file ``newest``, or None."""
    try:
        return read_text(path / NEWEST, most=4096).strip() or None
    except (OSError, ValueError, CheckpointError):
        return None
