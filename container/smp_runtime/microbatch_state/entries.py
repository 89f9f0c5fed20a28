"""Data that modules keep on themselves: dictionary entries, contents of containers there, and flags of parameters.

Three modules build on this record: values of a microbatch (``attributes``), stand-ins for other stages
(``remote_stubs``), and restoring a model after it ran (``snapshot``).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

#: Entries of a module that are dictionaries of their own: their contents are taken and put back one by one.
REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
#: What PEFT switches on a layer with adapters: whether they are off, and which of them are on.
ADAPTERS_OFF, ADAPTERS_ON = "_disable_adapters", "_active_adapter"
#: All that PyTorch manages, or this library: the flag ``training`` and PEFT's travel with calls, hooks are the script's.
MANAGED = frozenset(vars(nn.Module())) | {
    "_call_impl",
    "_compiled_call_impl",
    "forward",
    "_inside",
    ADAPTERS_OFF,
    ADAPTERS_ON,
}
#: Plain containers that their owners change in place.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
#: Values that are compared by equality, since each forward pass makes them anew.
_PLAIN = (int, float, bool, complex, str, bytes, torch.dtype, torch.device)
#: Marks a slot without a value.
ABSENT = object()


class Taken(NamedTuple):
    """The value of a slot, and a copy of a plain container's contents, with the very objects that are in it."""

    value: Any
    contents: Any = None

    def is_same(self, other: Taken) -> bool:
        """Return whether a later reading of the slot has found the same value."""
        if self.value is other.value:
            return self.contents is None or _holds_same(self.contents, other.contents)
        return _is_equal(self.value, other.value)


class ModuleSlot(NamedTuple):
    """A place on a module: an entry of its ``__dict__``, its parameters or its buffers, or a flag of a parameter."""

    holder: Any
    key: str

    def take(self) -> Taken:
        """Return the present value of the slot."""
        holder, key = self
        value = holder.get(key, ABSENT) if isinstance(holder, dict) else getattr(holder, key)
        return Taken(value, value.copy() if type(value) in _CONTAINERS else None)

    def put(self, taken: Taken) -> None:
        """Put back a value that :meth:`take` has returned."""
        value, contents = taken
        if not isinstance(self.holder, dict):
            if getattr(self.holder, self.key) is not value:
                setattr(self.holder, self.key, value)
        elif value is ABSENT:
            self.holder.pop(self.key, None)
        else:
            if self.holder.get(self.key, ABSENT) is not value:
                self.holder[self.key] = value
            if contents is not None and not _holds_same(value, contents):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(contents)


class Entries:
    """A record of the data that some modules keep on themselves, at the time of its creation.

    Args:
        modules: modules to record, with their parameters.
        buffers: whether to record their registered buffers.
        apart: names of entries that are left out.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = False, apart: frozenset[str] = MANAGED) -> None:
        modules = list(modules)
        registries = [m._parameters for m in modules] + [m._buffers for m in modules if buffers]
        flagged = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        self._apart = apart
        #: A registry of TorchScript is no dictionary, and cannot get or lose anything.
        holders = [*map(vars, modules), *(each for each in registries if isinstance(each, dict)), *flagged.values()]
        self._before: list[tuple[Any, dict[str, Taken]]] = [
            (holder, {key: ModuleSlot(holder, key).take() for key in self._keys(holder)}) for holder in holders
        ]

    def slots(self) -> Iterator[tuple[ModuleSlot, Taken]]:
        """Yield all slots that had a value or have one now, each with its former value."""
        for holder, before in self._before:
            for key in dict.fromkeys((*self._keys(holder), *before)):
                yield ModuleSlot(holder, key), before.get(key, Taken(ABSENT))

    def put_back(self) -> None:
        """Restore all entries, in their former order."""
        for holder, before in self._before:
            if isinstance(holder, dict) and self._keys(holder) != list(before):
                left_out = {key: value for key, value in holder.items() if key in self._apart}
                holder.clear()
                holder.update(left_out)
            for key, taken in before.items():
                ModuleSlot(holder, key).put(taken)

    def _keys(self, holder: Any) -> list[str]:
        if not isinstance(holder, dict):
            return ["requires_grad"]
        return [key for key in holder if key not in self._apart]


def _holds_same(value: Any, contents: Any) -> bool:
    """Return whether two containers of one kind hold identical objects in the same places."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in contents.items())
    if isinstance(value, set):
        return all(item in value for item in contents)
    return all(one is other for one, other in zip(value, contents, strict=True))


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
    return isinstance(one, _PLAIN) and bool(one == other)
