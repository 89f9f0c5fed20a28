"""What other ranks have of matrices, as far as one rank can know: a rehearsal has no other ranks that could say it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.optim.matrices.regions import regions_of
from smp_runtime.parameters.registry import intervals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.trained import SharedState
    from smp_runtime.optim.matrices.ownership import MatrixHolding
    from smp_runtime.optim.matrices.regions import Join, Region
    from smp_runtime.parameters.registry import ParameterRecord


def infer_holdings(
    ranks: Ranks,
    mine: MatrixHolding,
    records: Mapping[str, ParameterRecord],
    joins: Mapping[str, Join | None],
    state: SharedState | None,
) -> dict[int, MatrixHolding]:
    """Return what the ranks of this rank's stage have.

    Shards of units are where their numbers say. Of what tensor parallelism cuts, ranks have neighboring parts.

    Args:
        mine: what this rank has.
        records: of the parameters with matrices, by the names that they have there.
        joins: of those that are parts of matrices.
        state: the sharding of the optimizer state, or None.
    """
    topology, found = ranks.topology, {}
    for rank in ranks.members(Group.DP):
        place = 0 if state is None else topology.rank_in(state.sharing, rank)
        regions: dict[str, Sequence[Region]] = {}
        for name, record in records.items():
            runs = None if state is None else state.runs_of(record.parameter)
            start, stop = (0, math.prod(record.shape)) if runs is None else runs[place]
            here, there = ranks.rank_in(Group.TP), topology.rank_in(Group.TP, rank)
            bounds = _bounds_at(record, here, there)
            axis = record.placement.tensor_axis
            regions[name] = regions_of(record.shape, axis, bounds, start, stop, joins.get(name))
        found[rank] = replace(
            mine,
            sharers=(rank,) if state is None else tuple(topology.group_of(state.sharing, rank)),
            tensor=tuple(topology.group_of(Group.TP, rank)),
            regions=regions,
            widths=dict.fromkeys(regions, max(mine.widths.values(), default=2)),
        )
    return found


def _bounds_at(record: ParameterRecord, here: int, there: int) -> tuple[int, ...]:
    """Return the runs along its axis that another tensor parallel rank has of a parameter."""
    place = record.placement
    if place.tensor_axis is None or place.tensor_slice is None:
        return ()
    length, pieces = record.shape[place.tensor_axis], intervals(place.tensor_slice)
    if place.tensor_longest == length:  # on one rank
        return place.tensor_slice if here == there else (0, 0)
    if len(pieces) == 1:
        size = place.tensor_longest
        return min(there * size, length), min((there + 1) * size, length)
    # Several pieces, such as queries, keys and values in one weight, are each divided equally.
    bounds = []
    for start, stop in pieces:
        distance = (there - here) * (stop - start)
        bounds += [start + distance, stop + distance]
    return tuple(bounds)
