"""The automatic decision which stage gets which modules.

The modules are put in the order in which they run, every module's own frame after the modules in it. So the
own frame of a module that is split belongs to the last stage that it reaches, and head and loss are on the
very last stage. This sequence is cut into consecutive segments so that the greatest cost is smallest,
exactly. Modules that share a parameter are taken out of the sequence, and all stages are tried for them. If
each stage owns several pieces, pieces are cut like stages, and dealt out to the stages in turn.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from smp_runtime.errors import SMPUserError
from smp_runtime.pipeline.partition.assignment import Assignment, idle_stages
from smp_runtime.pipeline.partition.costs import CostModel, CostSettings, Need
from smp_runtime.pipeline.partition.linear_partition import Crossing, Matrix, best_cuts, crossing_costs
from smp_runtime.pipeline.partition.placeable_parts import Parts

if TYPE_CHECKING:
    from smp_runtime.pipeline.partition.module_tree import Trace

logger = logging.getLogger("smp")

#: Placements of groups that are all tried; beyond, one group after the other is improved, in so many rounds.
_MOST_PLACEMENTS = 256
_MOST_ROUNDS = 4
#: Extra cost, in mean stages, that a placement of a group may have if it saves a microbatch one way back and forth.
_DETOUR = 0.1


def partition(
    trace: Trace,
    stages: int,
    settings: CostSettings | None = None,
    *,
    pinned: Mapping[str, int] | None = None,
    pieces: int = 1,
) -> Assignment:
    """Assign every module to a stage. The same input gives the same result.

    Args:
        trace: the model, from :func:`~smp_runtime.pipeline.partition.tracing.trace` or
            :func:`~smp_runtime.pipeline.partition.module_tree.tree_without_tracing`.
        pinned: stages that were set by hand, by path; modules in a pinned module go with it unless they are pinned
            themselves.
        pieces: number of pieces that each stage owns: piece k of all is on stage k modulo ``stages``.

    Raises:
        SMPUserError: pinned modules that must be together but are not, unknown paths, or stages out of range.
    """
    if stages < 1:
        raise SMPUserError(f"the number of stages is {stages}; it must be 1 or more", code="SMP305")
    settings = settings or CostSettings()
    if pieces > 1:
        settings = replace(settings, in_flight=settings.in_flight * pieces)
    search = _PartitionSearch(CostModel(trace, stages * pieces, settings), pinned or {})
    placement = {path: piece % stages for path, piece in search.best().items()}
    for node in trace.root.walk():
        for alias in node.aliases:
            placement[alias] = placement[node.path]
    assignment = Assignment(stages, placement)
    if pieces > 1 and len(search.used) < stages * pieces:
        logger.warning(
            "the model has %d part%s that can be placed, fewer than the %d pieces of %d virtual stages on each of %d stages; lower "
            "virtual_stages",
            len(search.parts),
            "" if len(search.parts) == 1 else "s",
            stages * pieces,
            pieces,
            stages,
        )
    used = {piece % stages for piece in search.used}
    empty = [stage for stage in range(stages) if stage not in used]
    if empty:
        logger.warning(
            "%s: the model has %d part%s that can be placed, and there are %d stages; lower pipeline_parallel_degree%s",
            idle_stages(empty),
            len(search.parts),
            "" if len(search.parts) == 1 else "s",
            stages,
            ", or pin fewer modules with smp.set_partition" if pinned else "",
        )
    return assignment


class _PartitionSearch:
    """One decision; ``used`` are the stages that got something, after :meth:`best`."""

    def __init__(self, model: CostModel, pinned: Mapping[str, int]) -> None:
        self.model = model
        self.used: set[int] = set()
        self.parts = Parts(model, pinned)
        self._free = [index for index, group in enumerate(self.parts.groups) if group.stage is None]
        self._traffic: dict[frozenset[int], Matrix] = {}
        needs = [unit.need for unit in self.parts.sequence]
        fixed = [need.fixed for need in needs]
        activations = [need.activations for need in needs]
        work = [need.work for need in needs]
        #: Sums over the first 0, 1, 2 … units.
        self._running = [np.concatenate([[0.0], np.cumsum(column)]) for column in (fixed, activations, work)]

    def best(self) -> dict[str, int]:
        """Return the stage of every path."""
        stages, length = self.model.stages, len(self.parts.sequence)
        # A try takes about length² · stages steps, so all tries together take a bounded number.
        most = max(stages, min(_MOST_PLACEMENTS, int(5e8 / (max(1, length) ** 2 * stages))))
        found = self._try_all() if stages ** len(self._free) <= most else self._improve()
        if found is None:
            raise AssertionError("no way to fill the stages")
        of_position = np.repeat(np.arange(stages), np.diff([*found.begins, length])).tolist()
        placement = {}
        for path, (position, group) in self.parts.place_of.items():
            placement[path] = found.groups[group or 0] if position is None else of_position[position]
        self.used = {*of_position, *found.groups}
        return placement

    def _try_all(self) -> _Found | None:
        tries = itertools.product(range(self.model.stages), repeat=len(self._free))
        return _least(self._cut(chosen) for chosen in tries)

    def _improve(self) -> _Found | None:
        """Move one group at a time while that helps; used if there are too many groups to try all placements."""
        chosen = [self.model.stages - 1] * len(self._free)
        best = self._cut(chosen)
        for _ in range(_MOST_ROUNDS):
            before = best
            for index in range(len(chosen)):
                for stage in range(self.model.stages):
                    option = [*chosen[:index], stage, *chosen[index + 1 :]]
                    best = _least([best, self._cut(option)])
                if best is not None:
                    chosen = [best.groups[number] for number in self._free]
            if best is before:
                break
        return best

    def _cut(self, chosen: Sequence[int]) -> _Found | None:
        """Return the best cut of the sequence with the free groups on the chosen stages."""
        free = dict(zip(self._free, chosen, strict=True))
        groups = [free[i] if group.stage is None else group.stage for i, group in enumerate(self.parts.groups)]
        bare = set(range(self.model.stages)) - set(groups)
        too_few = len(bare) > len(self.parts.sequence)
        costs = []
        for stage in range(self.model.stages):
            here = frozenset(index for index, at in enumerate(groups) if at == stage)
            costs.append(self._segment_costs(stage, here))
        cut = best_cuts(costs, [too_few or stage not in bare for stage in range(self.model.stages)])
        if cut is None:
            return None
        greatest, squares, begins = cut
        ends = [*begins[1:], len(self.parts.sequence)]
        empty = sum(begins[stage] == ends[stage] for stage in bare)
        detours = _DETOUR / self.model.stages * self._detours(groups, begins, ends)
        return _Found((empty, greatest + detours, squares), groups, begins)

    def _segment_costs(self, stage: int, here: frozenset[int]) -> Matrix:
        """Return the cost of the stage with these groups, for every segment of the sequence."""
        extra = sum((self.parts.groups[index].need for index in here), Need())
        fixed, activations, work = (
            running[None, :] - running[:, None] + more
            for running, more in zip(self._running, (extra.fixed, extra.activations, extra.work), strict=True)
        )
        weight = self.model.settings.memory_weight
        memory = (fixed + activations * self.model.in_flight[stage]) / self.model.total_bytes
        cost: Matrix = weight * memory + (1 - weight) * work / self.model.total_work
        return cost + self._traffic_costs(here)

    def _traffic_costs(self, here: frozenset[int]) -> Matrix:
        """Return the traffic costs of a stage with these groups.

        They are cached: there are few sets of groups, and many placements.
        """
        if here not in self._traffic:
            crossings = []
            for charge in self.model.charges:
                producer, its_group = self.parts.place_of[charge.producer]
                places = [self.parts.place_of[path] for path in charge.consumers]
                positions = sorted({position for position, _ in places if position is not None})
                groups = {group for _, group in places if group is not None}
                if set(positions) <= {producer} and groups <= {its_group}:
                    continue  # one unit
                inside = its_group is not None and its_group in here
                crossings.append(
                    Crossing(producer, inside, tuple(positions), bool(groups & here), bool(groups - here), charge.cost)
                )
            self._traffic[here] = crossing_costs(len(self.parts.sequence), crossings)
        return self._traffic[here]

    def _detours(self, groups: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> int:
        """Return how often a microbatch leaves its way through the stages because a module is bound to another one.

        A head on an early stage is one, and the worst, because backward begins there. A module that is called early
        may be on the last stage without a detour, because the step function begins there.
        """
        last, count = self.model.stages - 1, 0
        for group, stage in zip(self.parts.groups, groups, strict=True):
            for gap in group.gaps:
                is_behind = ends[stage] < gap
                is_ahead = begins[stage] > gap and stage != last
                is_detour = is_behind or is_ahead
                count += is_detour
        return count


@dataclass
class _Found:
    """A cut, and the stages of all groups that it belongs to."""

    score: tuple[int, float, float]
    groups: list[int]
    begins: list[int]


def _least(found: Iterable[_Found | None]) -> _Found | None:
    """Return the best cut, the earliest among equals; rounding differences do not count."""
    best: _Found | None = None
    for candidate in found:
        if candidate is None:
            continue
        is_better = best is None or _is_less(candidate.score, best.score)
        if is_better:
            best = candidate
    return best


def _is_less(score: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    for one, two in zip(score, other, strict=True):
        # Sums of the same costs in another order differ in their last digits.
        if abs(one - two) > 1e-9 * abs(two):
            return one < two
    return False
