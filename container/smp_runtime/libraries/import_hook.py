"""Calls back when a module has been imported, so that a library is changed only in scripts that use it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` once the module of that name has been imported; at once if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        act(module)
        return
    finder = next((found for found in sys.meta_path if isinstance(found, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    finder.acts.setdefault(name, []).append(act)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find a module, and calls back after their loader has run it.

    Attributes:
        acts: what waits, by the name of the module.
    """

    def __init__(self) -> None:
        self.acts: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that somebody waits for."""
        acts = self.acts.pop(fullname, None)
        if acts is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.acts[fullname] = acts
            return spec
        execute = spec.loader.exec_module

        def then_act(module: ModuleType) -> None:
            execute(module)
            for act in acts:
                act(module)

        spec.loader.exec_module = then_act  # type: ignore[method-assign]
        return spec
