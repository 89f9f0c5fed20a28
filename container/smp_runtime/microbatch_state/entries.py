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
            return
        if value is ABSENT:
            self.holder.pop(self.key, None)
            return
        if self.holder.get(self.key, ABSENT) is not value:
            self.holder[self.key] = value
        if contents is not None and not _holds_same(value, contents):
            _refill(value, contents)


class Entries:
    """A record of the data that some modules keep on themselves, at the time of its creation.

    Args:
        modules: modules to record, with their parameters.
        buffers: whether to record their registered buffers.
        apart: names of entries that are left out.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = False, apart: frozenset[str] = MANAGED) -> None:
        self._apart = apart
        self._before: list[tuple[Any, dict[str, Taken]]] = []
        for holder in _holders(list(modules), buffers=buffers):
            entries = {key: ModuleSlot(holder, key).take() for key in self._keys(holder)}
            self._before.append((holder, entries))

    def slots(self) -> Iterator[tuple[ModuleSlot, Taken]]:
        """Yield all slots that had a value or have one now, each with its former value."""
        for holder, before in self._before:
            for key in dict.fromkeys((*self._keys(holder), *before)):
                yield ModuleSlot(holder, key), before.get(key, Taken(ABSENT))

    def put_back(self) -> None:
        """Restore all entries, in their former order."""
        for holder, before in self._before:
            # A dictionary keeps the order in which its entries came, so they are put into it anew.
            if self._keys(holder) != list(before):
                self._remove_entries(holder)
            for key, taken in before.items():
                ModuleSlot(holder, key).put(taken)

    def _remove_entries(self, holder: dict[str, Any]) -> None:
        left_out = {key: value for key, value in holder.items() if key in self._apart}
        holder.clear()
        holder.update(left_out)

    def _keys(self, holder: Any) -> list[str]:
        if not isinstance(holder, dict):
            return ["requires_grad"]
        return [key for key in holder if key not in self._apart]


def _holders(modules: list[nn.Module], *, buffers: bool) -> list[Any]:
    """Return the dictionaries of attributes, the registries and the parameters of some modules."""
    registries: list[Any] = [module._parameters for module in modules]
    if buffers:
        registries += [module._buffers for module in modules]
    # A registry of TorchScript is no dictionary, and cannot get or lose anything.
    registries = [each for each in registries if isinstance(each, dict)]
    parameters: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters[id(parameter)] = parameter
    return [*map(vars, modules), *registries, *parameters.values()]


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(contents)
    else:
        container.update(contents)


def _holds_same(value: Any, contents: Any) -> bool:
    """Return whether two containers of one kind hold identical objects in the same places."""
    if len(value) != len(contents):
        return False
    # By identity: to compare tensors would read their elements.
    if isinstance(value, dict):
        return all(value.get(key, ABSENT) is item for key, item in contents.items())
    if isinstance(value, set):
        return value.issuperset(contents)
    pairs = zip(value, contents, strict=True)
    return all(one is other for one, other in pairs)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return _are_equal(one, other)
    if not isinstance(one, _PLAIN):
        return False
    return bool(one == other)


def _are_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if len(one) != len(other):
        return False
    return all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
