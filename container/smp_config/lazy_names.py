"""Names of a package that are imported when they are first used, so that importing the package itself takes little (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with names that are imported at their first use.

    ``from package import name``, ``help(package)`` and completion find the names as if they were there; type checkers
    read imports under ``if TYPE_CHECKING``. After its first use, a name is an ordinary attribute.

    Args:
        package: its ``__name__``.
        homes: by module, the names that it has; those of ``package`` itself are its submodules.
    """
    found = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = found[name]
        if home == package:
            value: Any = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *found})

    return load, listed
