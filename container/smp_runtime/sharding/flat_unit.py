"""Flat units: parameters in one flat buffer; each rank of a group owns an equal shard."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from smp_runtime.errors import SMPUserError
from smp_runtime.sharding.detached_parameters import show_attached, show_detached
from smp_runtime.tensors.host_memory.snapshot import wait_for_copies
from smp_runtime.tensors.parameter_attributes import get_data, set_data
from smp_runtime.tensors.torch_private import storage_key

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Work
    from smp_runtime.sharding.all_gather import Gathering

#: Elements to which shards are rounded up, so that vector instructions and GPU loads stay aligned.
ALIGNMENT = 8


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that lies in one shard.

    Attributes:
        index: of the parameter in the unit's list.
        start: first element, counted in the flattened parameter.
        stop: behind the last one.
        offset: where it begins, counted in the shard.
    """

    index: int
    start: int
    stop: int
    offset: int


class FlatUnit:
    """Parameters one after the other in a flat buffer, ``[shards * shard_elements]``.

    Shards have equal length; the last ones end with padding, less than ``shards * ALIGNMENT`` elements in all.

    Args:
        parameters: all trained or all frozen.
        dtype: in which they are stored and computed with.
        position: number of this rank's shard.

    Attributes:
        shard: this rank's part, ``[shard_elements]``.
        filled: elements without the padding.
        fragments: the part of each parameter that lies in this rank's shard, or None.
    """

    shard: torch.Tensor

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, shards: int, position: int, device: torch.device
    ) -> None:
        self.parameters = list(parameters)
        self.dtype = dtype
        self.device = device
        self.trained = parameters[0].requires_grad
        self.shards = shards
        self.position = position
        self.shapes = [parameter.shape for parameter in parameters]
        self.offsets: list[int] = []
        self.filled = 0
        for shape in self.shapes:
            self.offsets.append(self.filled)
            self.filled += shape.numel()
        per_rank = -(-self.filled // shards)
        self.shard_elements = -(-per_rank // ALIGNMENT) * ALIGNMENT
        self.fragments = [self.fragment_at(index, position) for index in range(len(self.parameters))]

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a buffer of this unit's layout."""
        return flat[self.position * self.shard_elements : (self.position + 1) * self.shard_elements]

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the parameters' shapes in a buffer of this unit's layout."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def fragment_at(self, index: int, position: int) -> Fragment | None:
        """Return the part of a parameter that lies in the shard of that number, or None."""
        begin = position * self.shard_elements
        offset, length = self.offsets[index], self.shapes[index].numel()
        start, stop = max(begin, offset), min(begin + self.shard_elements, offset + length)
        return Fragment(index, start - offset, stop - offset, start - begin) if start < stop else None

    def slice_of(self, flat_shard: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        """Return a fragment's elements in a buffer of the shard's layout, shaped like the parameter if it is whole."""
        part = flat_shard[fragment.offset : fragment.offset + fragment.stop - fragment.start]
        shape = self.shapes[fragment.index]
        return part.view(shape) if part.numel() == shape.numel() else part

    @torch.no_grad()
    def take(self, index: int, value: torch.Tensor) -> None:
        """Keep this rank's part of one parameter's whole value."""
        fragment = self.fragments[index]
        if fragment is not None:
            wait_for_copies()
            part = value.detach().reshape(-1)[fragment.start : fragment.stop]
            self.shard[fragment.offset : fragment.offset + part.numel()].copy_(part)


class WholeUnit(FlatUnit):
    """A flat unit that is whole on every rank: its parameters are views of ``data``, and so is the shard."""

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], shards: int, position: int) -> None:
        super().__init__(parameters, parameters[0].dtype, shards, position, parameters[0].device)
        self.data = torch.zeros(shards * self.shard_elements, dtype=self.dtype, device=self.device)
        self.shard = self.part_of(self.data)
        for parameter, view in zip(self.parameters, self.views_of(self.data), strict=True):
            view.copy_(parameter)
            set_data(parameter, view)


@dataclass(eq=False)
class UnitUse:
    """One call of a module that needs a unit, from its forward to its backward.

    Attributes:
        saved: whether autograd keeps a view of the unit's parameters for backward; None if saved tensors were not
            watched, or if backward may read the parameters without a saved view.
        watched: whether saved tensors are watched.
        inputs: input tensors with gradients still to come; 0 once backward has passed.
        began: whether backward has reached the call.
        saves_before: the count of the unit's saves when the call began.
        start: when the call began, in ticks.
        end: when it ended.
        is_inner: whether it ran inside another call that needs the unit.
    """

    saved: bool | None = None
    watched: bool = False
    inputs: int = 0
    began: bool = False
    saves_before: int = 0
    start: int = 0
    end: int = 0
    is_inner: bool = False


class RoundingGather(Protocol):
    """Gathers a unit's parameters in fewer bits than they are kept in."""

    def may_round(self) -> bool:
        """Return whether gathers may be rounded by now; the same on all ranks."""
        ...

    def start(self, gathering: Gathering, full: torch.Tensor) -> Work:
        """Begin to fill the unit's whole."""
        ...


class SavedTensor:
    """A tensor that autograd keeps for backward, and the version that backward needs.

    PyTorch compares versions itself, except of tensors that go through saved-tensor hooks.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = _version_of(tensor)

    def unpack(self, need: Callable[[ShardedUnit], None] | None) -> torch.Tensor:
        """Return the tensor for backward.

        Raises:
            SMPUserError: it was written into since it was saved.
        """
        if self._version != _version_of(self.tensor):
            raise SMPUserError(
                f"a tensor of the shape {list(self.tensor.shape)} was modified by an in-place operation: autograd saved it at "
                f"version {self._version}, and it is at version {self.tensor._version}; use an operation that returns another, or "
                "run backward first",
                code="SMP308",
            )
        return self.tensor


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class SavedView:
    """A view of a unit's whole that autograd keeps for backward; valid whenever the unit is gathered.

    Args:
        unit: of the view.
        tensor: the view.

    Attributes:
        unit: None once the tensor is a copy.
        index: of the parameter that it is a view of.
        tensor: the view, or the copy.
    """

    def __init__(self, unit: ShardedUnit, tensor: torch.Tensor) -> None:
        self.unit: ShardedUnit | None = unit
        self.index = bisect.bisect_right(unit.offsets, tensor.storage_offset()) - 1
        self.tensor = tensor
        self._version = unit.parameters[self.index]._version
        self._lost = ""
        unit.saved.add(self)

    def keep(self) -> None:
        """Copy the tensor, since the parameter gets another value. The unit is gathered."""
        if self.unit is None or self.is_overwritten:
            return
        # The saved tensor shares memory with the unit, which is about to be written into.
        with torch.no_grad():
            self.tensor = self.tensor.clone()
        self.unit = None

    def lose(self, how: str) -> None:
        """Record how the parameter got another value while no rank had the whole of the former one."""
        self._lost = how

    @property
    def is_overwritten(self) -> bool:
        """Return whether the value is no longer the one that was saved. The unit is gathered."""
        return self.unit is not None and (
            bool(self._lost) or self._version != self.unit.parameters[self.index]._version
        )

    def unpack(self, need: Callable[[ShardedUnit], None] | None) -> torch.Tensor:
        """Return the tensor for backward.

        Args:
            need: gathers the unit; None if the model has been freed.

        Raises:
            SMPUserError: the parameter has another value than the one that was saved.
        """
        unit = self.unit
        if unit is None:
            return self.tensor
        if need is not None and not unit.ready:
            need(unit)
        if not self.is_overwritten:
            return self.tensor
        name = unit.names[self.index] if unit.names else f"a parameter of {unit.name or 'the model'}"
        raise SMPUserError(
            f"backward needs the value that the sharded parameter {name} had in forward, but {self._lost or 'it was written into'} "
            "since: each rank has only its shard of the parameter, so the former value is lost; change parameters before forward "
            "or after backward, or run forward again",
            code="SMP308",
        )


class ShardedUnit(FlatUnit):
    """A flat unit that each rank keeps only its shard of; all ranks have the whole while it is used.

    The whole's storage is empty while the unit is not gathered. Tensors that autograd has saved are views of it, so they
    are valid again when the unit is gathered again. Meanwhile the parameters show a placeholder of their shape that is
    full of NaN. Reading it is harmless, the NaN reveal the mistake, and it takes no memory.

    Args:
        name: of the module, for messages.
        module: the module with a call that uses all parameters, or None.
        parameters: see :class:`FlatUnit`, as for the rest.
        by_tokens: whether a call may need it on some ranks only; then the calls alone determine the order of gathers.
        names: of the parameters, for messages.

    Attributes:
        full: the buffer of the whole; only to be read and written while its storage is there.
        work: the gather under way, or None.
        ready: whether the parameters hold their values.
        calls: module calls that are running and use the unit.
        open_uses: calls between the beginning and the end of their backward.
        quiet: backward has passed the calls, but not all gradients have come.
        saves: how often autograd has saved a view of the parameters.
        saved: the views that autograd still keeps, of the values that the unit has now.
        forward_uses: calls since backward has last passed all of them.
        called: when the unit was first called in this window, in ticks; 0 if it was not.
        uses_per_pass: calls that the last backward pass over the unit reached; 0 before the first one.
        is_filled: whether the parameters hold this rank's part only, for a script that reads or writes them.
        is_touched: whether the script may have written into the parameters without a change of any counter.
        was_written: whether it has, so that float32 copies must follow.
        writes: how many times values were written into the parameters, except through a tensor that ``data`` returned.
        rounding: gathers the unit in 8 bits; None for a unit that is always gathered as it is.
        is_rounded: whether the last gather was in 8 bits.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module | None,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        shards: int,
        position: int,
        device: torch.device,
        *,
        by_tokens: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(parameters, dtype, shards, position, device)
        self.name, self.names = name, names
        self.module = module
        self.shard = torch.zeros(self.shard_elements, dtype=dtype, device=self.device)
        self.full = torch.empty(shards * self.shard_elements, dtype=dtype, device=self.device)
        self._nbytes = self.full.untyped_storage().nbytes()
        self._views = self.views_of(self.full)
        self._part = self.part_of(self.full)
        self.full.untyped_storage().resize_(0)
        nothing = torch.full((), float("nan"), dtype=dtype, device=self.device)
        self._placeholders = [nothing.expand(shape) for shape in self.shapes]
        self.by_tokens = by_tokens
        self.work: Work | None = None
        self.ready = False
        self.calls = 0
        self.open_uses: set[UnitUse] = set()
        self.quiet = False
        self.saves = 0
        self.saved: weakref.WeakSet[SavedView] = weakref.WeakSet()
        self.forward_uses = 0
        self.called = 0
        self.uses_per_pass = 0
        self.is_filled = False
        self.is_touched = False
        self.was_written = False
        self.writes = 0
        self._is_repeating = self._has_other_values = False
        self.rounding: RoundingGather | None = None
        self.is_rounded = False
        self._versions: list[int] = []

    @property
    def storage_key(self) -> int:
        """Return the key of the whole's storage; it is stable for as long as the unit lives."""
        return storage_key(self.full)

    @property
    def is_idle(self) -> bool:
        """Return whether no running call or backward needs the parameters."""
        return self.calls == 0 and not self.open_uses

    def forget_uses(self) -> None:
        """Reset the uses, since backward has passed all calls that use the unit."""
        self.open_uses.clear()
        self.quiet = False
        self.forward_uses = 0

    def allocate(self) -> torch.Tensor:
        """Allocate the storage of the whole and return it, uninitialized."""
        self.full.untyped_storage().resize_(self._nbytes)
        return self.full

    def attach(self) -> None:
        """Let the parameters be views of the whole."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            show_attached(parameter)
            set_data(parameter, view)
        self.ready = True
        self.note_values()

    def reshard(self) -> None:
        """Keep this rank's part of values written into the whole, and free it; the parameters show the placeholder."""
        self.keep_written()
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            set_data(parameter, placeholder)
            show_detached(parameter)
        self.full.untyped_storage().resize_(0)
        self.ready = self.is_filled = False

    @torch.no_grad()
    def fill_from_shard(self) -> None:
        """Allocate and attach without a collective: this rank's shard is valid, the rest is NaN."""
        self.allocate().fill_(float("nan"))
        self._part.copy_(self.shard)
        self.attach()
        self.is_filled = True

    @torch.no_grad()
    def keep_shard(self) -> None:
        """Copy this rank's shard from the whole, after a write into the parameters."""
        if self._is_repeating and not torch.equal(self.shard, self._part):
            self._has_other_values = True
        wait_for_copies()
        self.shard.copy_(self._part)

    def note_values(self) -> None:
        """Record the parameters' current values as known."""
        self._versions = [parameter._version for parameter in self.parameters]
        self.is_touched = False

    def keep_written(self) -> None:
        """Keep this rank's part of values written into the parameters since they were attached, if any."""
        if self._find_writes():
            self.keep_shard()
            self.was_written = True
            self.note_values()

    def begin_repeat(self) -> None:
        """Begin a repetition of a forward pass; from now on written values are compared with the shard."""
        self.keep_written()
        self._is_repeating, self._has_other_values = True, False

    def end_repeat(self) -> bool:
        """Return whether the repetition has written other values into this rank's part."""
        self.keep_written()
        self._is_repeating = False
        return self._has_other_values

    def _find_writes(self) -> bool:
        """Count writes into the parameters; return whether there may be any that the shard lacks."""
        if not self.ready:
            return False
        self._take_assigned()
        is_counted = self._versions != [parameter._version for parameter in self.parameters]
        self.writes += is_counted
        return self.is_touched or is_counted

    @torch.no_grad()
    def _take_assigned(self) -> None:
        """Copy values of parameters that show other memory than the whole: compiled code sets ``data`` past its owner."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            data = get_data(parameter)
            if data.data_ptr() != view.data_ptr():
                self._keep_saved(index)
                view.copy_(data)
                set_data(parameter, view)
                self.is_touched = True
                self.writes += 1

    def assign(self, index: int, value: torch.Tensor) -> None:
        """Write one parameter's whole value into the gathered unit, or else into this rank's shard."""
        self._keep_saved(index)
        if self.ready:
            with torch.no_grad():
                self._views[index].copy_(value)
            self.is_touched = True
            self.writes += 1
        else:
            self.take(index, value)

    def _keep_saved(self, index: int) -> None:
        """Copy what graphs of earlier calls have saved of a parameter, before ``parameter.data = value``.

        In one process they keep the former memory of the parameter. Here that is impossible unless the unit is gathered.
        """
        if not self.ready or self.is_filled:
            self.lose_saved(index, "data was assigned")
            return
        for saved in self._saved_of(index):
            saved.keep()
            self.saved.discard(saved)

    def lose_saved(self, index: int, how: str) -> None:
        """Let backward raise an error if it needs the value that graphs have saved of a parameter."""
        for saved in self._saved_of(index):
            saved.lose(how)
            self.saved.discard(saved)

    def _saved_of(self, index: int) -> list[SavedView]:
        return [saved for saved in self.saved if saved.index == index]

    def mark_parameters(self) -> None:
        """Let scripts read where a parameter's elements are, see :func:`mark_parameter`."""
        for parameter, shape, fragment in zip(self.parameters, self.shapes, self.fragments, strict=True):
            part = self.shard[:0] if fragment is None else self.slice_of(self.shard, fragment).view(-1)
            mark_parameter(parameter, shape, part)


def mark_parameter(parameter: nn.Parameter, shape: torch.Size, part: torch.Tensor) -> None:
    """Set the attributes that DeepSpeed scripts read: ``ds_shape``, ``ds_numel`` and ``ds_tensor``.

    ``ds_tensor`` is this rank's part, flat, with its own ``ds_numel``.
    """
    part.ds_numel = part.numel()  # type: ignore[attr-defined]
    parameter.ds_shape = shape  # type: ignore[attr-defined]
    parameter.ds_numel = shape.numel()  # type: ignore[attr-defined]
    parameter.ds_tensor = part  # type: ignore[attr-defined]
