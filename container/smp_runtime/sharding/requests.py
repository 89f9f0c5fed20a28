"""Unequal needs for parameters: each gather is requested, and all ranks of the group answer until requests end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smp_config import Group

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

#: A rank that has nothing to ask for any more.
_DONE = -1


class GatherRequests:
    """The requests of the ranks of a sharding group, a round at a time.

    Ranks that generate text leave the loop after unequal numbers of passes, and a router may send their tokens to other
    experts. A gather is still collective. So before each one the ranks exchange the numbers of the units that they need.

    Args:
        ranks: of the job; those of this rank's sharding group take part.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._collectives = ranks.collectives
        self._group = ranks.groups.group(Group.SHARD)
        self._mine = ranks.rank_in(Group.SHARD)
        self._size = ranks.size(Group.SHARD)

    def round(self, wanted: int | None) -> list[int]:
        """Exchange the number of the unit that each rank needs next; return all numbers that are needed.

        Args:
            wanted: this rank's unit, or None if it needs no more.
        """
        asked = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        asked[self._mine] = _DONE if wanted is None else wanted
        self._collectives.all_reduce(asked, self._group).wait()
        return sorted(set(asked.tolist()) - {_DONE})
