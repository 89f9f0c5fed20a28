"""Files of checkpoints in S3, through boto3. An object appears when it is whole: S3 has no partly written ones."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.filesystem import FileSystemBase

from smp_config.errors import PackageMissing
from smp_version2.checkpoint.locations import format_s3_path, is_s3_uri, parse_s3_uri

F = TypeVar("F", bound=Callable[..., Any])

#: Bytes of one part of a large upload, and of one read.
PART_SIZE = 64 * 2**20
_READ_SIZE = 8 * 2**20
#: Tries of a request that may succeed later, and the longest pause after the first one, in seconds.
_TRIES = 3
_PAUSE = 0.5
#: HTTP statuses of answers that a later try may not get: errors of the server, from this one on, and too many requests.
_SERVER_ERROR = 500
_TOO_MANY = 429


def retry_with_jitter(function: F) -> F:
    """Call a function again, after a random pause, if the network or S3 fails in a way that may pass."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(_TRIES - 1):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if not _may_pass(error):
                    raise
                # Random, since the ranks of a job would otherwise come back at the same moment.
                time.sleep(random.uniform(0, _PAUSE * 2**attempt))
        return function(*args, **kwargs)

    return cast("F", call)


def _may_pass(error: Exception) -> bool:
    """Return whether the same call may succeed in a moment."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return status >= _SERVER_ERROR or status == _TOO_MANY
    kind = type(error)
    return "Connection" in kind.__name__ and kind.__module__.startswith("botocore")


class S3FileSystem(FileSystemBase):
    """Files in S3 for ``torch.distributed.checkpoint``.

    Args:
        region: of the client; None for that of the environment.
        config: an object whose ``part_size`` is the number of bytes of one part of an upload.

    Raises:
        PackageMissing: boto3 is not installed.
    """

    def __init__(self, region: str | None = None, config: Any = None) -> None:
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
        except ImportError as error:
            raise PackageMissing(f"checkpoints in S3 need boto3 ({error}); pip install boto3") from None
        part_size = int(getattr(config, "part_size", PART_SIZE))
        self._client = boto3.Session().client("s3", region_name=region)
        # Threads would draw on the processors that training uses.
        self._transfer = TransferConfig(multipart_chunksize=part_size, multipart_threshold=part_size, max_concurrency=4)

    @property
    def fs(self) -> S3FileSystem:
        """Return this object, for scripts that list folders by ``fs.listdir``."""
        return self

    def listdir(self, path: str | os.PathLike[str], detail: bool = False) -> list[Any]:
        """Return what lies directly in a folder, as ``bucket/key``; with ``detail`` as dictionaries with the ``name``."""
        names = [found.removeprefix("s3://") for found in self.ls(path)]
        return [{"name": name} for name in names] if detail else names

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open an object to read it or to write it; it is written if the block ends without an error."""
        if "r" in mode:
            with io.BufferedReader(_S3Reader(self._client, path), _READ_SIZE) as reader:
                yield reader
            return
        with tempfile.TemporaryFile() as file, contextlib.ExitStack() as last:
            descriptor = os.dup(file.fileno())  # PyTorch closes the file when it has written
            last.callback(os.close, descriptor)
            yield cast("io.IOBase", file)
            if not file.closed:
                file.flush()
            self._upload(descriptor, path)

    @retry_with_jitter
    def _upload(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        bucket, key = parse_s3_uri(path)
        # The client closes the file that it uploads, and a second try needs it.
        with os.fdopen(os.dup(descriptor), "rb") as copy:
            copy.seek(0)
            self._client.upload_fileobj(copy, bucket, key, Config=self._transfer)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the address of a file in a folder."""
        return f"{format_s3_path(path).rstrip('/')}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return the address of a folder."""
        return format_s3_path(path)

    @retry_with_jitter
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Copy an object to its new name, and delete the old one."""
        (bucket, key), (new_bucket, new_key) = parse_s3_uri(path), parse_s3_uri(new_path)
        self._client.copy({"Bucket": bucket, "Key": key}, new_bucket, new_key, Config=self._transfer)
        self.rm_file(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: S3 has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a path is an address in S3."""
        return is_s3_uri(checkpoint_id)

    @retry_with_jitter
    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether there is an object of this name."""
        bucket, key = parse_s3_uri(path)
        try:
            self._client.head_object(Bucket=bucket, Key=key)
        except self._client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                return False
            raise
        return True

    @retry_with_jitter
    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Delete an object."""
        bucket, key = parse_s3_uri(path)
        self._client.delete_object(Bucket=bucket, Key=key)

    @retry_with_jitter
    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """Return the addresses of what lies directly in a folder."""
        bucket, key = parse_s3_uri(path)
        prefix = f"{key}/" if key else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
        found = []
        for page in pages:
            found += [each["Prefix"].rstrip("/") for each in page.get("CommonPrefixes", ())]
            found += [each["Key"] for each in page.get("Contents", ()) if each["Key"] != prefix]
        return [f"s3://{bucket}/{name}" for name in found]


class _S3Reader(io.RawIOBase):
    """The bytes of an object, read in ranges: a rank needs only some tensors of a file."""

    def __init__(self, client: Any, path: str | os.PathLike[str]) -> None:
        self._client = client
        self._bucket, self._key = parse_s3_uri(path)
        self._position = 0
        try:
            self._size = int(self._request(client.head_object)["ContentLength"])
        except client.exceptions.ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                raise FileNotFoundError(f"there is no {format_s3_path(path)}") from None
            raise

    @retry_with_jitter
    def _request(self, call: Callable[..., Any], **given: Any) -> Any:
        return call(Bucket=self._bucket, Key=self._key, **given)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        length = min(len(buffer), self._size - self._position)
        if length <= 0:
            return 0
        received = self._read(self._position, length)
        buffer[:length] = received
        self._position += length
        return length

    @retry_with_jitter
    def _read(self, start: int, length: int) -> bytes:
        answer = self._request(self._client.get_object, Range=f"bytes={start}-{start + length - 1}")
        with contextlib.closing(answer["Body"]) as body, io.BytesIO() as data:
            shutil.copyfileobj(body, data)
            return data.getvalue()
