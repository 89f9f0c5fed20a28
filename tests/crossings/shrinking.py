"""A smaller case with the same fault: plain values in place of drawn ones, as long as the fault stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from crossings.case import AXES, TOPOLOGIES, Case


def shrink(case: Case, is_fault: Callable[[Case], bool]) -> Case:
    """The smallest case that this finds; each one that it tries is as near to the plain case as the one before, or nearer.

    Args:
        is_fault: whether a case shows the fault.
    """
    tried: set[Case] = set()
    while True:
        for smaller in _smaller(case):
            if smaller not in tried and smaller.is_comparable:
                tried.add(smaller)
                if is_fault(smaller):
                    case = smaller
                    break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the ones that help most first."""
    for number in range(len(case.events)):
        yield dataclasses.replace(case, events=case.events[:number] + case.events[number + 1 :])
    if not any(event.goes_to for event in case.events):
        world, *degrees = TOPOLOGIES[case.topology]
        for name, (ranks, *others) in TOPOLOGIES.items():
            if ranks < world or (ranks == world and sum(others) < sum(degrees)):
                yield dataclasses.replace(case, topology=name)
    for name, values in AXES.items():
        now = getattr(case, name)
        if name != "topology":
            for value in values[: values.index(now)]:
                yield dataclasses.replace(case, **{name: value})
