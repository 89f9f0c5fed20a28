"""One file: written whole with its checksum or the name of its save, read without running code from it."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import socket
import struct
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

from smp_runtime.checkpoint.files.archive_checksums import checksum_of_archive
from smp_runtime.checkpoint.files.checksums import CRC32, SHA256, XXH3, WrittenFile, has_xxh3, new_digest
from smp_runtime.checkpoint.files.disk_space import bytes_of, naming_full_disk
from smp_runtime.checkpoint.files.manifest import FileRecord
from smp_runtime.checkpoint.files.opened_files import CheckpointFiles, open_regular, refuse_other_kinds
from smp_runtime.checkpoint.files.safe_objects import safe_objects
from smp_runtime.errors import CheckpointError, SMPUserError

#: What reading a damaged file may raise.
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def whole_file(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path that is renamed to ``path`` if the block succeeds, and removed if it fails.

    Args:
        needed: bytes that will be written, if known; reported when the disk is full.

    Raises:
        CheckpointError: the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with naming_full_disk(path, needed):
            yield temporary
            # Contents before the name: after a crash of the host the name would stand for a file without them.
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


#: Files that were written, by name.
Records = dict[str, FileRecord]


def write_tensors(content: Any, path: Path, records: Records | None = None, **options: Any) -> None:
    """Call ``torch.save`` so that either the new file is complete or the former one stays.

    Args:
        records: takes the file's length and checksum, which costs no second reading.
        options: those of ``torch.save``.

    Raises:
        CheckpointError: the disk is full.
    """
    with whole_file(path, bytes_of(content)) as temporary, open(temporary, "w+b") as file:
        stream = written_file(file, records)
        _save_to(stream, content, **options)
        record_written(stream, path, records)


def write_text(text: str, path: Path, records: Records | None = None) -> None:
    """Write a small text file whole; raises as :func:`write_bytes`."""
    write_bytes(text.encode(), path, records)


def write_bytes(content: bytes, path: Path, records: Records | None = None) -> None:
    """Write a file whole.

    Args:
        records: takes the file's length and checksum.

    Raises:
        CheckpointError: the disk is full.
    """
    with whole_file(path, len(content)) as temporary, open(temporary, "wb") as file:
        stream = written_file(file, records)
        stream.write(content)
        record_written(stream, path, records)


def record_written(stream: WrittenFile, path: Path, records: Records | None) -> None:
    """Put the length and checksum of a file that is written under its name, if there are records to take it."""
    if records is not None:
        records[path.name] = FileRecord(stream.length, stream.checksum())


def written_file(file: Any, records: Records | None) -> WrittenFile:
    """Return a stream to an opened file, which computes a checksum if there are records to take it."""
    kind = _fastest_hash(of_archive=False)
    return WrittenFile(file, None if records is None else new_digest(kind), kind)


def make_folder(folder: Path) -> None:
    """Make a folder for checkpoints, and those above it.

    Raises:
        CheckpointError: something else lies there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        other = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
        what = "a link to nothing" if other.is_symlink() and not other.exists() else "no folder"
        raise CheckpointError(
            f"checkpoints cannot be saved in {folder}, because {other} is {what}; remove it, or give another path"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_recorded(content: Any, path: Path) -> FileRecord:
    """Write a file of a checkpoint folder that is not in its place yet: tensors, or bytes as they are.

    Returns:
        Its length and checksum.

    Raises:
        CheckpointError: the disk is full.
    """
    kind = _fastest_hash(of_archive=not isinstance(content, bytes))
    with naming_full_disk(path, bytes_of(content)), open(path, "w+b") as file:
        stream = WrittenFile(file, None if kind == CRC32 else new_digest(kind), kind)
        if isinstance(content, bytes):
            stream.write(content)
        else:
            with _without_crc32(stream) if kind == XXH3 else contextlib.nullcontext():
                _save_to(stream, content)
        file.flush()
        checksum = (
            checksum_of_archive(file, reads_contents=False) if stream.digest is None else stream.digest.hexdigest()
        )
        os.fsync(file.fileno())
    return FileRecord(stream.length, f"{kind}:{checksum}")


def _fastest_hash(*, of_archive: bool) -> str:
    """Return the hash for a file that is written: XXH3, or without its library the one that costs least."""
    if has_xxh3():
        return XXH3
    return CRC32 if of_archive and _saves_crc32() else SHA256


def _saves_crc32() -> bool:
    """Return whether ``torch.save`` computes checksums; a script may have turned them off."""
    asked = getattr(torch.serialization, "get_crc32_options", None)  # before PyTorch 2.6 it always does
    return asked is None or bool(asked())


#: Guards the setting of ``torch.save`` while it is changed: of two threads, none may restore what the other has set.
_crc32_setting = threading.Lock()


@contextlib.contextmanager
def _without_crc32(stream: WrittenFile) -> Iterator[None]:
    """Let a ``torch.save`` to a stream compute no crc32, which takes longer than XXH3 and the archive does not need.

    The setting is the process's, so it is restored at the first bytes: the archive's writer has read it by then.
    """
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    with contextlib.ExitStack() as changed:
        changed.enter_context(_crc32_setting)
        changed.callback(torch.serialization.set_crc32_options, torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
        stream.at_first_write = changed.close
        yield


def _save_to(stream: WrittenFile, content: Any, **options: Any) -> None:
    """Call ``torch.save``, and raise the stream's own error if writing failed.

    The errors of ``torch.save`` do not contain the reason.
    """
    try:
        torch.save(content, stream, **options)  # type: ignore[arg-type]
    except Exception:
        if stream.failure is not None:
            raise stream.failure from None
        raise


def read_tensors(path: Path, map_location: Any = "cpu") -> Any:
    """Load a file that only holds tensors, arrays and plain objects; an empty file is None.

    Raises:
        CheckpointError: it is missing, cut or damaged, or holds other objects.
    """
    refuse_other_kinds(path)
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*"))[:20] if path.parent.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint file {path}; its folder holds {near or 'nothing'}: check the path and the tag"
        )
    if path.stat().st_size == 0:
        return None
    try:
        # Opened here, because PyTorch reads a path that ends in .safetensors as such a file.
        with _opened(path) as file, safe_objects(file):
            return torch.load(file, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except UNREADABLE as error:
        # A damaged archive fails as a zip file or by its checksums. This file is intact and holds a refused object.
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} holds an object that may run code when it is loaded ({_refused_object(error)}); if you trust who "
                "wrote it, pass pickle_module=pickle, or save plain objects, for example its __dict__"
            ) from None
        raise damaged_file(path, error) from error


def map_file(path: Path, files: CheckpointFiles | None = None) -> Any:
    """Load a file and leave its tensors on the disk until they are read.

    Args:
        files: the opened folder that contains it; None opens ``path``.

    Raises:
        CheckpointError: it is missing, truncated or damaged.
    """
    try:
        with contextlib.ExitStack() as stack:
            if files is None:
                opened, place = stack.enter_context(_opened(path)), str(path)
            else:
                opened, place = stack.enter_context(files.opened(path.name)), stack.enter_context(files.path(path.name))
            refuse_inflated(path, opened)
            return torch.load(place, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except UNREADABLE as error:
        raise damaged_file(path, error) from error


def refuse_inflated(path: Path, file: IO[bytes]) -> None:
    """Make sure that what is read from an archive takes no more memory than the archive has bytes; then go to its beginning.

    Raises:
        CheckpointError: it takes more: ``torch.save`` writes archives that are not compressed.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(max(each.file_size, each.compress_size) for each in archive.infolist())
            compressed = any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist())
    except UNREADABLE:  # not an archive, or a damaged one: reading it reports that
        unpacked, compressed = 0, False
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    if compressed or unpacked > size:
        raise CheckpointError(
            f"{path} has {size:,} bytes and says that {unpacked:,} come out of it{' by unpacking' if compressed else ''}: no save "
            "writes such a file; use another checkpoint"
        )


@contextlib.contextmanager
def _opened(path: Path, files: CheckpointFiles | None = None) -> Iterator[BinaryIO]:
    """Yield a file opened for reading at its beginning; refuse one that needs more memory than its size."""
    context = files.opened(path.name) if files is not None else os.fdopen(open_regular(path), "rb")
    with context as file:
        refuse_inflated(path, file)
        yield file


def damaged_file(path: Path, error: BaseException) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    return CheckpointError(
        f"the checkpoint file {path} cannot be read ({_refused_object(error)}); it was cut, damaged or written "
        "by something else: resume from another tag"
    )


#: Words of PyTorch's message in the line that has the reason.
_REASONS = re.compile("GLOBAL|Unsupported|Can only")


def _refused_object(error: BaseException) -> str:
    """Return in one line which object PyTorch's safe loader refused, or why it failed."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    if match:
        return f"of {match[1]}"
    lines = [line.strip() for line in str(error).splitlines()]
    with_reason = [line for line in lines if _REASONS.search(line)]
    candidates = with_reason or lines
    text = candidates[0] if candidates else ""
    return text[:200] or type(error).__name__


#: A key of the optimizer's state and of the user content, an attribute of a state, and metadata of safetensors.
SAVE_ID = "_smp_save"
_CONTENT = "content"
_POSITIONS = "data"


def marked_state(state: Mapping[str, Any], save_id: str | None) -> OrderedDict[str, Any]:
    """Return a copy of the state that carries the save id as an attribute.

    ``load_state_dict`` ignores it, as PyTorch's own ``_metadata`` shows.
    """
    marked = OrderedDict(state)
    if save_id is not None:
        setattr(marked, SAVE_ID, save_id)
    return marked


def wrap_content(content: Any, save_id: str, positions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user content with the save id, and with the positions in data sets if there are any."""
    return {SAVE_ID: save_id, _CONTENT: content, **({_POSITIONS: dict(positions)} if positions else {})}


def unwrap_content(content: Any) -> tuple[Any, str | None, Any]:
    """Return the user content, its save id and the positions in data sets.

    The id is None, and the positions are empty, for content that is not wrapped.
    """
    if isinstance(content, dict) and {SAVE_ID, _CONTENT} <= content.keys() <= {SAVE_ID, _CONTENT, _POSITIONS}:
        return content[_CONTENT], content[SAVE_ID], content.get(_POSITIONS, {})
    return content, None, {}


def refuse_other_saves(ids: Mapping[str, str | None]) -> None:
    """Make sure that all files with an id are from one save; those without come from elsewhere.

    Args:
        ids: by the path of the file.

    Raises:
        CheckpointError: they are from several.
    """
    known = {path: found for path, found in ids.items() if found is not None}
    if len(set(known.values())) > 1:
        first, *others = known
        strange = [path for path in others if known[path] != known[first]]
        raise CheckpointError(
            f"{', '.join(strange)} {'is' if len(strange) == 1 else 'are'} of another save than {first}: a save was stopped "
            "before all files were written, or files were copied together; use another tag, or move away what does not belong "
            "there to load the rest"
        )


def user_content_bytes(content: Any, *, trusted: bool = False) -> bytes:
    """Return the content of a ``user_content`` file, and check that it can be read back.

    Args:
        content: dictionaries, lists, tuples, sets, numbers, strings, tensors, NumPy arrays, and objects that are
            data (see :mod:`.safe_objects`), in any nesting.
        trusted: True accepts any object that can be pickled.

    Raises:
        SMPUserError: it contains something else, or something that cannot be pickled at all.
    """
    buffer = io.BytesIO()
    is_plain = _is_plain(content)
    try:
        torch.save(content, buffer, pickle_module=_WithoutTensors if is_plain else pickle)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SMPUserError(
            f"user_content holds something that cannot be saved ({str(error).splitlines()[0]}: pickle refuses it); keep to "
            "dictionaries, lists, numbers, strings, tensors and arrays",
            code="SMP402",
        ) from None
    if trusted or is_plain:
        return buffer.getvalue()
    buffer.seek(0)
    try:
        with safe_objects(buffer):
            torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SMPUserError(
            f"user_content holds an object that could not be loaded back safely ({_refused_object(error)}); keep to dictionaries, "
            "lists, numbers, strings, tensors, arrays, namespaces and configurations of Transformers, for example its __dict__, or "
            "pass trust_user_content=True to save_checkpoint and to resume_from_checkpoint",
            code="SMP402",
        ) from None
    return buffer.getvalue()


#: Types that PyTorch's safe loader reads regardless of their value; integers only up to ``_MOST_BITS`` bits.
_PLAIN = frozenset((bool, float, str, type(None)))
_MOST_BITS = 2000


class _WithoutTensors:
    """What ``torch.save`` takes for the ``pickle`` module; it asks nothing about each element, as none is a tensor."""

    class Pickler:
        """Writes with Python's own pickler, whatever ``torch.save`` adds in its subclass."""

        def __init__(self, file: IO[bytes], protocol: int) -> None:
            self._pickler = pickle.Pickler(file, protocol)

        def dump(self, content: Any) -> None:
            """Write ``content``."""
            self._pickler.dump(content)


def _is_plain(content: Any) -> bool:
    """Return whether content has nothing but lists, tuples, dictionaries, short integers, numbers and strings.

    Its types are looked at by collections, since loading it back takes microseconds for each element.
    """
    waiting, seen = [content], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if type(found) is dict:
            waiting += [list(found), list(found.values())]
            continue
        elements = found if type(found) in (list, tuple) else [found]
        kinds = set(map(type, elements)) - _PLAIN
        if int in kinds and not all(-(1 << _MOST_BITS) < each < 1 << _MOST_BITS for each in _of(elements, int)):
            return False
        if not kinds <= {int, list, tuple, dict}:
            return False
        if kinds - {int}:
            waiting += _of(elements, list, tuple, dict)
    return True


def _of(elements: Iterable[Any], *kinds: type) -> list[Any]:
    return [each for each in elements if type(each) in kinds]


def read_user_content(path: Path, *, trusted: bool = False, files: CheckpointFiles | None = None) -> Any:
    """Read a ``user_content`` file; an absent or empty one is None.

    Args:
        trusted: True loads any object, which may run code.
        files: the opened folder that has it; None opens ``path``.

    Raises:
        CheckpointError: it is damaged, or holds objects and is not trusted.
    """
    try:
        # Opened here, because PyTorch reads a path that ends in .safetensors as such a file, and tags may.
        with _opened(path, files) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return None
            with safe_objects(file):
                return torch.load(file, map_location="cpu", weights_only=not trusted)
    except FileNotFoundError:
        return None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds an object that may run code when it is loaded ({_refused_object(error)}); if you trust who wrote "
            "it, pass trust_user_content=True to resume_from_checkpoint"
        ) from None
    except UNREADABLE as error:
        raise damaged_file(path, error) from error
