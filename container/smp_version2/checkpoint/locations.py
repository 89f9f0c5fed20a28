"""Addresses of checkpoints: paths, and ``s3://bucket/key``."""

from __future__ import annotations

import os
import re

from smp_runtime.errors import SMPUserError

#: ``pathlib.Path`` joins the two slashes of an address to one.
_S3 = re.compile(r"s3:/{1,2}(?=[^/])")
_REGION = re.compile(r"[a-z]{2}(?:-[a-z]+)+-\d")


def is_s3_uri(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address in S3, also as ``pathlib.Path`` writes it."""
    return _S3.match(os.fspath(path)) is not None


def format_s3_path(path: str | os.PathLike[str]) -> str:
    """Return an address as ``s3://bucket/key``.

    Raises:
        SMPUserError: it is no address in S3.
    """
    text, found = _S3.subn("s3://", os.fspath(path), count=1)
    if not found or not is_s3_uri(path):
        raise SMPUserError(f"{os.fspath(path)!r} is no address in S3; write s3://bucket/key", code="SMP402")
    return text


def parse_s3_uri(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return bucket and key of an address; the key may be empty."""
    bucket, _, key = format_s3_path(path).removeprefix("s3://").partition("/")
    return bucket, key.strip("/")


def get_s3_region_from_uri(path: str | os.PathLike[str]) -> str | None:
    """Return the region in a bucket's name (``my-bucket-us-east-1``), or None."""
    found = _REGION.findall(parse_s3_uri(path)[0])
    return found[-1] if found else None
