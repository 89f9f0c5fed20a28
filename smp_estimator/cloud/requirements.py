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
from smp_estimator.cloud.images import TORCH_FLOOR

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from smp_estimator.cloud.image_table import TrainingImage

_FLOOR = ".".join(map(str, TORCH_FLOOR))
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


#: The oldest NumPy with a wheel for a Python.
_NUMPY = {"py310": "1.21.3", "py311": "1.23.2", "py312": "1.26.0", "py313": "2.1.0"}
#: Packages released together with PyTorch, and their version numbers: torchvision 0.15 belongs to PyTorch 2.0.
_WITH_TORCH = {"torch": "2.{minor}", "torchaudio": "2.{minor}", "torchvision": "0.{later}"}
_PATCHES = 10


def combine_requirements(path: Path, needed: Sequence[str], image: TrainingImage | None = None) -> str:
    """Return the user's ``requirements.txt``, which need not exist, followed by the runtime's requirements.

    Args:
        image: the image that the job runs in, if the table has it.

    Raises:
        ConfigError: because of some lines, pip would refuse the runtime's requirements or replace the image's
            PyTorch, on a cluster that is paid for.
    """
    lines = []
    if path.is_file():
        given = _text(path).rstrip("\n")
        if given:
            lines += [given, ""]
    for file, line in _lines(path, set()):
        _check(file, line, needed)
    check_image(path, image)
    lines += [_HEADING, *needed, ""]
    return "\n".join(lines)


def check_image(path: Path, image: TrainingImage | None) -> None:
    """Refuse lines of a file, which need not exist, that do not fit the PyTorch and the Python of a stock image.

    Args:
        image: None where it is not known which one it is; then PyTorch must be as new as the runtime needs.

    Raises:
        ConfigError: pip would replace the image's PyTorch by another build, or fail, on a cluster that is paid for.
    """
    for file, line in _lines(path, set()):
        theirs = _requirement(line)
        if theirs is None:
            continue
        name = canonicalize_name(theirs.name)
        if name in _WITH_TORCH:
            _check_torch(file, line, theirs, image)
        elif name == "numpy":
            _check_numpy(file, line, theirs, image)


def _check_torch(file: Path, line: str, theirs: Requirement, image: TrainingImage | None) -> None:
    """Raise ConfigError if a requirement allows no version of PyTorch, or of its companions, that the image has."""
    name = canonicalize_name(theirs.name)
    if any(theirs.specifier.contains(version) for version in _versions(name, image)):
        return
    has = f"has PyTorch {image.torch}" if image is not None else f"must have PyTorch {_FLOOR} or newer"
    raise ConfigError(
        f"{file.name} has {line!r}, and the image {has}; pip would put another build in its place, which lacks the image's "
        "CUDA and network libraries, or fail: remove the line, or choose an image with that version",
        code="SMP112",
    )


def _check_numpy(file: Path, line: str, theirs: Requirement, image: TrainingImage | None) -> None:
    """Raise ConfigError if a requirement allows no version of NumPy that has a wheel for the image's Python."""
    python = image.python if image is not None else None
    oldest = _NUMPY.get(python or "py310", _NUMPY["py310"])
    if not _agree(Requirement(f"numpy>={oldest}"), theirs):
        raise ConfigError(
            f"{file.name} has {line!r}, and NumPy before {oldest} has no wheel for the image's Python, so pip would compile it "
            f"in the job and fail: allow numpy>={oldest}",
            code="SMP112",
        )


def _versions(name: str, image: TrainingImage | None) -> Iterator[str]:
    """Yield versions of a package that match the image's PyTorch; without an image, any that the runtime supports."""
    first = int(image.torch.split(".")[1]) if image is not None else TORCH_FLOOR[1]
    for minor in range(first, first + 1 if image is not None else 100):
        release = _WITH_TORCH[name].format(minor=minor, later=minor + 15)
        yield from (f"{release}.{patch}" for patch in range(_PATCHES))


def _text(path: Path) -> str:
    raw = path.read_bytes()
    encoding = next((name for mark, name in _BYTE_ORDER if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path.name} is not {encoding.upper()} text ({error.reason} at byte {error.start}), and the runtime's requirements "
            "are written after it: save it as UTF-8",
            code="SMP112",
        ) from None


def _lines(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the lines of a requirements file and of the files that it includes, without comments."""
    real = path.resolve()
    if real in seen or not real.is_file():  # pip reports a missing file
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
            f"({', '.join(needed)}) have none: remove the hashes, or {_ELSEWHERE}",
            code="SMP112",
        )
    theirs = _requirement(line)
    if theirs is None:
        return
    for text in needed:
        ours = Requirement(text)
        if canonicalize_name(ours.name) == canonicalize_name(theirs.name) and not _agree(ours, theirs):
            raise ConfigError(
                f"{file.name} has {line!r}, and the runtime needs {text}; no version of {ours.name} is both, so pip would fail "
                f"in the job: allow {text}, or {_ELSEWHERE}",
                code="SMP112",
            )


def _requirement(line: str) -> Requirement | None:
    """Return the requirement on a line; None for options, paths and addresses, and if it has an environment marker."""
    try:
        found = Requirement(re.split(r"\s--", line)[0])
    except InvalidRequirement:
        return None
    is_conditional = found.marker is not None
    if is_conditional or found.url is not None:
        return None
    return found


def _agree(ours: Requirement, theirs: Requirement) -> bool:
    """Return whether some version satisfies both requirements.

    The versions tried are those that the requirements name, and versions just below and just above them.
    """
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
