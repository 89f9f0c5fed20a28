"""Archives from other sources: checked before a byte of them is written, and unpacked below one folder only.

Python's own filter for data (``tarfile.data_filter``) refuses what leaves the folder, and devices. Before it, the sizes are
added up, so that a small file cannot fill the disk, and headers are read in bounds, so that it cannot fill the memory.
"""

from __future__ import annotations

import gzip
import itertools
import lzma
import os
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_config.formats import strict_json

#: Bytes of all files of a source archive, and their number.
MOST_BYTES = 4 << 30
MOST_FILES = 100_000

#: Most bytes that the reader of headers may request at once; a header, or a long name behind it, is far smaller.
_MOST_HEADER_BYTES = 1 << 20

#: What reading or writing a broken archive raises.
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, OverflowError, RecursionError)


@contextmanager
def read_archive(path: Path) -> Iterator[tarfile.TarFile]:
    """Open a ``.tar.gz`` or ``.tar`` for reading, one header after the other.

    Raises:
        ConfigError: the file is not an archive, or is broken; also if the error appears only during reading.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as raw:
            if not path.is_file():
                raise tarfile.ReadError("it is not a file")
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            plain: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            with tarfile.open(fileobj=_InBounds(plain), mode="r:") as archive:  # type: ignore[call-overload]
                yield archive
    except ConfigError:
        raise
    except _BROKEN as error:
        raise ConfigError(
            f"{path} is no readable archive: {_describe(error)}; it has {_size(path)}, and may have been cut or changed on its "
            "way: make or fetch it again",
            code="SMP114",
        ) from error


def unpack(path: Path, target: Path, where: str) -> None:
    """Unpack a ``.tar.gz`` into an empty folder; all of it, or nothing.

    Args:
        where: what the archive is called in messages.

    Raises:
        ConfigError: it is broken, too large, or holds what is no file, folder or link inside the folder.
    """
    most = min(MOST_BYTES, shutil.disk_usage(target).free)
    try:
        with read_archive(path) as archive:
            members = _checked(archive, where, most)
        with tarfile.open(path) as archive:
            # Older releases of Python lack the filter; members with bad names or kinds have been refused above.
            filtered: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(target, members=members, **filtered)
    except ConfigError:
        _empty(target)
        raise
    except _BROKEN as error:
        _empty(target)
        raise ConfigError(
            f"{where} cannot be unpacked: {_describe(error)}; make it again with tar czf", code="SMP114"
        ) from error


def _checked(archive: tarfile.TarFile, where: str, most: int) -> list[tarfile.TarInfo]:
    """Return all members, in their order; raise ConfigError if one is unsafe or the archive is too large."""
    members: list[tarfile.TarInfo] = []
    kinds: dict[str, bool] = {}
    size = 0
    for member in archive:
        size += max(member.size, 0)
        members.append(member)
        name = posixpath.normpath(member.name)
        if why := _why_refused(member, name, kinds):
            raise ConfigError(
                f"{where} holds {show_value(member.name)}, {why}; its files are unpacked into the job's code folder, and nothing "
                "else: pack plain files below one folder with tar czf",
                code="SMP114",
            )
        if size > most or len(members) > MOST_FILES:
            raise ConfigError(
                f"{where} holds {size:,} bytes or more in {len(members):,} or more files; the code of a job has at most "
                f"{MOST_FILES:,} files and, on this machine now, {most:,} bytes: put data into a channel",
                code="SMP114",
            )
        kinds[name] = member.issym()
    return members


def _why_refused(member: tarfile.TarInfo, name: str, kinds: dict[str, bool]) -> str | None:
    why = strict_json.why_unusable(member.name) or strict_json.why_unusable(member.linkname)
    if why:
        return f"whose name {why}"
    if posixpath.isabs(member.name) or name.split("/")[0] == "..":
        return "which lies outside"
    if member.size < 0:
        return "whose size is below 0"
    is_link = member.issym() or member.islnk()
    if not is_link and not member.isreg() and not member.isdir():
        return "which is neither a file, a folder nor a link"
    if name in kinds and not member.isdir():
        return "a second time"
    return _why_link_refused(member, name, kinds)


def _why_link_refused(member: tarfile.TarInfo, name: str, kinds: dict[str, bool]) -> str | None:
    parents = name.split("/")[:-1]
    folders = ["/".join(parents[:count]) for count in range(1, len(parents) + 1)]
    if any(kinds.get(folder) for folder in folders):
        return "which lies behind a link"
    if member.issym() and _leads_out(member.linkname, len(parents)):
        return f"a link to {show_value(member.linkname)}, which lies outside"
    if member.islnk() and posixpath.normpath(member.linkname) not in kinds:
        return f"a link to {show_value(member.linkname)}, which is no earlier file of the archive"
    return None


def _leads_out(target: str, depth: int) -> bool:
    """Return whether a symbolic link ``depth`` folders deep may lead outside; ``..`` is allowed only at its beginning."""
    if target.startswith("/"):
        return True
    steps = [step for step in target.split("/") if step not in ("", ".")]
    rest = list(itertools.dropwhile(lambda step: step == "..", steps))
    up = len(steps) - len(rest)
    # ".." behind a folder's name leads up from wherever that name leads, which may be a link.
    return up > depth or ".." in rest


class _InBounds:
    """A file that refuses reads larger than any tar header needs."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header says that {size:,} bytes belong to it")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        # A link goes, and the folder that it leads to stays.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size:,} bytes"
    except OSError:
        return "no size"


def _describe(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)[:300]
    return str(text or type(error).__name__)
