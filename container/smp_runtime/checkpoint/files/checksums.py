"""Checksums of files, each with the name of its hash: XXH3 where xxhash is installed, elsewhere what Python and an archive have.

A checksum is a text such as ``xxh3_128:9fd0…``, so that a reader knows how to compare it, or that it cannot. On two cores of an
EPYC one thread hashes 12.9 GB/s with XXH3-128, 3.8 with zlib's crc32, 3.1 with BLAKE3 and 1.6 with SHA-256; copying memory takes
8.3 GB/s. None of them is a signature: XXH3 finds damage, and a stranger can make other content with the same checksum.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol, TypeVar

from smp_runtime.checkpoint.files.archive_checksums import checksum_of_archive
from smp_runtime.tensors.host_memory.worker_threads import WorkerThreads

Item = TypeVar("Item")
Found = TypeVar("Found")

#: XXH3 with 128 bits, of the whole file.
XXH3 = "xxh3_128"
#: SHA-256 of the whole file.
SHA256 = "sha256"
#: SHA-256 of an archive without the contents of its records, whose own crc32 are compared: see :mod:`.archive_checksums`.
CRC32 = "crc32"

#: Bytes that are hashed and written, or read and hashed, as one: they are still in the processor's cache for the second.
CHUNK = 1 << 18
#: Files that are read at once. Reading and hashing release Python's lock; more threads than that gain nothing on a disk.
READERS = min(4, os.cpu_count() or 1)
_FORM = re.compile(r"xxh3_128:[0-9a-f]{32}|(?:sha256|crc32):[0-9a-f]{64}")


class Digest(Protocol):
    """Hash that takes its input in chunks."""

    def update(self, data: Any, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


@functools.cache
def _xxhash() -> Any:
    """Return the module, or None: checkpoints do without it."""
    try:
        return importlib.import_module("xxhash")
    except ImportError:
        return None


def has_xxh3() -> bool:
    """Return whether this process can compute XXH3."""
    return _xxhash() is not None


def new_digest(kind: str) -> Digest:
    """Return an empty hash: :data:`XXH3` or :data:`SHA256`."""
    digest: Digest = _xxhash().xxh3_128() if kind == XXH3 else hashlib.sha256()
    return digest


def kind_of(checksum: str) -> str:
    """Return the name of a checksum's hash."""
    return checksum.partition(":")[0]


def is_checksum(value: object) -> bool:
    """Return whether a value has the form of a checksum whose hash is known here."""
    return isinstance(value, str) and _FORM.fullmatch(value) is not None


def can_compare(checksum: str) -> bool:
    """Return whether this process has the hash of a checksum."""
    return kind_of(checksum) != XXH3 or has_xxh3()


class WrittenFile:
    """File that is written once, sequentially, and hashed meanwhile.

    Args:
        digest: takes all that is written, or None.
        kind: the name of its hash.

    Attributes:
        length: bytes written.
        failure: why the file could not be written, if it could not.
        at_first_write: called once, before the first bytes are written.
    """

    def __init__(self, file: Any, digest: Digest | None = None, kind: str = "") -> None:
        self._file = file
        self.kind = kind
        self.digest = digest
        self.length = 0
        self.failure: OSError | None = None
        self.at_first_write: Callable[[], None] | None = None

    def write(self, data: Any) -> int:
        """Write bytes and hash them."""
        if self.at_first_write is not None:
            self.at_first_write()
            self.at_first_write = None
        content = memoryview(data).cast("B")
        for start in range(0, content.nbytes, CHUNK):
            self._write(content[start : start + CHUNK])
        self.length += content.nbytes
        return content.nbytes

    def _write(self, chunk: memoryview) -> None:
        """Hash and write a chunk: it stays in the processor's cache between the two."""
        if self.digest is not None:
            self.digest.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Hand everything to the system."""
        self._file.flush()

    def checksum(self) -> str:
        """Return the checksum of all that was written; there must be a digest."""
        if self.digest is None:
            raise AssertionError("a file that is not hashed has no checksum")
        return f"{self.kind}:{self.digest.hexdigest()}"


def together(look: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """Return what a function finds of each file, in their order; several are read at once."""
    if len(items) < 2:
        return [look(each) for each in items]
    with WorkerThreads(min(len(items), READERS), "smp-checksums") as readers:
        return readers.map(look, items)


def checksums_of(files: Sequence[tuple[BinaryIO, str]]) -> list[str]:
    """Return the checksums of opened files, each with the hash that is named beside it; several are read at once.

    A file that :func:`checksum_of` cannot read has the empty text.
    """

    def found(each: tuple[BinaryIO, str]) -> str:
        try:
            return checksum_of(*each)
        except ValueError:
            return ""

    return together(found, files)


def checksum_of(file: BinaryIO, kind: str) -> str:
    """Read a file from its beginning to its end and return its checksum.

    Raises:
        ValueError: the kind is :data:`CRC32`, and it is no archive, or a record's content has changed since it was saved.
    """
    if kind == CRC32:
        return f"{CRC32}:{checksum_of_archive(file, reads_contents=True)}"
    digest = new_digest(kind)
    buffer = memoryview(bytearray(CHUNK))
    file.seek(0)
    while length := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:length])
    return f"{kind}:{digest.hexdigest()}"
