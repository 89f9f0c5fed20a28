"""Input channels: where a job's ``/opt/ml/input/data/<name>`` comes from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_config.errors import suggest
from smp_estimator.local.uris import is_file_uri, is_s3_uri, path_of, require_address

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Channel:
    """One channel: its name, its address, and what ``inputdataconfig.json`` says of it."""

    name: str
    uri: str
    config: dict[str, str] = field(default_factory=dict)

    def link(self, directory: Path, downloads: Path, session: Any) -> None:
        """Make ``directory / name``: a link to a local directory or a download, or a folder with a link to a local file.

        Args:
            directory: ``input/data`` of one host.
            downloads: where the job's hosts share what is fetched from S3 for it, by ``session``.
        """
        target = directory / self.name
        if is_s3_uri(self.uri):
            copy = downloads / self.name
            if not copy.exists():
                copy.mkdir(parents=True)
                session.download(self.uri, copy)
            target.symlink_to(copy, target_is_directory=True)
            return
        source = path_of(self.uri)
        if source.is_dir():
            target.symlink_to(source, target_is_directory=True)
        else:
            target.mkdir()
            (target / source.name).symlink_to(source)


def read_channels(input_config: Sequence[Mapping[str, Any]] | None) -> list[Channel]:
    """Read and check the ``InputDataConfig`` of a job request.

    Raises:
        ConfigError: a missing directory, an address or mode that a job on this machine cannot read.
    """
    return [_channel(entry) for entry in input_config or ()]


def _channel(entry: Mapping[str, Any]) -> Channel:
    name = str(entry["ChannelName"])
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(
            f"the channel name {name!r} has characters that a folder of /opt/ml/input/data cannot have; names are made of "
            "letters, digits, '.', '_' and '-': rename it, for example to 'train'"
        )
    source = entry.get("DataSource", {})
    s3 = source.get("S3DataSource", {})
    uri = source.get("FileDataSource", {}).get("FileUri") or s3.get("S3Uri")
    if uri is None:
        raise ConfigError(
            f"channel {name!r} has the data source {sorted(source)}, but a job on this machine has no file system service; "
            f"mount it and give {{{name!r}: 'file:///the/mount/point'}}"
        )
    uri = require_address(uri, f"channel {name!r}")
    mode = entry.get("InputMode") or "File"
    if mode == "Pipe":
        raise ConfigError(
            f"channel {name!r} asks for input mode 'Pipe', but a job on this machine reads plain files; use 'File' or "
            "'FastFile'"
        )
    if s3.get("S3DataType", "S3Prefix") != "S3Prefix":
        raise ConfigError(
            f"channel {name!r} is a {s3['S3DataType']}, but a job on this machine reads whole prefixes; give the prefix "
            "that holds the files"
        )
    if is_file_uri(uri):
        require_existing(path_of(uri), f"channel {name!r}")
    config = {
        "TrainingInputMode": mode,
        "S3DistributionType": "FullyReplicated",
        "RecordWrapperType": str(entry.get("RecordWrapperType") or "None"),
    }
    if entry.get("ContentType"):
        config["ContentType"] = str(entry["ContentType"])
    return Channel(name, uri, config)


def require_existing(path: Path, what: str) -> None:
    """Raise ConfigError for a path that does not exist, naming its first missing folder and what lies beside it."""
    if path.exists():
        return
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    beside = sorted(entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else []
    listed = ", ".join(beside[:8]) + (" …" if len(beside) > 8 else "") if beside else "nothing"
    hint = suggest(missing.name, beside)
    raise ConfigError(
        f"{what} is {path}, which does not exist{hint}; {missing.parent} holds {listed}: create it or correct the path"
    )
