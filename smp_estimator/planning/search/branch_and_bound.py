"""The search for the fastest configuration that fits, or the cheapest: best first, by bounds that nothing can beat.

Whoever evaluates a configuration (a plan's arithmetic, or a rehearsal, which takes seconds) is asked as seldom as can be:
configurations are opened level by level in the order of their bounds, and none is evaluated whose bound is no better than what
was found. What was evaluated says more: a configuration that keeps more than one that did not fit will not fit either, and
one that computes more than another takes as long at least.
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
    """What came of a configuration.

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


#: Bound, levels that are open, effort, a number that orders what is equal, region, and what is chosen.
_Waiting = tuple[float, int, int, int, int, Configuration]

#: Worths that differ by less than this part are the same.
_SAME = 1e-6

Evaluate = Callable[[Configuration], Evaluated]


@dataclass(frozen=True)
class SearchRegion:
    """One cluster to look on, with all that its configurations are judged by.

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
        """The worth that no configuration below can beat; infinite where none can fit."""
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
        """Less is better: seconds, or dollars of a step; infinite for what does not fit."""
        evaluated = self.evaluated
        if not evaluated.fits or evaluated.seconds is None:
            return math.inf
        return self.region.weight * evaluated.seconds

    @property
    def preference(self) -> tuple[float, int]:
        """Of equal worth, to the millionth, the simpler one."""
        return (math.inf if self.worth == math.inf else float(f"{self.worth:.6g}"), self.configuration.effort)


@dataclass(frozen=True)
class Found:
    """What a search came to.

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
        """Whether nothing can be better than the best by more than was asked for; not where the budget ended first."""
        return self.possible_gain == 0.0

    @property
    def possible_gain(self) -> float:
        """Part of the best's worth that a configuration which was not looked at might save, at most."""
        if self.best is None:
            return 0.0 if self.bound == math.inf else 1.0
        return max(0.0, 1.0 - self.bound / self.best.worth)

    @cached_property
    def nearest(self) -> Judged | None:
        """Where nothing fits, the one that comes nearest: with the lowest peak."""
        known = [one for one in self.judged if one.evaluated.peak_bytes is not None]
        return min(known, key=lambda one: one.evaluated.peak_bytes or 0, default=None)


class Search:
    """A search over regions with one global batch, whose evaluations are kept, so that later questions reuse them.

    Args:
        regions: clusters, each with its configurations.
        budget: seconds after which nothing more is evaluated; None: until it is proven.
        gap: part of the worth that does not matter: what is better by less is not looked for.
        clock: what time is read from.
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
            raise ConfigError(f"the budget is {budget} seconds; a search needs some: give more than 0, or leave it out")
        if not 0 <= gap < 1:
            raise ConfigError(f"gap is {gap}; it is a part of the best's worth: give 0 or more, and less than 1")
        self.regions = tuple(regions)
        self._budget, self._gap, self._clock = budget, gap, clock
        self._start = clock()
        self._judged: dict[tuple[int, Configuration], Judged] = {}
        self._numbers = itertools.count(len(self.regions))

    def _is_over(self, part: float = 1.0) -> bool:
        return self._budget is not None and self._clock() - self._start >= part * self._budget

    def run(self, first: Iterable[Configuration] = (), part: float = 1.0) -> Found:
        """Look for the best.

        Args:
            part: of the budget, after which it ends.
            first: configurations that are evaluated before all others in each region, where they are in it: with a good one
                known, much less is opened.
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
        """Put the choices of the next level into the queue, those that may be better."""
        of = self.regions[region]
        for child in of.space.children(at):
            least = max(bound, of.bound(child))
            if not self._is_no_better(least, child, best):
                # Deeper ones first, where bounds are equal: a good one that is known early spares the others.
                heapq.heappush(queue, (least, -child.chosen, child.effort, next(self._numbers), region, child))

    def judge(self, at: Configuration, region: int = 0) -> Judged:
        """Evaluate a complete configuration, once."""
        key = region, at
        if key not in self._judged:
            of = self.regions[region]
            self._judged[key] = Judged(of, at, of.evaluate(at))
        return self._judged[key]

    def changes(self, at: Configuration, region: int = 0) -> Iterator[tuple[str, Judged]]:
        """What single changes of a configuration come to, by the level that is changed: those that help, the best first.

        Of each level the best value; evaluated in the order of their bounds, as long as they could be the best of all.
        """
        before = self.judge(at, region)
        of = self.regions[region]
        found: dict[str, Judged] = {}
        waiting = sorted(
            ((of.bound(other), number, name, other) for number, (name, other) in enumerate(of.space.neighbours(at))),
            key=lambda one: one[:2],
        )
        for bound, _, name, other in waiting:
            best = min((one.worth for one in found.values()), default=before.worth)
            if bound == math.inf or (bound > best and best < math.inf) or self._is_over():
                break
            judged = self.judge(other, region)
            helps = judged.worth < math.inf and judged.worth < before.worth * (1.0 - _SAME)
            if helps and (name not in found or judged.preference < found[name].preference):
                found[name] = judged
        yield from sorted(found.items(), key=lambda one: one[1].preference)

    def _limit(self, best: Judged | None) -> float:
        return math.inf if best is None else best.worth * (1.0 - self._gap)

    def _is_no_better(self, bound: float, at: Configuration, best: Judged | None) -> bool:
        """Whether nothing below can be wanted: it is slower, or as slow and no simpler."""
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
        """What is known of a configuration by others that were evaluated: infinite where it cannot fit."""
        least = 0.0
        for (number, other), judged in self._judged.items():
            if number != region or (other.pipeline, other.tensor) != (at.pipeline, at.tensor):
                continue
            evaluated = judged.evaluated
            if not evaluated.fits and evaluated.peak_bytes is not None and keeps_no_less(at, other):
                return math.inf
            if evaluated.seconds is not None and computes_no_less(at, other):
                least = max(least, self.regions[region].weight * evaluated.seconds)
            elif evaluated.passing is not None and other.sharded == 1 and passes_no_less(at, other):
                least = max(least, self.regions[region].weight * evaluated.passing)
        return least


def _traits_of(at: Configuration) -> ScheduleTraits:
    return TRAITS[at.schedule or DEFAULT_SCHEDULE]


def keeps_no_less(at: Configuration, other: Configuration) -> bool:
    """Whether a configuration of the same degrees has no more memory saved than another, in any respect."""
    if (at.microbatches or 1) > (other.microbatches or 1):
        return False
    if (at.active or 1) * (other.microbatches or 1) < (other.active or 1) * (at.microbatches or 1):
        return False  # fewer samples in flight
    if _traits_of(at).keeps < _traits_of(other).keeps:
        return False
    # Sharded state has buffers of its own, so that it is compared with other degrees of it only.
    is_more = (at.state, other.state) == ("whole", "optimizer") or 1 < at.sharded < other.sharded
    if at.state != other.state and not is_more:
        return False
    # A stage of one checkpointed layer keeps more than without, the layer and its input.
    return at.memory == other.memory or (at.memory, other.memory) == ("again", "offloaded")


def computes_no_less(at: Configuration, other: Configuration) -> bool:
    """Whether a configuration differs from another only by recomputing, offloading, a worse schedule, or fewer in flight.

    Without a pipeline more microbatches are more of the same, too: with one, they fill it.
    """
    return at.state == other.state and passes_no_less(at, other)


def passes_no_less(at: Configuration, other: Configuration) -> bool:
    """The same of its forward and backward passes, whoever holds the state."""
    if at.placement != other.placement:
        return False
    count, others = at.microbatches or 1, other.microbatches or 1
    if count != others and not ((at.pipeline or 1) == 1 and count > others):
        return False
    first, second = _traits_of(at).waits, _traits_of(other).waits
    if first < second or (first > second and (at.active or 1) < min(at.pipeline or 1, count)):
        return False  # a pipeline that is not filled has no closed form
    is_later = MEMORIES.index(at.memory or "kept") >= MEMORIES.index(other.memory or "kept")
    return is_later and (at.active or 1) <= (other.active or 1)


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
