"""Gathering units before use, freeing them after, fetching the next ones ahead in an order that all ranks of a group keep."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Work
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.sharding.all_gather import Gathering
    from smp_runtime.sharding.flat_unit import ShardedUnit
    from smp_runtime.sharding.requests import GatherRequests


logger = logging.getLogger("smp")

#: Units that are fetched ahead of their use.
LOOKAHEAD = 2


class GatherScheduler:
    """The scheduler that decides which units are gathered.

    All ranks of a sharding group need the same units in the same order, so they gather in the same order; except inside
    :meth:`on_request`.

    Args:
        units: all of this rank's.
        most: cap on gathered elements, including pending gathers; exceeded only while more are used at once.
        speaks: whether this rank is the one that warns.

    Attributes:
        elements: gathered now or under way.
        peak: the greatest value of ``elements`` so far.
        gathers: number of gathers so far.
        trace: shows whether all ranks have gathered the same units.
    """

    def __init__(self, units: Sequence[ShardedUnit], gathering: Gathering, most: int, *, speaks: bool = True) -> None:
        self._units = list(units)
        self._numbers = {id(unit): number for number, unit in enumerate(units)}
        self._gathering = gathering
        self._most = most
        self._speaks = speaks
        self.order = NeedOrder()
        self.elements = 0
        self.peak = 0
        self.gathers = 0
        self.trace = GatherTrace()
        self._gathered: dict[int, ShardedUnit] = {}  # by number, in the order of gathering
        self._requests: GatherRequests | None = None
        self._is_exact = False

    # -- use -------------------------------------------------------------------------------------------------------

    def need(self, unit: ShardedUnit) -> None:
        """Block until the unit's parameters hold their values, and fetch the next units ahead."""
        if unit.is_filled:
            unit.reshard()
        if self._requests is not None:
            while not unit.ready:
                self._answer(self._requests.round(self._numbers[id(unit)]), unit)
            return
        self.order.note(self._numbers[id(unit)])
        self.fetch(unit)
        self._fetch_ahead()

    def fetch(self, unit: ShardedUnit) -> None:
        """Block until the unit's parameters hold their values, outside the window: record and prefetch nothing."""
        if unit.is_filled:  # for a script that wrote into this rank's part
            unit.reshard()
        if not unit.ready:
            if unit.work is None:
                self._make_room(unit)
                self._start(unit)
            self._finish(unit)

    def fetch_exact(self, unit: ShardedUnit) -> None:
        """Do the same with values that are not rounded to 8 bits."""
        if unit.is_rounded:
            self.free(unit)
        self._is_exact = True
        try:
            self.fetch(unit)
        finally:
            self._is_exact = False

    def done(self, unit: ShardedUnit) -> None:
        """End a use of the unit; free it unless it is still in use or needed next."""
        has_values = bool(unit.ready or unit.work)
        if not has_values or not unit.is_idle:
            return
        number = self._numbers[id(unit)]
        # A unit that is next would be gathered again at once.
        if number not in self.order.upcoming(1):
            self.free(unit)
            self._fetch_ahead()

    def free(self, unit: ShardedUnit) -> None:
        """Free the unit's whole, if there is one."""
        if unit.work is not None:
            self._finish(unit)
        if self._gathered.pop(self._numbers[id(unit)], None) is not None:  # not if it was filled to be loaded into
            unit.reshard()
            self.elements -= unit.filled

    def free_all(self) -> None:
        """Free all units and forget their uses, after a window or an error."""
        for unit in list(self._gathered.values()):
            self.free(unit)
        for unit in self._units:
            unit.forget_uses()
            unit.calls = unit.called = 0

    @contextlib.contextmanager
    def on_request(self, requests: GatherRequests) -> Iterator[None]:
        """Let ranks gather different units, on demand, and leave at different times.

        Every rank of the group enters and leaves the block. Nothing is fetched ahead meanwhile. A rank that leaves it waits,
        and supplies its parts, until all have left.
        """
        self.free_all()
        self.order.end()
        self._requests = requests
        try:
            yield
        finally:
            try:
                self.free_all()
                while asked := requests.round(None):
                    self._answer(asked, None)
            finally:
                self._requests = None
                self.trace.forget()  # in which ranks may differ here

    # -- inside ----------------------------------------------------------------------------------------------------

    def _answer(self, asked: Sequence[int], wanted: ShardedUnit | None) -> None:
        """Gather the requested units; only ``wanted`` stays."""
        for unit in (self._units[number] for number in asked):
            if unit is wanted:
                self.fetch(unit)
            elif unit.ready:
                self._bring(unit, torch.empty_like(unit.full)).wait()
            else:
                self._bring(unit, unit.allocate()).wait()
                unit.reshard()

    def _bring(self, unit: ShardedUnit, full: torch.Tensor) -> Work:
        """Begin to fill ``full``, in 8 bits if the unit's layers multiply so."""
        unit.is_rounded = False
        rounding = None if self._is_exact else unit.rounding
        if rounding is not None and rounding.may_round():
            unit.is_rounded = True
            return rounding.start(self._gathering, full)
        return self._gathering.start(full, unit.shard)

    @torch.no_grad()
    def _start(self, unit: ShardedUnit) -> None:
        unit.work = self._bring(unit, unit.allocate())
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
            # A smaller unit behind it would take the room of this one, which is needed first.
            if self.elements + unit.filled > self._most:
                return
            self._start(unit)

    def _make_room(self, unit: ShardedUnit) -> None:
        """Free unused units until ``unit`` fits: first those fetched too early, then those that backward has passed.

        Units in use stay, and ``unit`` is needed now. So there may be more elements than the cap.
        """
        if self.elements + unit.filled <= self._most:
            return
        gathered = list(self._gathered.values())
        idle = [other for other in reversed(gathered) if other.is_idle]
        passed = [other for other in gathered if other.quiet and other.calls == 0]
        # A unit may be in both lists: freeing it again does nothing.
        for other in (*idle, *passed):
            self.free(other)
            if self.elements + unit.filled <= self._most:
                return
        self._warn(unit)

    def _warn(self, unit: ShardedUnit) -> None:
        """Warn once that parameters needed at the same time exceed the cap; they are gathered all the same."""
        used = [f"{_name(other)} uses {other.filled:,}" for other in self._gathered.values()]
        if not self._speaks or not used:  # warn_of_large_units() reports a unit that is too large alone
            return
        self._speaks = False
        least = self.elements + unit.filled
        logger.warning(
            "%s needs its %s parameters while %s: %s at once, more than sdp_max_live_parameters (%s); they are gathered all the "
            "same, and nothing is fetched ahead meanwhile; set it to at least %s so that the limit holds",
            *(_name(unit), f"{unit.filled:,}", ", ".join(used), f"{least:,}", f"{self._most:,}", f"{least:,}"),
        )


def warn_of_large_units(units: Sequence[ShardedUnit], most: int) -> None:
    """Warn of single units that exceed the cap."""
    large = [unit for unit in units if unit.filled > most]
    if not large:
        return
    largest = max(large, key=lambda unit: unit.filled)
    others = f", and so are {len(large) - 1} more" if len(large) > 1 else ""
    logger.warning(
        "the %s parameters of %s are needed at the same time and are more than sdp_max_live_parameters (%s)%s: each is gathered "
        "alone, and nothing is fetched ahead meanwhile; set it to at least %s, or to %s so that the next ones can be fetched",
        *(f"{largest.filled:,}", _name(largest), f"{most:,}", others, f"{largest.filled:,}", f"{2 * largest.filled:,}"),
    )


def _name(unit: ShardedUnit) -> str:
    return unit.name or "the model itself"


#: How many expected needs may be skipped before the order counts as another one.
_SKIPS = 8

#: Sums of float32 are exact for integers below this.
_EXACT = 2**24


class NeedOrder:
    """The order of needs in the last window of a kind, and the position of the present window in it.

    A *window* is a repeated unit of work: a training step with all its microbatches, forward and backward, or an
    evaluation.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._recorded: list[int] = []
        self._position = 0
        self._follows = False

    def begin(self, kind: str) -> None:
        """Begin a window; forget one that was open."""
        self._kind = kind
        self._recorded = []
        self._position = 0
        self._follows = kind in self._known

    def note(self, number: int) -> None:
        """Record that a unit is needed."""
        if self._kind is None:
            return
        self._recorded.append(number)
        if not self._follows:
            return
        ahead = self._known[self._kind][self._position : self._position + _SKIPS]
        if number in ahead:
            self._position += ahead.index(number) + 1
        else:
            self._follows = False

    def end(self) -> None:
        """End the window; the next one of its kind is expected to follow its order."""
        if self._kind is not None and self._recorded:
            self._known[self._kind] = self._recorded
        self._kind = None
        self._follows = False

    def upcoming(self, count: int) -> Iterator[int]:
        """Yield the next expected units, at most ``count`` different ones; none while the order is unknown."""
        if not self._follows or self._kind is None:
            return
        seen: set[int] = set()
        for number in self._known[self._kind][self._position :]:
            if number not in seen:
                if len(seen) == count:
                    return
                seen.add(number)
                yield number


class GatherTrace:
    """The sequence of units that were gathered.

    Attributes:
        digest: equal for equal sequences, and almost surely different for others; below 2**24.
    """

    def __init__(self) -> None:
        self._checksum = 0

    @property
    def digest(self) -> int:
        """Return the digest of the sequence so far."""
        return self._checksum % _EXACT

    def note(self, number: int) -> None:
        """Record that a unit is gathered."""
        self._checksum = zlib.crc32(number.to_bytes(4, "little"), self._checksum)

    def forget(self) -> None:
        """Begin anew."""
        self._checksum = 0


def refuse_unequal(sharing: Sequence[Sequence[int]], digests: Sequence[int]) -> None:
    """Refuse gradients that were computed with parameters of mixed units.

    Args:
        sharing: the sharding groups, as positions in ``digests``.
        digests: of every rank's sequence.

    Raises:
        SMPUserError: two ranks of a sharding group have gathered other units, or in another order.
    """
    for positions in sharing:
        others = [p for p in positions if digests[p] != digests[positions[0]]]
        if others:
            raise SMPUserError(
                f"data parallel ranks {others} have gathered other modules' parameters in this step than rank "
                f"{positions[0]} of their sharding group of {len(positions)}: forward called, or backward reached, other "
                "modules there, for example because the loss takes one of several outputs by rank; let the loss of every "
                "rank depend on the same outputs: add 0 * other.sum() for each that it does not use",
                code="SMP308",
            )


def sharing_positions(ranks: Ranks) -> list[list[int]]:
    """Return the sharding groups among the ranks with the same parameters, as positions among these ranks."""
    alike = ranks.members(Group.RDP)
    groups = [group for group in ranks.topology.groups(Group.SHARD) if group[0] in alike]
    return [[alike.index(rank) for rank in group] for group in groups]
