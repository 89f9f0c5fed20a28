"""How the children of an ``nn.Sequential`` are put together to regions that are computed again as one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from smp_runtime.errors import SMPUserError

T = TypeVar("T")


@dataclass(frozen=True)
class Strategy:
    """A checkpointing strategy.

    Attributes:
        name: ``each``, ``contiguous`` or ``group_N``.
        most: most children in one region.
    """

    name: str
    most: float

    @classmethod
    def parse(cls, name: object) -> Strategy:
        """The strategy of a name.

        Raises:
            SMPUserError: no such strategy.
        """
        if name == "each":
            return cls("each", 1)
        if name == "contiguous":
            return cls("contiguous", math.inf)
        number = re.fullmatch(r"group_(-?\d+)", name) if isinstance(name, str) else None
        if number is None:
            raise SMPUserError(
                f"strategy is {name!r}, which is none of the checkpointing strategies: use 'each' (every child on its own), "
                "'contiguous' (all neighbours on one partition together) or 'group_N' with a number, such as 'group_4'"
            )
        if (most := int(number[1])) < 1:
            raise SMPUserError(
                f"strategy is {name!r}, but a region needs at least one child; use 'group_1' or more, or 'contiguous' for as many "
                "as possible"
            )
        return cls(str(name), most)


def grouped(
    children: Sequence[T], stages: Sequence[int | None], strategy: Strategy
) -> list[tuple[int | None, list[T]]]:
    """Neighbours on the same stage, in regions of at most the strategy's size.

    Args:
        children: in the order of their calls.
        stages: the stage of each; None for one that is not on a single stage, which stays alone.

    Returns:
        Stage and members of every region.
    """
    groups: list[tuple[int | None, list[T]]] = []
    for child, stage in zip(children, stages, strict=True):
        if groups and stage is not None and groups[-1][0] == stage and len(groups[-1][1]) < strategy.most:
            groups[-1][1].append(child)
        else:
            groups.append((stage, [child]))
    return groups
