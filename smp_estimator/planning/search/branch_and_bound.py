"""Best-first search for the fastest or cheapest configuration that fits, with lower bounds.

An evaluation (a plan's arithmetic, or a rehearsal, which takes seconds) is made as rarely as possible.
Configurations are opened level by level in the order of their bounds. A configuration is not evaluated if its
bound is no better than the best found. Evaluations give further bounds: a configuration that keeps more
memory than one that did not fit will not fit either. One that computes more than another takes at least as
long.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_config.schedules import DEFAULT_SCHEDULE, TRAITS, ScheduleTraits
from smp_estimator.planning.search.bounds import least_bytes, least_seconds
from smp_estimator.planning.search.space import MEMORIES, Configuration

if TYPE_CHECKING:
    from smp_estimator.planning.search.bounds import Needs
    from smp_estimator.planning.search.space import Space
    from smp_records.rate_card import RateCard


@dataclass(frozen=True)
class Evaluated:
    """The result of evaluating a configuration.

    Attributes:
        seconds: of an optimizer step; None where it is not known, because it failed.
        peak_bytes: of the fullest rank; None where it is not known.
        fits: whether it can be trained.
        why: not, in words; empty where it can.
        passing: seconds of these in which its pipeline computes, no less where state is sharded; None where it is not known.
    """

    seconds: float | None
    peak_bytes: int | None
    fits: bool
    why: str = ""
    passing: float | None = None


#: Bound, minus the number of chosen levels, effort, a number that breaks ties, region, and the configuration.
_Waiting = tuple[float, int, int, int, int, Configuration]

#: Worths that differ by less than this part are the same.
_SAME = 1e-6

Evaluate = Callable[[Configuration], Evaluated]


@dataclass(frozen=True)
class SearchRegion:
    """One cluster to search, with everything needed to judge its configurations.

    Attributes:
        space: the configurations.
        needs: of the model, for the bounds.
        card: rates of the cluster.
        evaluate: what a configuration really comes to; asked once for each.
        device_bytes: that a rank may use; None: memory is no limit.
        weight: what a second is worth: 1 where time counts, dollars per second where the price does.
        name: of the cluster, for messages.
    """

    space: Space
    needs: Needs
    card: RateCard
    evaluate: Evaluate = field(repr=False)
    device_bytes: float | None = None
    weight: float = 1.0
    name: str = ""

    def bound(self, at: Configuration) -> float:
        """Return the least worth of all configurations below ``at``; infinite if none can fit."""
        if self.device_bytes is not None and least_bytes(self.needs, self.space, at) > self.device_bytes:
            return math.inf
        return self.weight * least_seconds(self.needs, self.space, self.card, at)


@dataclass(frozen=True)
class Judged:
    """A configuration that was evaluated."""

    region: SearchRegion
    configuration: Configuration
    evaluated: Evaluated

    @property
    def worth(self) -> float:
        """Return seconds, or dollars of a step; less is better. Infinite if the configuration does not fit."""
        evaluated = self.evaluated
        if not evaluated.fits or evaluated.seconds is None:
            return math.inf
        return self.region.weight * evaluated.seconds

    @property
    def preference(self) -> tuple[float, int]:
        """Return the sort key: worth to a millionth, then effort, so that the simpler of equal ones is preferred."""
        return (math.inf if self.worth == math.inf else float(f"{self.worth:.6g}"), self.configuration.effort)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        best: None where nothing fits.
        judged: all that were evaluated, in order.
        bound: no configuration has less worth than this; that of the best, where it is proven.
        seconds: that the search took.
    """

    best: Judged | None
    judged: tuple[Judged, ...]
    bound: float
    seconds: float

    @property
    def is_proven(self) -> bool:
        """Return whether the best is proven optimal within the gap; False if the budget ended first."""
        return self.possible_gain == 0.0

    @property
    def possible_gain(self) -> float:
        """Return the most that an unexamined configuration might save, as a part of the best's worth."""
        if self.best is None:
            return 0.0 if self.bound == math.inf else 1.0
        return max(0.0, 1.0 - self.bound / self.best.worth)

    @cached_property
    def nearest(self) -> Judged | None:
        """Return the configuration with the lowest peak, which is the nearest one if nothing fits."""
        known = [one for one in self.judged if one.evaluated.peak_bytes is not None]
        return min(known, key=lambda one: one.evaluated.peak_bytes or 0, default=None)


class Search:
    """A search over regions with one global batch; it keeps its evaluations, so that later questions reuse them.

    Args:
        regions: clusters, each with its configurations.
        budget: seconds after which nothing more is evaluated; None: until the best is proven.
        gap: part of the worth that does not matter: smaller improvements are not searched for.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        regions: Iterable[SearchRegion],
        *,
        budget: float | None = None,
        gap: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget is not None and not budget > 0:
            raise ConfigError(
                f"the budget is {budget} seconds; a search needs some: give more than 0, or leave it out", code="SMP110"
            )
        if not 0 <= gap < 1:
            raise ConfigError(
                f"gap is {gap}; it is a part of the best's worth: give 0 or more, and less than 1", code="SMP110"
            )
        self.regions = tuple(regions)
        self._budget, self._gap, self._clock = budget, gap, clock
        self._start = clock()
        self._judged: dict[tuple[int, Configuration], Judged] = {}
        self._numbers = itertools.count(len(self.regions))

    def _is_over(self, part: float = 1.0) -> bool:
        return self._budget is not None and self._clock() - self._start >= part * self._budget

    def run(self, first: Iterable[Configuration] = (), part: float = 1.0) -> Found:
        """Search for the best configuration.

        Args:
            part: of the budget, after which the search ends.
            first: configurations that are evaluated before all others, in each region that has them. If a good one is
                known, far fewer are opened.
        """
        best: Judged | None = None
        for known in self._judged.values():  # of an earlier question
            best = self._better(best, known)
        queue: list[_Waiting] = []
        for region in range(len(self.regions)):
            for configuration in first:
                best = self._better(best, self.judge(configuration, region))
            queue.append((0.0, 0, 0, region, region, Configuration()))
        bound = math.inf
        while queue:
            bound, _, _, _, region, at = heapq.heappop(queue)
            if self._is_over(part) or bound == math.inf or bound > self._limit(best):
                break
            if not at.is_complete:
                self._open(queue, bound, region, at, best)
            elif not self._is_no_better(max(bound, self._known_bound(region, at)), at, best):
                best = self._better(best, self.judge(at, region))
        else:
            bound = math.inf
        if best is not None and bound > self._limit(best) * (1.0 - _SAME):
            bound = best.worth
        return Found(best, tuple(self._judged.values()), bound, self._clock() - self._start)

    def _open(self, queue: list[_Waiting], bound: float, region: int, at: Configuration, best: Judged | None) -> None:
        """Put those choices of the next level into the queue that may be better."""
        of = self.regions[region]
        for child in of.space.children(at):
            least = max(bound, of.bound(child))
            if not self._is_no_better(least, child, best):
                # If bounds are equal, deeper ones come first: a good one that is known early spares the others.
                heapq.heappush(queue, (least, -child.chosen, child.effort, next(self._numbers), region, child))

    def judge(self, at: Configuration, region: int = 0) -> Judged:
        """Evaluate a complete configuration, once."""
        key = region, at
        if key not in self._judged:
            of = self.regions[region]
            self._judged[key] = Judged(of, at, of.evaluate(at))
        return self._judged[key]

    def changes(self, at: Configuration, region: int = 0) -> Iterator[tuple[str, Judged]]:
        """Yield the results of helpful single changes of a configuration, by the changed level, the best first.

        Each level has its best value. Changes are evaluated in the order of their bounds, as long as they could be
        the best.
        """
        before = self.judge(at, region)
        least_gain = before.worth * (1.0 - _SAME)
        found: dict[str, Judged] = {}
        for bound, name, other in self._bounded_neighbours(at, region):
            best = min((one.worth for one in found.values()), default=before.worth)
            is_too_slow = bound > best and best < math.inf
            # Bounds come in ascending order, so no later change can be better.
            if bound == math.inf or is_too_slow or self._is_over():
                break
            judged = self.judge(other, region)
            if not judged.worth < least_gain:
                continue
            former = found.get(name)
            if former is None or judged.preference < former.preference:
                found[name] = judged
        yield from sorted(found.items(), key=lambda one: one[1].preference)

    def _bounded_neighbours(self, at: Configuration, region: int) -> list[tuple[float, str, Configuration]]:
        """Return the single changes of a configuration, in the order of their bounds."""
        of = self.regions[region]
        neighbours = [(of.bound(other), name, other) for name, other in of.space.neighbours(at)]
        # The sort is stable: of equal bounds, the space's order counts.
        return sorted(neighbours, key=lambda one: one[0])

    def _limit(self, best: Judged | None) -> float:
        return math.inf if best is None else best.worth * (1.0 - self._gap)

    def _is_no_better(self, bound: float, at: Configuration, best: Judged | None) -> bool:
        """Return whether no configuration below is wanted: each is slower, or as slow and no simpler."""
        if best is None:
            return bound == math.inf
        limit = self._limit(best)
        return bound > limit or (bound >= limit * (1.0 - _SAME) and at.effort >= best.configuration.effort)

    @staticmethod
    def _better(best: Judged | None, other: Judged) -> Judged | None:
        if other.worth == math.inf:
            return best
        return other if best is None or other.preference < best.preference else best

    def _known_bound(self, region: int, at: Configuration) -> float:
        """Return a bound of a configuration from others that were evaluated; infinite if it cannot fit."""
        weight = self.regions[region].weight
        least = 0.0
        for (number, other), judged in self._judged.items():
            if number != region or (other.pipeline, other.tensor) != (at.pipeline, at.tensor):
                continue
            seconds = _least_seconds(at, other, judged.evaluated)
            if seconds == math.inf:
                return math.inf
            least = max(least, weight * seconds)
        return least


def _traits_of(at: Configuration) -> ScheduleTraits:
    return TRAITS[at.schedule or DEFAULT_SCHEDULE]


def _least_seconds(at: Configuration, other: Configuration, evaluated: Evaluated) -> float:
    """Return a bound of a configuration's time from the result of another; infinite if it cannot fit."""
    does_not_fit = not evaluated.fits and evaluated.peak_bytes is not None
    if does_not_fit and keeps_no_less(at, other):
        return math.inf
    if evaluated.seconds is not None and computes_no_less(at, other):
        return evaluated.seconds
    if evaluated.passing is not None and other.sharded == 1 and passes_no_less(at, other):
        return evaluated.passing
    return 0.0


def _numbers_of(at: Configuration) -> tuple[int, int, int]:
    """Return the numbers of stages, of microbatches and of active microbatches; 1 if not chosen."""
    return at.pipeline or 1, at.microbatches or 1, at.active or 1


def keeps_no_less(at: Configuration, other: Configuration) -> bool:
    """Return whether a configuration saves no memory in any respect, compared with another of the same degrees."""
    _, count, active = _numbers_of(at)
    _, other_count, other_active = _numbers_of(other)
    if count > other_count:
        return False
    if active * other_count < other_active * count:
        return False  # fewer samples in flight
    if _traits_of(at).keeps < _traits_of(other).keeps:
        return False
    return _state_keeps_no_less(at, other) and _activations_keep_no_less(at, other)


def _state_keeps_no_less(at: Configuration, other: Configuration) -> bool:
    if at.state == other.state:
        return True
    # Sharded state has buffers of its own, so that it is compared with other degrees of it only.
    return (at.state, other.state) == ("whole", "optimizer") or 1 < at.sharded < other.sharded


def _activations_keep_no_less(at: Configuration, other: Configuration) -> bool:
    # A stage of one checkpointed layer keeps more than without, the layer and its input.
    return at.memory == other.memory or (at.memory, other.memory) == ("again", "offloaded")


def computes_no_less(at: Configuration, other: Configuration) -> bool:
    """Return whether a configuration takes at least as long to compute as another.

    It may differ only by recomputing, offloading, a worse schedule, or fewer microbatches in flight. Without a
    pipeline it may also have more microbatches. With a pipeline more microbatches fill it, so that case does not
    count.
    """
    return at.state == other.state and passes_no_less(at, other)


def passes_no_less(at: Configuration, other: Configuration) -> bool:
    """Return whether :func:`computes_no_less` holds for forward and backward passes, ignoring how state is stored."""
    if at.placement != other.placement:
        return False
    stages, count, active = _numbers_of(at)
    _, other_count, other_active = _numbers_of(other)
    if active > other_active:
        return False
    if count != other_count and (stages > 1 or count < other_count):
        return False
    waits, other_waits = _traits_of(at).waits, _traits_of(other).waits
    if waits < other_waits:
        return False
    is_filled = active >= min(stages, count)
    if waits > other_waits and not is_filled:
        return False  # a pipeline that is not filled has no closed form
    return _memory_effort(at) >= _memory_effort(other)


def _memory_effort(at: Configuration) -> int:
    """Return the position of the way to save activations, in the order of the time that it takes."""
    return MEMORIES.index(at.memory or "kept")


__all__ = [
    "Evaluate",
    "Evaluated",
    "Found",
    "Judged",
    "Search",
    "SearchRegion",
    "computes_no_less",
    "keeps_no_less",
    "passes_no_less",
]
