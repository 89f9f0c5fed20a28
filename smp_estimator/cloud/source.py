"""The uploaded source of a job in a stock image: the user's files, and beside them the runtime as a wheel.

The wheel is built from the package's own installed files: no network, no build tools, the same bytes every time.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

import smp_config
from smp_config import ConfigError
from smp_config.error_codes import Coded
from smp_config.version import __version__
from smp_estimator.cloud import entry, requirements

if TYPE_CHECKING:
    from smp_estimator.cloud.image_table import TrainingImage

#: The program that the platform starts; it prepares the runtime and runs the user's script.
#: The underscore hides it from the automatic discovery of a package in ``source_dir``.
PROGRAM = "_smp_entry.py"

#: Hyperparameter that names the user's script; of the platform's prefix, so that scripts never see it as an argument.
USER_PROGRAM = entry.USER_PROGRAM

#: This package's name for pip.
DISTRIBUTION = "smp-estimator"

#: Read by a Python into which the wheel is installed; it has ``torch.sagemaker`` found.
_PATH_FILE = "smp_estimator_torch_sagemaker.pth"

#: The folder of this package.
_OWN = Path(__file__).parents[1]

#: Dependencies that are part of every training image; replacing them would break packages built against them.
_OF_THE_IMAGE = frozenset({"torch", "numpy"})

#: Named without a version: one that an image has was built for its MPI, and pip leaves it; others get the newest.
_IN_ANY_VERSION = frozenset({"mpi4py"})

#: The date of every file in the archive, the earliest that a zip file can hold.
_DATE = (1980, 1, 1, 0, 0, 0)

#: The file WHEEL of a wheel without compiled code.
_TAGS = "Wheel-Version: 1.0\nGenerator: smp-estimator\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class CannotTravel(Coded, RuntimeError):
    """The runtime of this installation cannot be sent with the code."""

    code = "SMP112"


@contextmanager
def with_runtime(entry_point: str, source_dir: str | None, image: TrainingImage | None = None) -> Iterator[Path]:
    """Yield a folder with the job's files: the user's (as links), the wheel, its requirements and the program.

    Args:
        image: the image that the job runs in, if the table has it.

    Raises:
        ConfigError: the user has a file of one of our names, or requirements that contradict ours.
    """
    folder = Path(tempfile.mkdtemp(prefix="smp-source-"))
    try:
        if source_dir:
            for item in sorted(Path(source_dir).expanduser().absolute().iterdir()):
                (folder / item.name).symlink_to(item, target_is_directory=item.is_dir())
        else:
            script = Path(entry_point).expanduser().absolute()
            (folder / script.name).symlink_to(script)
        if (folder / PROGRAM).is_symlink():
            raise ConfigError(
                f"source_dir {source_dir} holds a file {PROGRAM}, the name under which the runtime starts the script in a "
                "stock image; rename it",
                code="SMP112",
            )
        shutil.copyfile(entry.__file__, folder / PROGRAM)
        build_wheel(folder)
        _add_requirements(folder / "requirements.txt", image)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_requirements(path: Path, image: TrainingImage | None) -> None:
    """Append the runtime's requirements to the user's; the platform installs them before it starts the program."""
    text = requirements.combine_requirements(path, travelling_requirements(), image)
    if path.is_symlink():
        path.unlink()
    path.write_text(text, encoding="utf-8")


def wheel_name() -> str:
    """Return the file name of the wheel."""
    return f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"


def build_wheel(folder: Path) -> Path:
    """Write the wheel of the running package into ``folder``; raise CannotTravel if it was never installed."""
    info = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    files = dict(_package_files())
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = _TAGS.encode()
    record = f"{info}/RECORD"
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in sorted(files.items())]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    path = folder / wheel_name()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return path


def travelling_requirements() -> list[str]:
    """Return the package's requirements without those that every training image has.

    mpi4py is among them because some stock images lack it. The training toolkit starts a job's ranks by
    ``mpirun … python -m mpi4py``, after it has installed the requirements on every host.
    """
    found = set()
    declared = importlib.metadata.requires(DISTRIBUTION) or ()
    surroundings = {"extra": "runtime"}
    for needed in map(Requirement, declared):
        if needed.name in _OF_THE_IMAGE:
            continue
        if needed.marker is not None and not needed.marker.evaluate(surroundings):
            continue
        version = "" if needed.name in _IN_ANY_VERSION else str(needed.specifier)
        found.add(f"{needed.name}{version}")
    return sorted(found)


def _package_files() -> Iterator[tuple[str, bytes]]:
    # Looked up beside smp_config, not through the import system: another smdistributed may be installed here.
    roots = {name: Path(smp_config.__file__).parent.parent / name for name in entry.PACKAGES}
    roots["smp_estimator"] = _OWN
    for name in (f"{entry.FINDER}.py", _PATH_FILE):
        beside = roots["smp_config"].with_name(name)
        if not beside.is_file():
            raise CannotTravel(
                f"the runtime cannot travel with the code: {beside} is missing; reinstall {DISTRIBUTION}, or give image_uri, an "
                "image that has the runtime"
            )
        yield name, beside.read_bytes()
    for package, root in roots.items():
        if not (root / "__init__.py").is_file():
            raise CannotTravel(
                f"the runtime cannot travel with the code: {root} has no {package} package; reinstall {DISTRIBUTION}, or "
                "give image_uri, an image that has the runtime"
            )
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            if path.is_file() and "__pycache__" not in relative.parts and path.suffix not in (".so", ".pyd", ".pyc"):
                yield f"{package}/{relative.as_posix()}", path.read_bytes()


def _metadata() -> str:
    try:
        files = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise CannotTravel(
            f"{DISTRIBUTION} is imported from {_OWN.parent} but is not installed, so its "
            "requirements are unknown; install it with pip, or give image_uri, an image that has the runtime"
        ) from None
    # An installation as an egg, such as an editable one, has the same under another name.
    return str(files.read_text("METADATA") or files.read_text("PKG-INFO") or "")


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
