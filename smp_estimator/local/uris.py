"""``file://`` and ``s3://`` addresses, as the SDK reads them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlparse

from smp_config import ConfigError


def is_file_uri(uri: object) -> bool:
    return isinstance(uri, str) and uri.startswith("file://")


def is_s3_uri(uri: object) -> bool:
    return isinstance(uri, str) and uri.startswith("s3://")


def path_of(uri: str) -> Path:
    """The absolute path of a ``file://`` address; ``file://data`` is relative to the working directory.

    A percent-encoded path is decoded only when the path as written does not exist, since the SDK takes it literally.
    """
    parsed = urlparse(uri, allow_fragments=False)
    written = parsed.netloc + parsed.path + (f"?{parsed.query}" if parsed.query else "")
    path = Path(written).expanduser().absolute()
    decoded = Path(unquote(written)).expanduser().absolute()
    return decoded if decoded != path and decoded.exists() and not path.exists() else path


def bucket_and_key(uri: str) -> tuple[str, str]:
    """``s3://bucket/some/key`` → ``("bucket", "some/key")``."""
    parsed = urlparse(uri, allow_fragments=False)
    return parsed.netloc, parsed.path.strip("/")


def require_address(value: object, what: str) -> str:
    """Check that ``value`` is a ``file://`` or ``s3://`` address.

    Raises:
        ConfigError: with the address that a plain path would need.
    """
    if is_file_uri(value) or is_s3_uri(value):
        return str(value)
    if isinstance(value, str) and "://" not in value:
        raise ConfigError(
            f"{what} is {value!r}, which is neither a file:// nor an s3:// address; plain paths are not read as "
            f"addresses: write 'file://{Path(value).expanduser().absolute()}'"
        )
    raise ConfigError(
        f"{what} is {value!r} ({type(value).__name__}), which is neither a file:// nor an s3:// address; a job on this "
        "machine reads and writes only these two: write 'file:///absolute/path' or 's3://bucket/prefix'"
    )
