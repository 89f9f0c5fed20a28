"""Chooses the version of the library for parameters that no launcher has assigned to one.

Some parameters have the same name in both versions, and ``{"tensor_parallel_degree": 2}`` alone has no other. Then the script's
imports decide, and a line says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError
from smp_config.parameters import KEYS, are_of_version_2
from smp_config.version2.parameters import Version2Parameters

#: The packages of the two versions.
OF_VERSION_1, OF_VERSION_2 = "smdistributed.modelparallel", "torch.sagemaker"

#: Passes the version that the launcher has chosen to the wrapper of a rank.
VERSION_VARIABLE = "SMP_LAUNCH_LIBRARY_VERSION"

#: Most files of a script's folder that are read for imports.
_MOST_FILES = 200


@dataclass(frozen=True)
class VersionChoice:
    """The version of the library that a job uses.

    Attributes:
        is_2: whether it is version 2.
        reason: a sentence to print; None if the parameters alone decide, or the script agrees with what would be taken anyway.
    """

    is_2: bool
    reason: str | None = None


def choose_version(parameters: Any, script: str | Path | None) -> VersionChoice:
    """Return the version of a job: that of a parameter which only one version has, else that which the script imports.

    Args:
        parameters: the parameters as they were given; anything else than a dictionary counts as version 1, which reports it.
        script: a Python file; None or another file if there is none to read.
    """
    if not isinstance(parameters, Mapping):
        return VersionChoice(False)
    if are_of_version_2(parameters):
        return VersionChoice(True)
    shared = [str(name) for name in parameters if name in Version2Parameters.model_fields]
    if any(name in KEYS and str(name) not in shared for name in parameters):
        return VersionChoice(False)
    imports = find_imports(Path(script)) if script is not None else frozenset[str]()
    if imports == {OF_VERSION_1}:
        return VersionChoice(False)
    which = f"{', '.join(shared)}: both versions of the library have {'these parameters' if len(shared) > 1 else 'this parameter'}"
    if imports == {OF_VERSION_2}:
        said = f"{which}; {script} imports {OF_VERSION_2}, so the job is one of version 2"
        return VersionChoice(True, said if shared else None)
    if not shared:
        return VersionChoice(False)
    if script is None:
        why = "nothing says which, so they count as version 1"
    elif imports:
        why = f"{script} imports both, so they count as version 1"
    else:
        why = f"{script} shows no import of either, so they count as version 1"
    return VersionChoice(
        False, f"{which}; {why} ({OF_VERSION_1}); for version 2 ({OF_VERSION_2}) add hybrid_shard_degree, 0 by default"
    )


def refuse_version_2(parameters: Any, what: str, script: str | Path | None = None) -> None:
    """Raise an error if parameters are of version 2, for a tool that is for version 1.

    Args:
        what: the tool, as the subject of a sentence in the singular.
        script: decides if both versions have the parameters; None if there is none.

    Raises:
        ConfigError: they are.
    """
    if are_of_version_2(parameters) or choose_version(parameters, script).is_2:
        which = "the parameters" if are_of_version_2(parameters) else f"the parameters of {script}"
        raise ConfigError(
            f"{which} are of version 2 of the library (import {OF_VERSION_2}), and {what} is for version 1: "
            "run a few steps of the script as processes of this machine instead, with smp-estimator run or instance_type='local'",
            code="SMP101",
        )


def find_imports(script: Path) -> frozenset[str]:
    """Return which of the two packages a script imports, itself or through files of its folder; none if it cannot be read."""
    found: set[str] = set()
    waiting, seen = [script], {script}
    while waiting and len(seen) < _MOST_FILES:
        for name in _read_imports(waiting.pop()):
            if f"{name}.".startswith(f"{OF_VERSION_1}."):
                found.add(OF_VERSION_1)
            if f"{name}.".startswith(f"{OF_VERSION_2}."):
                found.add(OF_VERSION_2)
            imported = set(_files_of(name, script.parent))
            waiting += sorted(imported - seen)
            seen |= imported
    return frozenset(found)


def _files_of(name: str, folder: Path) -> list[Path]:
    """Return the files of a folder that an import of ``name`` may run."""
    own = folder.joinpath(*name.split("."))
    candidates = [own.with_name(f"{own.name}.py"), own / "__init__.py"]
    return [path for path in candidates if path.is_file()]


def _read_imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports: modules, and what it takes from them, which may be modules."""
    if path.suffix != ".py":
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # the job itself reports it, with the place
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Empty for "from . import name", which runs the folder's __init__.py.
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
