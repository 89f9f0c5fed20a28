"""A smaller case with the same fault: plain values in place of drawn ones, as long as the fault stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from crossings import case as version_1
from crossings import version2_case as version_2

_Case = TypeVar("_Case", version_1.Case, version_2.Version2Case)


def shrink(case: _Case, is_fault: Callable[[_Case], bool]) -> _Case:
    """The smallest case that this finds; each one that it tries is as near to the plain case as the one before, or nearer.

    Args:
        is_fault: whether a case shows the fault.
    """
    tried: set[_Case] = set()
    while True:
        for smaller in _smaller(case):
            if smaller not in tried and smaller.is_comparable:
                tried.add(smaller)
                if is_fault(smaller):
                    case = smaller
                    break
        else:
            return case


def _smaller(case: _Case) -> Iterator[_Case]:
    """Cases with one thing less, the ones that help most first."""
    of = version_1 if isinstance(case, version_1.Case) else version_2
    topologies: Mapping[str, tuple[Any, ...]] = of.TOPOLOGIES
    for number in range(len(case.events)):
        yield dataclasses.replace(case, events=case.events[:number] + case.events[number + 1 :])
    if not any(event.goes_to for event in case.events):
        world, *degrees = topologies[case.topology]
        for name, (ranks, *others) in topologies.items():
            if ranks < world or (ranks == world and sum(others) < sum(degrees)):
                yield dataclasses.replace(case, topology=name)
    for name, values in of.AXES.items():
        now = getattr(case, name)
        if name != "topology":
            for value in values[: values.index(now)]:
                yield dataclasses.replace(case, **{name: value})
