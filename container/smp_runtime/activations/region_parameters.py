"""Parameters into which the forward pass of a region writes, as its second run needs them.

A module may move a parameter in its own forward pass: a teacher that follows a student, a weight that is clamped. The
second run must begin with the values that the first run began with, and its own writes must not stay. The first run of
a module copies its parameters, since an operation in place is seen only afterwards; later runs copy those that changed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.parameter_attributes import GatheredValues, get_data, owner_of, set_data

#: Most bytes of a region's parameters that its first run copies.
MOST_COPIED = 2**28

#: By module, whether a forward pass in a region was seen to change each of its parameters.
_changing: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


class _Before(NamedTuple):
    """A parameter before the first run."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    #: Its memory then; ``parameter.data = …`` leaves this tensor as it was.
    data: torch.Tensor
    version: int
    #: Its values then, if an operation in place may change them.
    copy: torch.Tensor | None


class RegionParameters:
    """The parameters of the modules that a region calls.

    Parameters on meta belong to another stage. Sharded ones are gathered inside of the region, so that nothing can be copied
    before it: a second run that would write other values than the first is refused.
    """

    def __init__(self, modules: Iterable[nn.Module], label: str) -> None:
        self._label = label
        self._seen: list[_Before] = []
        #: Those that the first run has changed, with the values that the second run begins with.
        self._written: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._gathered: dict[int, GatheredValues] = {}
        present = {place: p for place, p in _present(modules) if not self._is_gathered(p)}
        unknown = [p for (module, name), p in present.items() if name not in _changing.get(module, {})]
        copies_unknown = sum(parameter.nbytes for parameter in unknown) <= MOST_COPIED
        for (module, name), parameter in present.items():
            data = get_data(parameter)
            copies = _changing.get(module, {}).get(name, copies_unknown)
            copy = data.clone() if copies else None
            self._seen.append(_Before(module, name, parameter, data, parameter._version, copy))

    def _is_gathered(self, parameter: nn.Parameter) -> bool:
        owner = owner_of(parameter)
        values = None if owner is None else owner.gathered_with(parameter)
        if values is not None:
            self._gathered[id(values)] = values
        return values is not None

    def forward_ended(self) -> None:
        """Find the parameters that the first run has changed.

        Raises:
            SMPUserError: A parameter was changed in place, and was too large to be copied before.
        """
        for before in self._seen:
            known = _changing.setdefault(before.module, {})
            is_changed = _is_changed(before)
            known[before.name] = known.get(before.name, False) or is_changed
            if is_changed:
                self._written.append((before.parameter, self._former_values(before)))
        self._seen.clear()

    def _former_values(self, before: _Before) -> torch.Tensor:
        if before.copy is not None:
            return before.copy
        if before.parameter._version != before.version:
            raise self._refusal(f"{before.name} of {type(before.module).__name__}")
        return before.data

    def _refusal(self, what: str) -> SMPUserError:
        return SMPUserError(
            f"the checkpointed region {self._label!r} writes into {what} in its forward pass, and backward, which runs it again, "
            "would write other values; checkpoint modules that do not write into parameters, or keep such values in buffers",
            code="SMP309",
        )

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Run the block with the values of before the first run; then put the present ones back.

        Raises:
            SMPUserError: Sharded parameters have other values after it.
        """
        for values in self._gathered.values():
            values.begin_repeat()
        present = [(parameter, get_data(parameter)) for parameter, _ in self._written]
        try:
            for parameter, before in self._written:
                set_data(parameter, before.clone())
            yield
        finally:
            for parameter, data in present:
                set_data(parameter, data)
            # Here, since PyTorch ends a second run by an exception once it has what backward needs.
            differ = [values.end_repeat() for values in self._gathered.values()]
            if any(differ):
                raise self._refusal("sharded parameters")


def _present(modules: Iterable[nn.Module]) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    """Yield the parameters that have memory, each once, by their module and name."""
    seen: set[int] = set()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta:
                continue
            # Tied parameters belong to several modules.
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield (module, name), parameter


def _is_changed(before: _Before) -> bool:
    """Return whether a parameter has other memory or other values than before."""
    if get_data(before.parameter).data_ptr() != before.data.data_ptr():
        return True
    if before.parameter._version != before.version:
        return True
    # Writes through ``.data`` are not counted.
    return before.copy is not None and not torch.equal(before.copy, before.data)
