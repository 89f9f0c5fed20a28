"""Calls a function when a module of another library has been loaded: at once, or as soon as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Act = Callable[[ModuleType], None]

#: By the name of a module that is not loaded yet, what to call then.
_waiting: dict[str, list[Act]] = {}


def when_imported(name: str, act: Act) -> None:
    """Call ``act(module)`` once module ``name`` is loaded.

    At once if it is; if it is being loaded now (it may be what imports this library), when something first looks into it
    afterwards; else at the end of its loading, which this does not start.
    """
    module = sys.modules.get(name)
    if module is None:
        _waiting.setdefault(name, []).append(act)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
    elif _is_loading(module):
        _when_looked_into(module, act)
    else:
        act(module)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds nothing itself: it has the loader of a module that is waited for call what waits."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for a module with waiting calls, or None."""
        if fullname not in _waiting:
            return None
        spec = None
        for finder in sys.meta_path:
            if spec is None and finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, load = spec.loader, spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            del loader.exec_module  # the instance's; its class's is there again
            load(module)
            for act in _waiting.pop(fullname, ()):
                act(module)
            if not _waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        # The loader stays its own object: inspect and others ask it for the source.
        loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def _when_looked_into(module: ModuleType, act: Act) -> None:
    """Call ``act`` when an attribute of ``module`` is read after its loading, as ``from … import`` does."""
    kind = type(module)

    class LoadingModule(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> object:
            if type(self) is LoadingModule and not _is_loading_as(kind, self):
                self.__class__ = kind  # type: ignore[assignment]
                act(self)
            return kind.__getattribute__(self, name)

    module.__class__ = LoadingModule


def _is_loading_as(kind: type[ModuleType], module: ModuleType) -> bool:
    """Return whether a module is being loaded, without triggering the hook on its attributes."""
    return bool(getattr(kind.__getattribute__(module, "__spec__"), "_initializing", False))
