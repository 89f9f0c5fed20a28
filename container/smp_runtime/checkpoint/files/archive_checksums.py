"""Checksums of the archives that ``torch.save`` writes, which have one of each of their records already.

An archive is a zip file. Its directory has the crc32 of every record's content, computed while it was written; so a sha256 of all
that is not content (headers, padding and the directory) stands for the whole file, and nothing is hashed twice: to compare a crc32
takes less than half the time of a sha256.

Source: the format of zip files, PKWARE's APPNOTE 6.3, sections 4.3.7 (local headers) and 4.3.12 (the directory).

Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

#: A local header up to the lengths of name and extra field, which follow it.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\x03\x04"
_CHUNK = 1 << 20


def checksum_of_archive(file: BinaryIO, *, reads_contents: bool) -> str:
    """Return the hexadecimal SHA-256 of everything in an archive except the contents of its records.

    Args:
        file: opened for reading; read from its beginning.
        reads_contents: whether to read the contents as well and compare them with the CRC-32 in the archive's
            directory.

    Raises:
        ValueError: it is no archive of ``torch.save``, or a record's content does not match its CRC-32.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except (zipfile.BadZipFile, struct.error, ValueError, LookupError, NotImplementedError) as error:
        raise ValueError(f"it is no archive ({error})") from None
    size = file.seek(0, 2)
    file.seek(0)
    digest = hashlib.sha256()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"its record {entry.filename} is compressed")
        _digest(file, entry.header_offset - file.tell(), digest)
        header = file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_SIGNATURE):
            raise ValueError(f"its record {entry.filename} has no header")
        digest.update(header)
        _, *lengths = _LOCAL_HEADER.unpack(header)
        _digest(file, sum(lengths), digest)
        if not reads_contents:
            file.seek(entry.file_size, 1)
        elif _crc32(file, entry.file_size) != entry.CRC:
            raise ValueError(f"its record {entry.filename} has another crc32 than was saved")
    _digest(file, size - file.tell(), digest)
    return digest.hexdigest()


def _chunks(file: BinaryIO, length: int) -> Iterator[bytes]:
    """Yield the next ``length`` bytes in chunks; raise ValueError if records overlap."""
    if length < 0:
        raise ValueError("its records overlap")
    while length:
        chunk = file.read(min(length, _CHUNK))
        if not chunk:
            return  # the file is shorter than its records say
        yield chunk
        length -= len(chunk)


def _digest(file: BinaryIO, length: int, digest: Any) -> None:
    """Add the next ``length`` bytes to the digest."""
    for chunk in _chunks(file, length):
        digest.update(chunk)


def _crc32(file: BinaryIO, length: int) -> int:
    """Return the CRC-32 of the next ``length`` bytes."""
    found = 0
    for chunk in _chunks(file, length):
        found = zlib.crc32(chunk, found)
    return found
