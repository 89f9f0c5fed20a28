"""``file://`` and ``s3://`` addresses, as the SDK reads them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_config.formats import strict_json

#: Bytes of a path, and of one name in it.
_LONGEST_PATH = 4095
_LONGEST_NAME = 255


def is_file_uri(uri: object) -> bool:
    """Return whether this is text that begins with ``file://``."""
    return isinstance(uri, str) and uri.startswith("file://")


def is_s3_uri(uri: object) -> bool:
    """Return whether this is text that begins with ``s3://``."""
    return isinstance(uri, str) and uri.startswith("s3://")


def path_of(uri: str) -> Path:
    """Return the absolute path of a ``file://`` address; ``file://data`` is relative to the working directory.

    A percent-encoded path, as ``Path.as_uri()`` writes it, is decoded. It is taken literally, as in the SDK, if
    that path exists, or if a folder in it with such a name exists and the decoded path does not.
    """
    written = uri.removeprefix("file://")
    path = Path(written).expanduser().absolute()
    if path.exists() or not _is_encoded(written):
        return path
    try:
        decoded = Path(unquote(written, errors="strict")).expanduser().absolute()
    except UnicodeDecodeError:
        return path
    if decoded.exists():
        return decoded
    has_literal_folder = any("%" in folder.name and folder.exists() for folder in path.parents)
    if has_literal_folder:
        return path
    return decoded


def _is_encoded(written: str) -> bool:
    has_other_percent = re.search(r"%(?![0-9A-Fa-f]{2})", written) is not None
    return "%" in written and not has_other_percent


def address_of(path: str | os.PathLike[str]) -> str:
    """Return the ``file://`` address of a path, percent-encoded only if :func:`path_of` needs it."""
    path = Path(path).absolute()
    return f"file://{path}" if path_of(f"file://{path}") == path else path.as_uri()


def bucket_and_key(uri: str) -> tuple[str, str]:
    """Split ``s3://bucket/some/key`` into ``("bucket", "some/key")``."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key.strip("/")


def require_nameable(path: str, what: str) -> None:
    """Raise ConfigError if no file system can have this path, so that it cannot even be looked up."""
    if why := strict_json.why_unusable(path):
        raise ConfigError(
            f"{what} {why}; it begins with {path[:60]!r}, and no file can have such a name: correct the path",
            code="SMP114",
        )
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > _LONGEST_NAME or len(path.encode()) > _LONGEST_PATH:
        raise ConfigError(
            f"{what} is {show_value(path)}, a path of {len(path.encode()):,} bytes with a name of {longest:,}; file systems "
            "have at "
            f"most {_LONGEST_PATH:,} and {_LONGEST_NAME:,}: give a shorter path",
            code="SMP114",
        )
    try:
        Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{what} is {show_value(path)}, and there is no such home folder ({error}): write the path out",
            code="SMP114",
        ) from None


def require_address(value: object, what: str) -> str:
    """Return ``value`` if it is a ``file://`` or ``s3://`` address; otherwise raise ConfigError.

    For a plain path, the error contains the address to write instead.
    """
    if isinstance(value, str):
        require_nameable(value.removeprefix("file://"), what)
    if is_file_uri(value) or is_s3_uri(value):
        return str(value)
    if isinstance(value, str) and "://" not in value:
        raise ConfigError(
            f"{what} is {value!r}, which is neither a file:// nor an s3:// address; plain paths are not read as "
            f"addresses: write 'file://{Path(value).expanduser().absolute()}'",
            code="SMP114",
        )
    raise ConfigError(
        f"{what} is {show_value(value)} ({type(value).__name__}), which is neither a file:// nor an s3:// address; a job on this "
        "machine reads and writes only these two: write 'file:///absolute/path' or 's3://bucket/prefix'",
        code="SMP114",
    )
