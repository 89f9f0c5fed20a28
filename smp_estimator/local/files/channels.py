"""Input channels: the sources of a job's ``/opt/ml/input/data/<name>``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_config.errors import show_value, suggest
from smp_estimator.local.files.uris import is_file_uri, is_s3_uri, path_of, require_address

#: The distribution in which each host gets a part of the objects.
_SHARDED = "ShardedByS3Key"
#: Settings of a channel that act here as on the platform. Others are refused, unless their value is one of ``_LEFT_OUT``.
_KNOWN = frozenset(
    "ChannelName DataSource InputMode ContentType S3Uri S3DataType S3DataDistributionType FileUri FileDataDistributionType".split()
)
_LEFT_OUT: tuple[Any, ...] = (None, "None", [], {}, "")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Channel:
    """One channel: its name, its address, and its entry in ``inputdataconfig.json``."""

    name: str
    uri: str
    config: dict[str, str] = field(default_factory=dict)

    def link(self, directory: Path, downloads: Path, session: Any, host: int = 0, hosts: int = 1) -> None:
        """Make ``directory / name``: a link to a local directory or a download, or a folder with links to files.

        Args:
            directory: ``input/data`` of one host.
            downloads: where the job's hosts share what is fetched from S3 for it, by ``session``.
            host: number of this host, of ``hosts``; of a sharded channel each has other files.
        """
        target = directory / self.name
        source = self._fetched(downloads, session) if is_s3_uri(self.uri) else path_of(self.uri)
        is_sharded = self.config.get("S3DistributionType") == _SHARDED and hosts > 1
        if source.is_dir() and not is_sharded:
            target.symlink_to(source, target_is_directory=True)
            return
        files = _files_of(source)
        if is_sharded:
            files = files[host::hosts]
        target.mkdir()
        for path in files:
            link = target / (path.name if path == source else path.relative_to(source))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)

    def _fetched(self, downloads: Path, session: Any) -> Path:
        """Download the channel, once for all hosts of the job."""
        copy = downloads / self.name
        if not copy.exists():
            copy.mkdir(parents=True)
            session.download(self.uri, copy)
        return copy


def _files_of(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    # In one order on all hosts, which take every n-th file of it.
    return sorted(path for path in source.rglob("*") if path.is_file())


def read_channels(input_config: Sequence[Mapping[str, Any]] | None, input_mode: str | None = None) -> list[Channel]:
    """Read and check the ``InputDataConfig`` of a job request.

    Args:
        input_mode: of the job, which holds for channels without one.

    Raises:
        ConfigError: a missing directory, an address or a setting that a job on this machine cannot act on.
    """
    entries = input_config or ()
    if input_mode == "Pipe" and not entries:
        _refuse_pipe("input_mode is 'Pipe'")
    return [_channel(entry, input_mode) for entry in entries]


def _refuse_pipe(what: str) -> None:
    raise ConfigError(f"{what}, but a job on this machine reads plain files; use 'File' or 'FastFile'", code="SMP114")


def _refuse_settings(name: str, entry: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of a channel that would be dropped silently."""
    given = {key: value for key, value in (*entry.items(), *source.items()) if value not in _LEFT_OUT}
    for key, value in given.items():
        if key not in _KNOWN:
            raise ConfigError(
                f"channel {name!r} has {key} {show_value(value)}, but a job on this machine reads the files of a folder as "
                "they are, on "
                "all hosts; leave it out",
                code="SMP114",
            )


def _channel(entry: Mapping[str, Any], input_mode: str | None) -> Channel:
    name = str(entry["ChannelName"])
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(
            f"the channel name {name!r} has characters that a folder of /opt/ml/input/data cannot have; names are made of "
            "letters, digits, '.', '_' and '-': rename it, for example to 'train'",
            code="SMP114",
        )
    source = entry.get("DataSource", {})
    s3 = source.get("S3DataSource", {})
    uri = source.get("FileDataSource", {}).get("FileUri") or s3.get("S3Uri")
    if uri is None:
        raise ConfigError(
            f"channel {name!r} has the data source {sorted(source)}, but a job on this machine has no file system service; "
            f"mount it and give {{{name!r}: 'file:///the/mount/point'}}",
            code="SMP114",
        )
    uri = require_address(uri, f"channel {name!r}")
    mode = entry.get("InputMode") or input_mode or "File"
    if mode == "Pipe":
        _refuse_pipe(f"channel {name!r} asks for input mode 'Pipe'")
    if s3.get("S3DataType", "S3Prefix") != "S3Prefix":
        raise ConfigError(
            f"channel {name!r} is a {s3['S3DataType']}, but a job on this machine reads whole prefixes; give the prefix "
            "that holds the files",
            code="SMP114",
        )
    _refuse_settings(name, entry, s3)
    if is_file_uri(uri):
        require_existing(path_of(uri), f"channel {name!r}")
    config = {
        "TrainingInputMode": mode,
        "S3DistributionType": s3.get("S3DataDistributionType") or "FullyReplicated",
        "RecordWrapperType": "None",
    }
    if entry.get("ContentType"):
        config["ContentType"] = str(entry["ContentType"])
    return Channel(name, uri, config)


def require_existing(path: Path, what: str) -> None:
    """Raise ConfigError if a path does not exist; name its first missing folder and the entries beside it."""
    if path.exists():
        return
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    beside = sorted(entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else []
    listed = ", ".join(beside[:8]) or "nothing"
    if len(beside) > 8:
        listed += " …"
    hint = suggest(missing.name, beside)
    raise ConfigError(
        f"{what} is {path}, which does not exist{hint}; {missing.parent} holds {listed}: create it or correct the path",
        code="SMP114",
    )
