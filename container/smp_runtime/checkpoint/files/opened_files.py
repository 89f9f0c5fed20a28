"""Files of checkpoints, opened so that they are what they seem: regular, inside of their folder, and all of one save.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from smp_config.formats.values import why_no_path
from smp_runtime.checkpoint.files.checksums import checksum_of
from smp_runtime.errors import CheckpointError, SMPUserError

#: The list of a folder's files; written last.
MANIFEST = "manifest.json"
#: Bytes of a text that is read into memory at once: far more than the manifest of a job with ten thousand ranks has.
MOST_TEXT = 2**30

#: Linux's links from open descriptors to the current paths of their files, even after a rename.
_DESCRIPTORS = Path("/proc/self/fd")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

#: Identity of a folder when it was opened: device and inode of the folder.
#: With a manifest also its inode, size and modification time.
Identity = tuple[int, ...]


def is_plain_name(name: object) -> bool:
    """Return whether a name means a file in its own folder, and nothing outside."""
    if not isinstance(name, str):
        return False
    if name in (".", ".."):
        return False
    # The most that file systems allow.
    if not 0 < len(name) <= 255:
        return False
    return not any(_is_refused(character) for character in name)


def _is_refused(character: str) -> bool:
    """Return whether no name of a file may have this character: separators, control characters and lone surrogates."""
    code = ord(character)
    return character in "/\\" or code < 32 or 0xD800 <= code < 0xE000


def local_path(path: Any, what: str) -> Path:
    """Return what a script has given as a path of this machine.

    Args:
        what: the argument, such as ``path of smp.save_checkpoint``.

    Raises:
        SMPUserError: it is an address such as ``s3://bucket/x``, empty, or no path at all.
    """
    if (why := why_no_path(path)) is not None:
        raise SMPUserError(f"{what} {why}", code="SMP402")
    return Path(path)


def open_regular(path: Path, *, folder: int | None = None) -> int:
    """Return a descriptor for reading a regular file, so that reading cannot hang or go on forever.

    Args:
        path: of the file; links are followed, since the caches of hubs are made of them.
        folder: descriptor of a folder in which to look for the last part of ``path`` instead. Then the file must
            not be a link, which could lead out of the folder.

    Raises:
        OSError: there is none, or it may not be read.
        CheckpointError: it is a named pipe, a device, a folder or (with ``folder``) a link.
    """
    where: str | Path = path if folder is None else path.name
    # Looked at before it is opened: opening some devices does something.
    _refuse_other_kinds(path, os.stat(where, dir_fd=folder, follow_symlinks=folder is None).st_mode)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if folder is not None else 0)
    descriptor = os.open(where, flags, dir_fd=folder)
    try:
        _refuse_other_kinds(path, os.fstat(descriptor).st_mode)
    except CheckpointError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_other_kinds(path: Path) -> None:
    """Make sure that what lies at ``path``, if anything does, is a file.

    Raises:
        CheckpointError: it is a named pipe, a device or a folder.
    """
    with contextlib.suppress(OSError):
        _refuse_other_kinds(path, path.stat().st_mode)


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, where a checkpoint has a file: it was not written by a save; "
            "remove it, and copy the checkpoint again or use another one"
        )


def read_text(path: Path, *, folder: int | None = None, most: int = MOST_TEXT) -> str:
    """Return the whole text of a small file.

    Args:
        folder: as for :func:`open_regular`.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is no file, or larger.
        ValueError: it is no text in UTF-8.
    """
    with os.fdopen(open_regular(path, folder=folder), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if size > most or len(content) > most:
        raise CheckpointError(
            f"{path} has {max(size, len(content)):,} bytes, and at most {most:,} are read of such a file: it is damaged or "
            "written by something else; use another checkpoint"
        )
    return content.decode("utf-8")


class ReplacedError(CheckpointError):
    """An error: a checkpoint was replaced by another one while it was read."""

    code = "SMP401"


class CheckpointFiles:
    """The files of one checkpoint folder, also after it was renamed, or another one took its name.

    The folder is opened once, and every file is opened in it. A published folder is never changed, only replaced as a whole:
    what is verified and what is read are of one save, whatever another job does meanwhile.

    Args:
        identity: that of the folder when its manifest was read; None where it does not matter.

    Raises:
        ReplacedError: there is no folder, or it is another one by now.
    """

    def __init__(self, folder: Path, identity: Identity | None = None) -> None:
        self.folder = folder
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ReplacedError(f"the folder {folder} cannot be opened ({error.strerror}); check the path") from None
        weakref.finalize(self, os.close, self._descriptor)
        if identity is not None and self.identity() != identity:
            raise ReplacedError(
                f"{folder} was replaced by another checkpoint while it was looked at: another job saves into {folder.parent}; "
                "resume when it has ended, or from a copy"
            )

    def identity(self) -> Identity:
        """Return the identity of the folder and its manifest; no other save has the same one."""
        about = os.fstat(self._descriptor)
        try:
            file = os.stat(MANIFEST, dir_fd=self._descriptor, follow_symlinks=False)
        except OSError:
            return (about.st_dev, about.st_ino)
        return (about.st_dev, about.st_ino, file.st_ino, file.st_size, file.st_mtime_ns)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file opened for reading.

        Raises:
            OSError: there is none, or it may not be read.
            CheckpointError: the name leads out of the folder, or it is not a regular file.
        """
        if not is_plain_name(name):
            raise CheckpointError(
                f"the checkpoint {self.folder} names {name!r} as one of its files, which is no name of a file in that folder: its "
                "manifest was changed or is of something else; use another checkpoint"
            )
        with os.fdopen(open_regular(self.folder / name, folder=self._descriptor), "rb") as file:
            yield file

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise as :meth:`opened`."""
        with self.opened(name) as file:
            return os.fstat(file.fileno()).st_size

    def checksum(self, name: str, kind: str) -> str:
        """Read all of a file and return its checksum.

        Args:
            kind: the hash, as in :mod:`.checksums`.

        Raises:
            OSError, CheckpointError: as :meth:`opened`.
            ValueError: it should be an archive and is none, or a record's content has changed since it was saved.
        """
        with self.opened(name) as file:
            return checksum_of(file, kind)

    def text(self, name: str) -> str:
        """Return the whole text of a small file; raise as :func:`read_text`."""
        return read_text(self.folder / name, folder=self._descriptor)

    @contextlib.contextmanager
    def path(self, name: str) -> Iterator[str]:
        """Yield a path that means the file inside the block, for functions that only take a path.

        Raises as :meth:`opened`.
        """
        with self.opened(name) as file:
            if _DESCRIPTORS.is_dir():
                yield str(_DESCRIPTORS / str(file.fileno()))
                return
            yield str(self.folder / name)
            if not os.path.samestat(os.stat(self.folder / name), os.fstat(file.fileno())):
                raise ReplacedError(f"{self.folder / name} was replaced while it was read; resume again")
