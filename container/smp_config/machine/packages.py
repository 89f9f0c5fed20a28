"""The packages that every process of a job imports, checked before the first of them is needed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping

from smp_config.error_codes import append_code
from smp_config.errors import RequiredPackageMissing

#: By the module that is imported, the name of its wheel. ``pydantic`` imports the others.
_PYDANTIC = {
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_extensions": "typing-extensions",
    "typing_inspection": "typing-inspection",
}

Packages = Mapping[str, Mapping[str, str]]

#: Wheels by module, by the requirement for pip that brings them, as in ``setup.cfg``.
RANK_PACKAGES: Packages = {"pydantic>=2.7": _PYDANTIC}

#: Those of the launcher, which has a command line.
LAUNCHER_PACKAGES: Packages = {**RANK_PACKAGES, "click>=8.1": {"click": "click"}}


def explain_missing(packages: Packages) -> str | None:
    """Return which packages are missing and how to add them, in one line; None if all are there."""
    missing: list[str] = []
    requirements: list[str] = []
    needed: list[str] = []
    for requirement, wheels in packages.items():
        absent = [wheel for module, wheel in wheels.items() if not _is_there(module)]
        if absent:
            missing += absent
            requirements.append(f"'{requirement}'")
            needed += wheels.values()
    if not missing:
        return None
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{sys.executable} has no {_listed(missing)}: run {sys.executable} -m pip install {' '.join(requirements)}; without a "
        f"package index, install the wheels of {_listed(needed)} for Python {version} into a folder (pip install --no-deps "
        "--target FOLDER *.whl) and add the folder to PYTHONPATH"
    )


def require_packages(packages: Packages = RANK_PACKAGES) -> None:
    """Check that the packages can be imported.

    Raises:
        RequiredPackageMissing: some are missing. A script that does not catch it ends with one line, without a traceback.
    """
    if (why := explain_missing(packages)) is not None:
        _show_in_one_line()
        raise RequiredPackageMissing(why)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # import hooks may refuse; a module that a script has made may have no spec
        return module in sys.modules


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _show_in_one_line() -> None:
    """Let the interpreter print this error without its traceback, which leads through this library only."""
    former = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if isinstance(error, RequiredPackageMissing):
            print(f"[smp] {append_code(str(error), error)}", file=sys.stderr, flush=True)
        else:
            former(kind, error, traceback)

    sys.excepthook = show
