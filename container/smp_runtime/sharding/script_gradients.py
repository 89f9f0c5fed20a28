"""Gradients that were reduced to their owners, as a script reads and changes them before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient
from smp_runtime.tensors.torch_private import backward_pass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.sharding.flat_unit import FlatUnit


class GathersUnits(Protocol):
    """State in flat units, and their gradients."""

    optimizer_shards: dict[nn.Parameter, OptimizerShard | None]

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatUnit, int] | None:
        """Return the unit of a parameter, and its number there; None if it is in none."""

    def whole_of_unit(
        self, unit: Any, values: Mapping[nn.Parameter, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return whole tensors of a unit's parameters from all ranks' parts; every rank of the group calls it."""

    def hand_out_zeros(self) -> None:
        """Let gradients that the script has set to zero, and that nothing was added to, be there."""

    def hand_out_zeros_of(self, unit: Any) -> None:
        """Let there be gradients of a unit that nothing was reduced of, to which later ones are added."""


@dataclass(eq=False)
class _Delivered:
    """A unit's reduced gradients: this rank's shard of them, and which parameters have one."""

    unit: FlatUnit
    reduced: torch.Tensor
    used: list[bool]


class ScriptGradients:
    """Access for a script to ``p.grad`` of parameters with gradients in shards, for reading and changing.

    The first read after a reduction gathers the gradients of the parameter's whole unit, so every rank of the group must
    read it, in the same order. The script's changes count: :meth:`take_back` puts this rank's part of each gradient into
    its shard before anything else uses it. A gradient that is set to None is dropped.

    Args:
        shards: the state that the gradients belong to.

    Attributes:
        reduce: reduces accumulated gradients, if there are any; called before the script reads or sets one.
    """

    def __init__(self, shards: GathersUnits, ranks: Ranks) -> None:
        self._shards = shards
        self._ranks = ranks
        self.reduce: Callable[[], None] = lambda: None
        self._delivered: dict[int, _Delivered] = {}
        #: Units with the gradients that were cleared last, and for each parameter whether it had one. ``_zeroed`` holds
        #: those cleared to zero and not allocated yet: a reduction, a read of the script or an update allocates them.
        self._former: dict[int, tuple[FlatUnit, list[bool]]] = {}
        self._zeroed: dict[int, tuple[FlatUnit, list[bool]]] = {}
        #: Parameters with a gradient that the script holds or has set.
        self._held: dict[nn.Parameter, None] = {}

    def deliver(self, unit: FlatUnit, reduced: torch.Tensor, used: Sequence[bool]) -> list[bool]:
        """Note a unit's reduced gradients.

        Args:
            reduced: those of this rank's shard, ``[shard_elements]``.
            used: for each parameter of the unit, whether any rank used it since the last reduction.

        Returns:
            For each parameter of the unit, whether it has a gradient by this: also if the script has set it to zero.
        """
        zeroed = self._zeroed.pop(id(unit), None)
        if zeroed is not None:
            used = _either(used, zeroed[1])
        former = self._delivered.get(id(unit))  # to which these were added
        found = list(used) if former is None else _either(used, former.used)
        self._delivered[id(unit)] = _Delivered(unit, reduced, found)
        return list(used)

    def read(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return ``parameter.grad``; gathered, if it is read for the first time after a reduction."""
        place = self._shards.place_of(parameter)
        if place is None or parameter in self._held:
            return get_gradient(parameter)
        if not self._is_between_passes:
            return get_gradient(parameter)
        unit, index = place
        self.reduce()
        self._shards.hand_out_zeros()
        delivered = self._delivered.get(id(unit))
        has_gradient = delivered is not None and delivered.used[index]
        if delivered is not None and has_gradient and get_gradient(parameter) is None:
            self._give(delivered)
        return get_gradient(parameter)

    def write(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """Set ``parameter.grad``, and note that the script has done so."""
        if self._is_between_passes:
            self.reduce()  # a later reduction would add the accumulated gradients to this one
            self._shards.hand_out_zeros()  # and so would later zeros
            self._held.setdefault(parameter, None)
        set_gradient(parameter, value)

    @torch.no_grad()
    def take_back(self) -> None:
        """Apply the script's changes to gradients."""
        held, self._held = self._held, {}
        for parameter in held:
            place, current = self._shards.place_of(parameter), get_gradient(parameter)
            if place is not None:
                set_gradient(parameter, None)
                self._keep(parameter, *place, current)

    def forget(self, *, to_zero: bool = False) -> None:
        """Forget the delivered gradients, and those of them that the script has in hand.

        Args:
            to_zero: they are zero from now on, as are those forgotten before.
        """
        if not to_zero:
            self._former.clear()
        for key, each in self._delivered.items():
            former = self._former.get(key)
            used = list(each.used) if former is None else _either(each.used, former[1])
            self._former[key] = each.unit, used
        self._delivered.clear()
        self._zeroed = dict(self._former) if to_zero else {}
        held, self._held = self._held, {}
        for parameter in held:
            set_gradient(parameter, None)

    def zeroed(self) -> list[FlatUnit]:
        """Return the units with gradients that the script has set to zero, except those delivered since."""
        return [unit for unit, _ in self._zeroed.values()]

    @property
    def _is_between_passes(self) -> bool:
        return self._ranks.step.microbatch is None and backward_pass() == -1

    @torch.no_grad()
    def _give(self, delivered: _Delivered) -> None:
        """Gather a unit's gradients and let its parameters have them."""
        unit, shards = delivered.unit, self._shards.optimizer_shards
        parts = {}
        for parameter in unit.parameters:
            shard = shards.get(parameter)
            if shard is not None and shard.reduced is not None:
                parts[parameter] = shard.reduced
        whole = self._shards.whole_of_unit(unit, parts, delivered.reduced.dtype)
        for parameter, used, value in zip(unit.parameters, delivered.used, whole, strict=True):
            if used and parameter not in self._held:
                set_gradient(parameter, value.to(parameter.dtype))
                self._held[parameter] = None

    def _keep(self, parameter: nn.Parameter, unit: FlatUnit, index: int, value: torch.Tensor | None) -> None:
        """Put this rank's part of a gradient into its shard, where it differs from that as the script was given it."""
        shard, fragment = self._shards.optimizer_shards.get(parameter), unit.fragments[index]
        if value is not None and unit.trained and id(unit) not in self._delivered:
            self._shards.hand_out_zeros_of(unit)
        delivered = self._delivered.get(id(unit))
        if delivered is None:
            return
        delivered.used[index] = value is not None
        if shard is None or fragment is None:
            return
        if value is None:
            if shard.reduced is not None:
                shard.reduced.zero_()  # later passes add to it
            shard.reduced = None
            return
        part = shard.part_of(value)
        if shard.reduced is None:
            shard.reduced = unit.slice_of(delivered.reduced, fragment)
        if shard.reduced.dtype is part.dtype:
            shard.reduced.copy_(part)
        else:  # elements that the script left unchanged stay unrounded
            is_same = shard.reduced.to(part.dtype) == part
            shard.reduced.copy_(torch.where(is_same, shard.reduced, part))


def _either(one: Sequence[bool], other: Sequence[bool]) -> list[bool]:
    """Return for each parameter of a unit whether it counts as used in one of two lists."""
    pairs = zip(one, other, strict=True)
    return [any(pair) for pair in pairs]
