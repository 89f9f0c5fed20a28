"""The packages of this project's extras, for messages that name what to install."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

_DISTRIBUTION = "smp-estimator"


def install_command(extra: str) -> str:
    """Return the pip command that installs the packages of an extra, such as ``"plots"``.

    It names the packages themselves, since no package index has this project. If this project is not installed by pip,
    as in a stock image, the command names the extra.
    """
    try:
        lines = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    packages = []
    for line in lines:
        if _extra_of(line) == extra:
            packages.append(line.partition(";")[0].strip())
    if not packages:
        packages = [f"{_DISTRIBUTION}[{extra}]"]
    return "pip install " + shlex.join(packages)


def _extra_of(requirement: str) -> str:
    """Return the extra that a requirement belongs to, or an empty string."""
    found = re.search(r"""\bextra\s*==\s*["']([^"']+)["']""", requirement.partition(";")[2])
    return found[1] if found else ""
