"""The search for the ranks' timelines in a job's output: a folder, an archive, or a folder with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_estimator.local.files.archives import read_archive
from smp_estimator.local.files.uris import is_file_uri, is_s3_uri, path_of
from smp_estimator.timeline.steps import JobTimeline
from smp_records.timeline import FILE_PREFIX, FILE_SUFFIX, TIMELINE_VARIABLE, parse_timeline

if TYPE_CHECKING:
    from smp_records.timeline import RankTimeline

#: Names of the files that ranks write, and of archives around them.
_PATTERN = f"{FILE_PREFIX}*{FILE_SUFFIX}"
_ARCHIVES = ("*.tar.gz", "*.tgz")

#: Largest file of one rank that is read, in bytes, and of all ranks in an archive.
_LARGEST = 1 << 28
_LARGEST_ARCHIVE = 1 << 30

#: Bytes of one read.
_PIECE = 1 << 19


def read_timeline(job_output: str) -> JobTimeline:
    """Read the timelines that a job's ranks recorded.

    Args:
        job_output: a folder or ``file://`` address that contains the files or ``output.tar.gz`` at any depth, or
            the archive itself. It can be an output path, or the folder of a job of this machine, even of a failed
            one.

    Raises:
        ConfigError: there are no files, broken ones, or files of different jobs.
    """
    return JobTimeline.of(read_ranks(job_output))


def read_ranks(job_output: str) -> list[tuple[str, RankTimeline]]:
    """Read the timelines as :func:`read_timeline` does, but return them rank by rank, each with its file's name."""
    place = place_of(job_output)
    files = [(name, parse_timeline(text, name)) for name, text in read_files(place, _PATTERN)]
    if not files:
        raise ConfigError(
            f"{job_output} holds no {_PATTERN}, neither plain nor in an archive; ranks write them when recording is "
            f'on: give the estimator environment={{"{TIMELINE_VARIABLE}": "10"}} for the newest 10 steps and run the job again',
            code="SMP116",
        )
    return files


def place_of(job_output: str) -> Path:
    """Return the path of a job's output folder or file.

    Raises:
        ConfigError: there is none on this machine.
    """
    if is_s3_uri(job_output):
        raise ConfigError(
            f"{job_output} is in S3; files of ranks are read from this machine: fetch the archive first, for example with "
            f"aws s3 cp {job_output.rstrip('/')} . --recursive --exclude '*' --include '*output.tar.gz', and name the folder",
            code="SMP116",
        )
    place = path_of(job_output) if is_file_uri(job_output) else Path(job_output)
    if not place.exists():
        raise ConfigError(
            f"{job_output} does not exist ({place.absolute()}); the command reads the output of a job: name its output "
            "path, its folder or its output.tar.gz",
            code="SMP116",
        )
    return place


def read_files(place: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of every rank's file that matches a pattern.

    Archives are opened only if there are no plain files.

    Raises:
        ConfigError: a file cannot be read, or is larger than any file that a rank writes.
    """
    if place.is_file():
        yield from _read(place) if place.match(pattern) else _in_archive(place, pattern)
        return
    plain = sorted(place.rglob(pattern))
    for path in plain:
        yield from _read(path)
    if plain:
        return
    archives: set[Path] = set()
    for suffix in _ARCHIVES:
        archives.update(place.rglob(suffix))
    for archive in sorted(archives):
        yield from _in_archive(archive, pattern)


def _read(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        if not path.is_file():
            raise OSError(0, "it is not a file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OSError(0, f"it has more than {_LARGEST:,} bytes")
        yield str(path), content
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; it was found in the job's output: change its permissions",
            code="SMP116",
        ) from None


def _in_archive(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    found = 0
    with read_archive(path) as archive:
        for member in archive:
            if not (member.isreg() and PurePosixPath(member.name).match(pattern)):
                continue
            found += member.size
            if member.size > _LARGEST or found > _LARGEST_ARCHIVE:
                raise ConfigError(
                    f"{path} holds {show_value(member.name)} of {member.size:,} bytes, and {found:,} with those before it; a "
                    "rank's "
                    f"file has at most {_LARGEST:,}, and those of a job {_LARGEST_ARCHIVE:,}: record fewer steps",
                    code="SMP116",
                )
            if (content := archive.extractfile(member)) is not None:
                yield f"{path}:{member.name}", _all_of(content, member.size)


def _all_of(content: IO[bytes], size: int) -> bytes:
    """Read ``size`` bytes in pieces, because the archive's reader limits the size of one read."""
    pieces = []
    while size > 0 and (piece := content.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
