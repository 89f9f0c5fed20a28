"""The exact partition of a sequence into consecutive segments, one per stage, with the smallest greatest cost.

The cost of a segment ``[i, j)`` is an entry of a matrix, one matrix per stage. Traffic fits in, too: whether
something crosses the border of a segment depends on ``i`` and ``j`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

#: Costs this close are equal: sums of the same numbers in another order differ in their last digits.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Crossing:
    """A charge, seen from a stage that holds a segment of the sequence and perhaps other things."""

    producer: int | None  # its position in the sequence; None if it is elsewhere, inside the stage or outside
    producer_inside: bool  # whether a producer that is elsewhere is on this stage
    consumers: tuple[int, ...]  # positions in the sequence, ascending
    consumer_inside: bool  # whether a consumer that is elsewhere is on this stage
    consumer_outside: bool  # whether a consumer that is elsewhere is on another stage
    cost: float  # of sending, and of receiving


def crossing_costs(length: int, crossings: Sequence[Crossing]) -> Matrix:
    """Return a matrix: entry ``[i, j]`` is the traffic cost of the stage that holds positions ``i`` to ``j - 1``.

    Each crossing adds to a few rectangles of the matrix, by their corners; cumulative sums then fill them.
    """
    corners = np.zeros((length + 2, length + 2))

    def add(i_first: int, i_last: int, j_first: int, cost: float) -> None:
        """Add to all segments that begin at ``i_first`` … ``i_last`` and end at ``j_first`` or later."""
        if i_first <= i_last and j_first <= length:
            corners[i_first, j_first] += cost
            corners[i_last + 1, j_first] -= cost

    for crossing in crossings:
        _receive(crossing, length, add)
        _send(crossing, length, add)
    filled: Matrix = corners.cumsum(axis=0).cumsum(axis=1)[: length + 1, : length + 1]
    return filled


def _receive(crossing: Crossing, length: int, add: Callable[[int, int, int, float], None]) -> None:
    """Add the costs of stages that have a consumer but not the producer."""
    if crossing.producer is None and crossing.producer_inside:
        return
    p, cost = crossing.producer, crossing.cost
    if crossing.consumer_inside:
        add(0, length, 0, cost)
        if p is not None:
            add(0, p, p + 1, -cost)
        return
    before = -1
    for consumer in crossing.consumers:  # the first consumer at or after i
        add(before + 1, consumer, consumer + 1, cost)
        if p is not None:
            add(before + 1, min(consumer, p), max(consumer, p) + 1, -cost)
        before = consumer


def _send(crossing: Crossing, length: int, add: Callable[[int, int, int, float], None]) -> None:
    """Add the costs of stages that have the producer but not all consumers."""
    p, cost, consumers = crossing.producer, crossing.cost, crossing.consumers
    if p is None and not crossing.producer_inside:
        return
    if not crossing.consumer_outside and not consumers:
        return
    if p is None:
        add(0, length, 0, cost)
        ends = consumers
    else:
        add(0, p, p + 1, cost)
        ends = (*consumers, p)
    if not crossing.consumer_outside:
        # A stage that has the producer and all consumers sends nothing.
        add(0, min(ends), max(ends) + 1, -cost)


def best_cuts(costs: Sequence[Matrix], may_be_empty: Sequence[bool]) -> tuple[float, float, list[int]] | None:
    """Cut the sequence to minimize the greatest cost, and among equals the sum of squares.

    Args:
        costs: for each stage the cost of each segment; entries with ``i > j`` are not read.
        may_be_empty: for each stage, whether its segment may be empty.

    Returns:
        The greatest cost, the sum of the squares, and where the segments begin (one number per stage, the first
            is
        0). None if there are fewer positions than stages that must not be empty. Among equally good cuts, the
            earliest.
    """
    length = costs[0].shape[0] - 1
    starts, ends = np.arange(length + 1)[:, None], np.arange(length + 1)[None, :]
    allowed = [
        np.where(starts <= ends if empty else starts < ends, cost, np.inf)
        for cost, empty in zip(costs, may_be_empty, strict=True)
    ]
    # The state before the first stage: nothing is placed, at no cost.
    least = np.full(length + 1, np.inf)
    least[0] = -np.inf
    for cost in allowed:
        least = np.maximum(least[:, None], cost).min(axis=0)
    greatest = float(least[length])
    if not np.isfinite(greatest):
        return None
    bound = greatest + _TOLERANCE * max(1.0, abs(greatest))
    total = np.full(length + 1, np.inf)
    total[0] = 0.0
    choices = []
    for cost in allowed:
        sums = total[:, None] + np.where(cost <= bound, cost, np.inf) ** 2
        total = sums.min(axis=0)
        # The first within the tolerance, so that rounding does not decide.
        choices.append(
            np.argmax(sums <= total[None, :] + _TOLERANCE * np.where(np.isfinite(total), total, 0.0), axis=0)
        )
    begins: list[int] = []
    end = length
    for choice in reversed(choices):
        end = int(choice[end])
        begins.append(end)
    return greatest, float(total[length]), begins[::-1]
