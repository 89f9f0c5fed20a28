"""The layout of a group's ranks: a grid of hosts and local ranks, or the reason why they form none."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_config.smddp import BufferSizes, host_rows
from smp_runtime.comm.control import host_name

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class HostGrid:
    """A group's ranks, host by host.

    Attributes:
        rows: for every host the group ranks on it, ascending; all rows are as long.
        host: the row of this rank.
        local: its position in the row.
    """

    rows: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return len(self.rows)

    @property
    def ranks_per_host(self) -> int:
        """Return the number of ranks on each host."""
        return len(self.rows[0])

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.hosts * self.ranks_per_host

    @property
    def column(self) -> tuple[int, ...]:
        """Return the ranks with this one's position on their hosts."""
        return tuple(row[self.local] for row in self.rows)

    @property
    def row(self) -> tuple[int, ...]:
        """Return the ranks on this one's host."""
        return self.rows[self.host]

    @classmethod
    def of(cls, host_of: Sequence[str], rank: int) -> HostGrid | str:
        """Return the grid, or the reason why an all-gather in phases is not possible or has no use.

        Args:
            host_of: by group rank, the name of its host.
        """
        rows = host_rows(host_of)
        if isinstance(rows, str):
            return rows
        host = next(number for number, row in enumerate(rows) if rank in row)
        return cls(rows, host, rows[host].index(rank))


def agree(store: dist.Store, rank: int, size: int) -> tuple[list[str], BufferSizes]:
    """Exchange hosts and buffer sizes in the group; every rank of it calls this once.

    Returns:
        By group rank the names of the hosts, and the sizes.

    Raises:
        ConfigError: sizes that are not multiples of 8192, or not the same on all ranks, so that the ranks would
            not fall back together.
    """
    sizes = BufferSizes.from_environment(os.environ)
    store.set(f"place/{rank}", json.dumps([host_name(), sizes.scratch, sizes.sort]))
    keys = [f"place/{number}" for number in range(size)]
    texts = [store.get(key) for key in keys]
    places = [json.loads(text) for text in texts]
    for number, (_, scratch, sort) in enumerate(places):
        if (scratch, sort) != (places[0][1], places[0][2]):
            raise ConfigError(
                f"rank {number} of the group has SMDDP buffers of {scratch} and {sort} bytes, but rank 0 has "
                f"{places[0][1]} and {places[0][2]}; every rank read its own environment; give all hosts the same "
                f"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES={places[0][1]} and SMDDP_AG_SORT_BUFFER_SIZE_BYTES={places[0][2]}",
                code="SMP316",
            )
    return [place[0] for place in places], sizes
