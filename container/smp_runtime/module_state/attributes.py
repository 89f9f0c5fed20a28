"""What forward passes leave on modules belongs to their microbatch, and changes with the microbatch that runs.

A module may say ``self.mask = x > 0`` and read it again after a call of another stage, or in backward where activations
are computed again. In one process the microbatches run one after the other; here others run in between, on the same
modules, and each must find what it has left itself. Which attributes change is seen in steps that are recorded.

Some values are meant for the next microbatch, as a recurrent state is. The first step of a kind, whose microbatches run
one after the other, tells them from mere leftovers: what a microbatch leaves is hidden from the next until it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from smp_runtime.module_state.containers import contents_of, holds_same, refill

#: Entries of a module that PyTorch manages, or the tasks themselves. Buffers are state of the model, not of a microbatch.
_MANAGED = frozenset(vars(nn.Module())) | {"_call_impl", "_compiled_call_impl", "forward"}
#: Values that are compared by equality, since each forward pass makes them anew.
_PLAIN = (int, float, bool, complex, str, bytes, torch.dtype, torch.device)
_ABSENT = object()
_get_attribute = nn.Module.__getattr__


class Slot(NamedTuple):
    """A place on a module: an entry of its ``__dict__`` or of its parameters, or a flag of a parameter."""

    holder: Any
    key: str

    def take(self) -> Taken:
        """What is there now."""
        holder, key = self
        value = holder.get(key, _ABSENT) if isinstance(holder, dict) else getattr(holder, key)
        return Taken(value, contents_of(value))

    def put(self, taken: Taken) -> None:
        """Put back what :meth:`take` gave."""
        value, contents = taken
        if not isinstance(self.holder, dict):
            if getattr(self.holder, self.key) is not value:
                setattr(self.holder, self.key, value)
            return
        if value is _ABSENT:
            self.holder.pop(self.key, None)
            return
        self.holder[self.key] = value
        if contents is not None:
            refill(value, contents)


class Taken(NamedTuple):
    """The value of a slot, and a copy of a container's contents."""

    value: Any
    contents: Any

    def is_same(self, other: Taken) -> bool:
        if self.value is other.value:
            return self.contents is None or holds_same(self.contents, other.contents)
        return _is_equal(self.value, other.value)


class Attributes:
    """The slots of this stage's modules that forward passes change, and what each microbatch has left there.

    Guarded by the pipeline's lock; values change only in the hands of the task that has the baton.

    Args:
        modules: those of this stage.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        #: Those that change, by holder and key; whether a microbatch leaves them as it found them.
        self._slots: dict[tuple[int, str], Slot] = {}
        self._returns: dict[tuple[int, str], bool] = {}
        self._looks = False
        self._holders: list[tuple[Any, dict[str, Taken]]] = []
        self._base: dict[tuple[int, str], Taken] = {}
        self._kept: dict[int, dict[tuple[int, str], Taken]] = {}
        self._ended: set[int] = set()
        #: Those that a microbatch reads before it writes them, and those among them that it writes only after a wait.
        self._carried: set[tuple[int, str]] = set()
        self._crossing: set[tuple[int, str]] = set()
        self._hides = False
        self._hidden: dict[tuple[int, str], tuple[Slot, Taken]] = {}
        self._read: dict[tuple[int, str], Taken] = {}
        #: Buffers that a microbatch changes in more than one segment, by name; others would change them in between.
        self._interleaved: set[str] = set()
        self._buffers: dict[tuple[int, str], tuple[int, int]] = {}
        self._writes: dict[tuple[int, str], int] = {}
        self._is_forward = True
        self._present: int | None = None
        self._newest = -1

    @property
    def carries(self) -> bool:
        """Whether a microbatch reads what the one before it has left, so that their order counts."""
        return bool(self._carried)

    @property
    def crosses(self) -> bool:
        """Whether that is written only after a wait, so that the next microbatch must not begin before."""
        return bool(self._crossing or self._interleaved)

    @property
    def carried(self) -> list[str]:
        """The names of the attributes and buffers that one microbatch hands to the next."""
        return sorted({self._slots[name].key for name in self._carried} | self._interleaved)

    def begin(self, *, looks: bool, alone: bool) -> None:
        """A step begins.

        Args:
            looks: whether to look for attributes that change; costs some time at the end of every segment.
            alone: whether its microbatches run one after the other.
        """
        self._kept.clear()
        self._ended.clear()
        self._present, self._newest = None, -1
        self._looks = looks
        if looks:
            self._holders = [(holder, _taken(holder)) for holder in _holders(self._modules)]
        self._base = {name: slot.take() for name, slot in self._slots.items()}
        if looks and alone:
            self._watch_reads()
            self._buffers = self._buffer_versions()
            self._writes.clear()

    def segment_ended(self) -> None:
        """A task gives the baton back: see what has changed since the step began."""
        if not self._looks:
            return
        if self._hides:
            self._see_buffers(counts=self._is_forward)
        for holder, before in self._holders:
            for key in _keys(holder) | before.keys():
                name = (id(holder), key)
                if name in self._slots:
                    continue
                slot = Slot(holder, key)
                was = before.get(key, Taken(_ABSENT, None))
                if not slot.take().is_same(was):
                    self._slots[name], self._returns[name], self._base[name] = slot, True, was
        self._crossing |= {name for name, value in self._read.items() if self._slots[name].take().is_same(value)}

    def switch(self, microbatch: int, *, is_forward: bool = True) -> None:
        """A task of ``microbatch`` gets the baton, in its forward or backward pass."""
        self._is_forward = is_forward
        begins = microbatch > self._newest
        if self._hides and begins:
            self._settle()  # the one before is finished, though this stage may not have heard of it
        if self._slots and microbatch != self._present:
            self._keep()
            self._bring(microbatch)
            if self._hides and begins:
                self._hide()
        self._present = microbatch
        self._newest = max(self._newest, microbatch)

    def release(self, microbatch: int) -> None:
        """A microbatch is finished; what the newest one has left is kept for the next."""
        self._ended.add(microbatch)
        if microbatch == self._present == self._newest:
            self._settle()
        elif microbatch == self._present:
            self._see_what_returns(self._take_all())
        elif microbatch in self._kept:
            self._see_what_returns(self._kept[microbatch])
        for number in self._ended:
            if number != self._newest:
                self._kept.pop(number, None)

    def end(self) -> None:
        """The step is over: modules have what the last microbatch has left, as in one process."""
        self._show()
        if self._hides:
            self._hides = False
            nn.Module.__getattr__ = _get_attribute  # type: ignore[method-assign]
        if self._slots and self._present is not None and self._newest != self._present:
            self._bring(self._newest)
        self._kept.clear()
        self._base.clear()
        self._holders = []
        self._present = None

    def _take_all(self) -> dict[tuple[int, str], Taken]:
        return {name: slot.take() for name, slot in self._slots.items()}

    def _keep(self) -> None:
        if self._present is not None and (self._present not in self._ended or self._present == self._newest):
            self._kept[self._present] = self._take_all()

    def _bring(self, microbatch: int) -> None:
        """Put back what a microbatch has left, or what a new one finds."""
        own = self._kept.get(microbatch)
        left = self._kept.get(self._newest, {})
        for name, slot in self._slots.items():
            base = self._base[name]
            found = base if self._returns[name] else left.get(name)
            taken = found if own is None else own.get(name)
            if taken is not None and not self._is_shared(name, base, taken):
                slot.put(taken)

    def _is_shared(self, name: tuple[int, str], base: Taken, taken: Taken) -> bool:
        """Whether all microbatches have one: a list that grows, a number that counts, a state that is handed on."""
        if self._returns[name]:
            return False
        if name in self._carried:
            return True
        if taken.contents is not None:
            return taken.value is base.value
        return type(taken.value) in (int, float)

    def _see_buffers(self, *, counts: bool) -> None:
        """Running statistics of a module that a microbatch calls twice get both calls before those of the next one."""
        now = self._buffer_versions()
        if counts:
            for name in [name for name, version in now.items() if self._buffers.get(name) != version]:
                self._writes[name] = self._writes.get(name, 0) + 1
                if self._writes[name] > 1:
                    self._interleaved.add(name[1])
        self._buffers = now

    def _buffer_versions(self) -> dict[tuple[int, str], tuple[int, int]]:
        return {
            (id(module), name): (id(buffer), buffer._version)
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False)
        }

    def _watch_reads(self) -> None:
        hidden, read = self._hidden, self._read

        def look_up(module: nn.Module, name: str) -> Any:
            key = (id(vars(module)), name)
            if (found := hidden.pop(key, None)) is None:
                return _get_attribute(module, name)
            slot, taken = found
            slot.put(taken)
            self._carried.add(key)
            read[key] = taken
            return taken.value

        self._hides = True
        nn.Module.__getattr__ = look_up  # type: ignore[method-assign]

    def _hide(self) -> None:
        """A new microbatch begins: what it finds goes out of sight until it asks for it."""
        shown = {id(vars(module)): module for module in self._modules}
        for name, slot in self._slots.items():
            module = shown.get(name[0])
            if self._returns[name] or module is None or name in self._carried:
                continue
            taken = slot.take()
            if self._is_shared(name, self._base[name], taken):
                continue
            own = {key for kind in type(module).__mro__ if kind is not nn.Module for key in vars(kind)}
            if "__getattr__" in own or slot.key in own:
                self._carried.add(name)  # looked up in another way, so it may well be read
                self._crossing.add(name)
            elif taken.value is not _ABSENT:
                self._hidden[name] = (slot, taken)
                slot.put(Taken(_ABSENT, None))

    def _show(self) -> None:
        """What nobody has asked for comes back, unless something else is there by now."""
        for slot, taken in self._hidden.values():
            if slot.take().value is _ABSENT:
                slot.put(taken)
        self._hidden.clear()
        self._read.clear()

    def _settle(self) -> None:
        """The newest microbatch is finished, and its values are on the modules."""
        self._show()
        self._writes.clear()
        self._see_what_returns(self._take_all())

    def _see_what_returns(self, left: dict[tuple[int, str], Taken]) -> None:
        for name, taken in left.items():
            if not taken.is_same(self._base[name]):
                self._returns[name] = False


def _holders(modules: Sequence[nn.Module]) -> list[Any]:
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    bare = [m._parameters for m in modules if isinstance(m._parameters, dict)]  # not those of TorchScript
    return [*(vars(module) for module in modules), *bare, *parameters.values()]


def _keys(holder: Any) -> set[str]:
    if not isinstance(holder, dict):
        return {"requires_grad"}
    return holder.keys() - _MANAGED


def _taken(holder: Any) -> dict[str, Taken]:
    return {key: Slot(holder, key).take() for key in _keys(holder)}


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(_is_equal(a, b) for a, b in zip(one, other, strict=True))
    return isinstance(one, _PLAIN) and bool(one == other)
