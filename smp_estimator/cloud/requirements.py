"""``requirements.txt`` of a job in a stock image: the user's lines and the runtime's, which pip installs together."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from smp_config import ConfigError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_HEADING = "# what the model parallel runtime needs"
_BYTE_ORDER = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins like the one of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NESTED = re.compile(r"(?:-r|--requirement|-c|--constraint)(?:\s+|=)?(\S.*)")
_ELSEWHERE = "give image_uri, an image that has the runtime, which then does not travel with the code"


def combined(path: Path, needed: Sequence[str]) -> str:
    """The user's ``requirements.txt``, which need not exist, with what the runtime needs after it.

    Raises:
        ConfigError: lines with which pip would refuse the runtime's, on a cluster that is paid for.
    """
    given = _text(path).rstrip("\n") if path.exists() else ""
    for file, line in _lines(path, set()):
        _check(file, line, needed)
    return "\n".join([*([given, ""] if given else []), _HEADING, *needed, ""])


def _text(path: Path) -> str:
    raw = path.read_bytes()
    encoding = next((name for mark, name in _BYTE_ORDER if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path.name} is not {encoding.upper()} text ({error.reason} at byte {error.start}), and the runtime's requirements "
            "are written after it: save it as UTF-8"
        ) from None


def _lines(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """The lines of a file, and of those that it names, without comments."""
    real = path.resolve()
    if real in seen or not real.is_file():  # pip says what is missing
        return
    seen.add(real)
    for line in _text(path).replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        nested = _NESTED.fullmatch(line)
        if nested and "://" not in nested[1]:
            yield from _lines(real.parent / nested[1].strip(), seen)
        elif line:
            yield path, line


def _check(file: Path, line: str, needed: Sequence[str]) -> None:
    if re.search(r"(^|\s)--(hash[=\s]|require-hashes\b)", line):
        raise ConfigError(
            f"{file.name} has {line[:80]!r}; with one hash pip wants hashes of everything, and the runtime's requirements "
            f"({', '.join(needed)}) have none: remove the hashes, or {_ELSEWHERE}"
        )
    try:
        theirs = Requirement(re.split(r"\s--", line)[0])
    except InvalidRequirement:
        return  # an option, a path or an address
    if theirs.marker is not None or theirs.url is not None:
        return
    for text in needed:
        ours = Requirement(text)
        if canonicalize_name(ours.name) == canonicalize_name(theirs.name) and not _agree(ours, theirs):
            raise ConfigError(
                f"{file.name} has {line!r}, and the runtime needs {text}; no version of {ours.name} is both, so pip would fail "
                f"in the job: allow {text}, or {_ELSEWHERE}"
            )


def _agree(ours: Requirement, theirs: Requirement) -> bool:
    """Whether some version satisfies both: one at, just above or just below a version that either of them names."""
    both: SpecifierSet = ours.specifier & theirs.specifier
    candidates = [Version("0"), Version("99999")]
    for specifier in both:
        try:
            at = Version(specifier.version.removesuffix(".*"))
        except InvalidVersion:  # === takes any text
            return True
        release = list(at.release)
        while len(release) > 1 and not release[-1]:
            release.pop()
        below = [*release[:-1], release[-1] - 1, 99999] if release[-1] else []
        above = [*at.release, 0, 1]
        candidates += [at, *(Version(".".join(map(str, parts))) for parts in (below, above) if parts)]
    return any(both.contains(candidate, prereleases=True) for candidate in candidates)
