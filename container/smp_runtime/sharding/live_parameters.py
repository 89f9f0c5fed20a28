"""Gathering units before use, freeing them after, fetching the next ones ahead: never more than the cap at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from smp_runtime.errors import SMPUserError
from smp_runtime.sharding.gather_order import GatherTrace, NeedOrder

if TYPE_CHECKING:
    from smp_runtime.sharding.all_gather import Gathering
    from smp_runtime.sharding.flat_unit import ShardedUnit

#: Units that are fetched ahead of their use.
LOOKAHEAD = 2


class LiveParameters:
    """Decides which units are gathered.

    All ranks of a sharding group need the same units in the same order, so they gather in the same order.

    Args:
        units: all of this rank's.
        most: cap on gathered elements, those under way included.

    Attributes:
        elements: gathered now or under way.
        peak: the greatest value of ``elements`` so far.
        gathers: number of gathers so far.
        trace: tells whether all ranks have gathered the same units.
    """

    def __init__(self, units: Sequence[ShardedUnit], gathering: Gathering, most: int) -> None:
        self._units = list(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._gathering = gathering
        self._most = most
        self.order = NeedOrder()
        self.elements = 0
        self.peak = 0
        self.gathers = 0
        self.trace = GatherTrace()
        self._gathered: dict[int, ShardedUnit] = {}  # by number, in the order of gathering

    # -- use -------------------------------------------------------------------------------------------------------

    def need(self, unit: ShardedUnit) -> None:
        """The unit's parameters hold their values when this returns."""
        self.order.note(self._numbers[id(unit)])
        self.fetch(unit)
        self._fetch_ahead()

    def fetch(self, unit: ShardedUnit) -> None:
        """The same for somebody who is no part of the window: nothing is noted, nothing fetched ahead."""
        if not unit.ready:
            if unit.work is None:
                self._make_room(unit)
                self._start(unit)
            self._finish(unit)

    def done(self, unit: ShardedUnit) -> None:
        """A use of the unit has ended; it is freed unless something else uses it, or will next."""
        if not unit.is_idle or not (unit.ready or unit.work):
            return
        following = next(self.order.upcoming(1), None)
        if following is None or following != self._numbers[id(unit)]:
            self.free(unit)
            self._fetch_ahead()

    def free(self, unit: ShardedUnit) -> None:
        """Free the unit's whole, if there is one."""
        if unit.work is not None:
            self._finish(unit)
        if self._gathered.pop(self._numbers[id(unit)], None) is not None:  # not if it was filled to be loaded into
            unit.detach()
            self.elements -= unit.filled

    def free_all(self) -> None:
        """Nothing is used any more: after a window, or after an error."""
        for unit in list(self._gathered.values()):
            self.free(unit)
        for unit in self._units:
            unit.forget_uses()
            unit.calls = unit.called = 0

    # -- inside ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start(self, unit: ShardedUnit) -> None:
        unit.work = self._gathering.start(unit.allocate(), unit.shard)
        self._gathered[self._numbers[id(unit)]] = unit
        self.elements += unit.filled
        self.peak = max(self.peak, self.elements)
        self.gathers += 1
        self.trace.note(self._numbers[id(unit)])

    def _finish(self, unit: ShardedUnit) -> None:
        work, unit.work = unit.work, None
        if work is not None:
            work.wait()
            unit.attach()

    def _fetch_ahead(self) -> None:
        for number in self.order.upcoming(LOOKAHEAD):
            unit = self._units[number]
            if unit.ready or unit.work is not None:
                continue
            if self.elements + unit.filled > self._most:
                return
            self._start(unit)

    def _make_room(self, unit: ShardedUnit) -> None:
        """Free what nobody uses until ``unit`` fits: first what was fetched too early, then what backward has passed."""
        if self.elements + unit.filled <= self._most:
            return
        idle = [other for other in reversed(self._gathered.values()) if other.is_idle]
        passed = [other for other in self._gathered.values() if other.calls == 0 and other.quiet]
        for other in (*idle, *passed):
            self.free(other)
            if self.elements + unit.filled <= self._most:
                return
        used = {other.name or "the model itself": other.filled for other in self._gathered.values()}
        least = self.elements + unit.filled
        raise SMPUserError(
            f"{unit.name or 'the model itself'} needs its {unit.filled:,} parameters while "
            + ", ".join(f"{name} uses {elements:,}" for name, elements in used.items())
            + f": {least:,} at once, but sdp_max_live_parameters is {self._most:,}; set it to at least {least:,}"
        )
