"""Observation of reads and writes of attributes on some modules, which PyTorch has no hook for.

While watched, these modules have special subclasses of their own classes that report each access. No other module, and
no class of the script or of PyTorch, is changed. Threads that are not watched see the modules as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_set_class = object.__dict__["__class__"].__set__


class AttributeWatch:
    """Watches modules between :meth:`begin` and :meth:`end`.

    Args:
        read: called with a module and a name before that is looked up.
        written: the same before it is set.
        is_watched: whether the calling thread is.
    """

    def __init__(
        self,
        read: Callable[[nn.Module, str], object],
        written: Callable[[nn.Module, str], object],
        is_watched: Callable[[], bool],
    ) -> None:
        self._read = read
        self._written = written
        self._is_watched = is_watched
        self._classes: list[tuple[nn.Module, type]] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Watch these modules too."""
        watched: dict[type, type] = {}
        for module in modules:
            kind = type(module)
            if not issubclass(kind, _Watched):
                self._classes.append((module, kind))
                _set_class(module, watched.get(kind) or watched.setdefault(kind, self._class_of(kind)))

    def end(self) -> None:
        """Give the modules their own classes back."""
        for module, kind in self._classes:
            _set_class(module, kind)
        self._classes.clear()

    def __enter__(self) -> AttributeWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def _class_of(self, kind: Any) -> type:
        def read(module: nn.Module, name: str) -> Any:
            if self._is_watched():
                self._read(module, name)
            return kind.__getattribute__(module, name)

        def write(module: nn.Module, name: str, value: Any) -> None:
            if self._is_watched():
                self._written(module, name)
            kind.__setattr__(module, name, value)

        def reduce(module: nn.Module, protocol: Any) -> Any:
            make, arguments, *state = kind.__reduce_ex__(module, protocol)
            watched = type(module)  # copies are not
            return make, tuple(kind if each is watched else each for each in arguments), *state

        entries = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        entries |= {"__getattribute__": read, "__setattr__": write, "__reduce_ex__": reduce}
        # Returns the script's class, which super(self.__class__, self) needs.
        entries["__class__"] = property(lambda module: kind)
        # Past a metaclass, which may keep a list of its classes.
        return type.__new__(type(kind), kind.__name__, (_Watched, kind), entries)


class _Watched:
    """Marks the classes of watched modules."""

    def __init_subclass__(cls) -> None:
        """Do nothing: the hooks of the script's classes for their subclasses are not meant for these."""
