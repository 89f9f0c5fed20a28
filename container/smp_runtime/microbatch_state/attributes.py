"""Module attributes that forward passes set: each microbatch has its own values, which are swapped with the microbatch.

A module may set ``self.mask = x > 0`` and read it again after a call of another stage, or in backward if activations
are recomputed. In one process the microbatches run one after the other. Here other microbatches run in between, on the
same modules, and each must find its own values. The steps that are recorded show which attributes change.

Some values are meant for the next microbatch, such as a recurrent state. The first step of a kind runs its microbatches
one after the other, and so separates them from leftovers: a microbatch reads them before it sets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_runtime.microbatch_state.attribute_watch import AttributeWatch
from smp_runtime.microbatch_state.entries import ABSENT, Entries, ModuleSlot, Taken
from smp_runtime.tensors.parameter_attributes import owner_of
from smp_runtime.tensors.torch_private import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from torch import nn

#: The holder's identity and the name there.
_Key = tuple[int, str]


@dataclass
class _Attribute:
    """An attribute that forward passes change."""

    slot: ModuleSlot  # its holder and name
    base: Taken  # its value when the step began
    returns: bool = True  # whether a microbatch leaves it as it found it
    is_carried: bool = False  # whether a microbatch reads it before it sets it
    crosses: bool = False  # whether it sets it then only after a wait

    def is_shared(self, taken: Taken) -> bool:
        """Return whether all microbatches share one value.

        Examples are a list that grows, a number that counts, and a state that is handed on.
        """
        if self.returns or self.is_carried:
            return not self.returns
        return type(taken.value) in (int, float) if taken.contents is None else taken.value is self.base.value


def weight_versions(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return what changes when a module's own parameters are written, or get other data, by name.

    Parameters that are gathered for a while get other data all the time; for them writes are counted.
    """
    versions: dict[str, tuple[int, ...]] = {}
    with DisableTorchFunctionSubclass():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner = owner_of(parameter)
            gathered = None if owner is None else owner.gathered_with(parameter)
            if gathered is not None:
                versions[name] = (id(parameter), gathered.writes)
                continue
            if type(parameter) is not torch.nn.Parameter or parameter.is_meta:
                continue
            versions[name] = (id(parameter), parameter._version, parameter.data_ptr())
    return versions


class Attributes:
    """The attributes of this stage's modules that forward passes change, and each microbatch's values of them.

    The pipeline's lock guards it. Values change only while a task has the baton.

    Args:
        in_task: whether the calling thread runs a task of the step.
    """

    def __init__(self, modules: Iterable[nn.Module], in_task: Callable[[], bool] = lambda: True) -> None:
        self._modules = list(modules)
        #: Buffers of a script's own modules that graphs may hold when they are written in place; PyTorch's modules see to theirs.
        self._held: set[_Key] = set()
        for module in self._modules:
            if type(module).__module__.startswith("torch.nn."):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    self._held.add((id(module), name))
        self._changing: dict[_Key, _Attribute] = {}
        #: All values when the step began; None if the step does not look for attributes that change.
        self._began: Entries | None = None
        self._kept: dict[int, dict[_Key, Taken]] = {}
        self._ended: set[int] = set()
        #: Whether the microbatches run one after the other, and so show which values they hand on.
        self._is_alone = False
        self._watch = AttributeWatch(self._see_read, self._see_written, in_task)
        #: By the module's identity and the name: attributes that the newest microbatch has found and not touched yet.
        self._found: dict[_Key, tuple[_Attribute, Taken]] = {}
        #: Those of them that it has read.
        self._read: list[tuple[_Attribute, Taken]] = []
        #: Buffers that a microbatch changes in more than one segment, by name; others would change them in between.
        self._interleaved: set[str] = set()
        self._buffers: dict[_Key, tuple[int, ...]] = {}
        self._weights: dict[_Key, tuple[int, ...]] = {}
        self._writes: dict[_Key, int] = {}
        self._is_forward = True
        self._present: int | None = None
        self._newest = -1

    @property
    def carries(self) -> bool:
        """Return whether a microbatch reads values that the one before it has left, so that their order counts."""
        return any(attribute.is_carried for attribute in self._changing.values())

    @property
    def crosses(self) -> bool:
        """Return whether such values are written only after a wait, so that the next microbatch must begin later."""
        if self._interleaved:
            return True
        return any(attribute.crosses for attribute in self._changing.values())

    @property
    def carried(self) -> list[str]:
        """Return the names of the attributes and buffers that one microbatch hands to the next."""
        return sorted({each.slot.key for each in self._changing.values() if each.is_carried} | self._interleaved)

    def begin(self, *, looks: bool, alone: bool) -> None:
        """Begin a step.

        Args:
            looks: whether to look for attributes that change; costs some time at the end of every segment.
            alone: whether its microbatches run one after the other.
        """
        self._kept.clear()
        self._ended.clear()
        self._present, self._newest = None, -1
        self._began = Entries(self._modules) if looks else None
        self._is_alone = looks and alone
        for attribute in self._changing.values():
            attribute.base = attribute.slot.take()
        if self._is_alone:
            self._buffers = self._buffer_versions()
            self._weights = self._weight_versions()

    def segment_ended(self) -> None:
        """Record the changes since the step began, when a task returns the baton."""
        if self._began is None:
            return
        if self._is_alone:
            self._see_buffers()
        for slot, before in self._began.slots():
            key = (id(slot.holder), slot.key)
            is_known = key in self._changing
            if not is_known and not slot.take().is_same(before):
                self._changing[key] = _Attribute(slot, before)
        for attribute, value in self._read:
            attribute.crosses |= attribute.slot.take().is_same(value)

    def switch(self, microbatch: int, *, is_forward: bool = True) -> None:
        """Swap in the values of ``microbatch``, when its task gets the baton in its forward or backward pass."""
        self._is_forward = is_forward
        begins = microbatch > self._newest
        if self._is_alone and begins:  # the one before is finished, though this stage may not know it yet
            self._settle(self._take_all())
        if self._changing and microbatch != self._present:
            self._keep()
            self._bring(microbatch)
            if self._is_alone and begins:
                self._watch_new()
        self._present = microbatch
        self._newest = max(self._newest, microbatch)

    def release(self, microbatch: int) -> None:
        """Finish a microbatch; the values that the newest one has left are kept for the next."""
        self._ended.add(microbatch)
        if microbatch == self._present == self._newest:
            self._settle(self._take_all())
        elif microbatch == self._present:
            self._see_what_returns(self._take_all())
        else:
            self._see_what_returns(self._kept.get(microbatch, {}))
        for number in self._ended:
            if number != self._newest:
                self._kept.pop(number, None)

    def end(self) -> None:
        """End the step, and leave the last microbatch's values on the modules, as in one process."""
        self._end_watch()
        self._is_alone = False
        self._began = None
        if self._changing and self._present is not None and self._newest != self._present:
            self._bring(self._newest)
        for attribute in self._changing.values():
            attribute.base = Taken(ABSENT)  # it may hold graphs
        self._kept.clear()
        self._present = None

    def _take_all(self) -> dict[_Key, Taken]:
        return {key: attribute.slot.take() for key, attribute in self._changing.items()}

    def _keep(self) -> None:
        if self._present is None:
            return
        is_newest = self._present == self._newest
        has_ended = self._present in self._ended
        if is_newest or not has_ended:
            self._kept[self._present] = self._take_all()

    def _bring(self, microbatch: int) -> None:
        """Put back the values that a microbatch has left, or that a new one finds."""
        own = self._kept.get(microbatch)
        left = self._kept.get(self._newest, {})
        for key, attribute in self._changing.items():
            taken: Taken | None
            if own is not None:
                taken = own.get(key)
            elif attribute.returns:
                taken = attribute.base
            else:
                taken = left.get(key)
            if taken is not None and not attribute.is_shared(taken):
                attribute.slot.put(taken)

    # -- what microbatches hand on ---------------------------------------------------------------------------------

    def _watch_new(self) -> None:
        """Watch which of the attributes that a new microbatch finds are read by it."""
        owners = {id(vars(module)): module for module in self._modules}
        for (holder, name), attribute in self._changing.items():
            owner = owners.get(holder)
            if owner is None or attribute.returns or attribute.is_carried:
                continue
            taken = attribute.slot.take()
            is_own = taken.value is not ABSENT and not attribute.is_shared(taken)
            if is_own:
                self._found[id(owner), name] = attribute, taken
        found_on = {owner for owner, _ in self._found}
        self._watch.begin(module for module in self._modules if id(module) in found_on)

    def _see_read(self, module: nn.Module, name: str) -> None:
        if (found := self._found.pop((id(module), name), None)) is not None:
            found[0].is_carried = True
            self._read.append(found)

    def _see_written(self, module: nn.Module, name: str) -> None:
        self._found.pop((id(module), name), None)

    def _end_watch(self) -> None:
        self._watch.end()
        self._found.clear()
        self._read.clear()
        self._writes.clear()

    def _settle(self, left: dict[_Key, Taken]) -> None:
        """Finish the newest microbatch, which has left these values on the modules."""
        self._end_watch()
        self._see_what_returns(left)

    def _see_what_returns(self, left: dict[_Key, Taken]) -> None:
        for key, taken in left.items():
            attribute = self._changing[key]
            attribute.returns = attribute.returns and taken.is_same(attribute.base)

    def _see_buffers(self) -> None:
        """Record which buffers and parameters have been written since the last segment.

        If a microbatch calls a module twice, its running statistics must get both calls before those of the next microbatch.
        """
        now = self._buffer_versions()
        if self._is_forward:
            for key in [key for key, version in now.items() if self._buffers.get(key) != version]:
                self._writes[key] = self._writes.get(key, 0) + 1
                if self._writes[key] > 1:
                    self._interleaved.add(key[1])
                # A graph may hold it, as another microbatch's would when this one writes.
                if now[key][0] == self._buffers[key][0] and key in self._held:
                    self._interleaved.add(key[1])
        self._buffers = now
        weights = self._weight_versions()
        self._interleaved.update(key[1] for key, seen in weights.items() if self._weights.get(key, seen) != seen)
        self._weights = weights

    def _weight_versions(self) -> dict[_Key, tuple[int, ...]]:
        versions: dict[_Key, tuple[int, ...]] = {}
        for module in self._modules:
            for name, seen in weight_versions(module).items():
                versions[id(module), name] = seen
        return versions

    def _buffer_versions(self) -> dict[_Key, tuple[int, ...]]:
        return {
            (id(module), name): (id(buffer), buffer._version)
            for module in self._modules
            for name, buffer in module.named_buffers(recurse=False)
        }
