"""SMDDP's all-gather in a plan: the part of the gathered bytes that goes through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import Group, Topology
from smp_config.smddp import BufferSizes, host_rows

if TYPE_CHECKING:
    from smp_estimator.planning.request import Request

MIB = 2**20


def find_grids(request: Request, topology: Topology) -> list[tuple[int, int] | str]:
    """Return, for every sharding group, its hosts and ranks per host, or why it cannot gather in phases."""
    found: list[tuple[int, int] | str] = []
    for members in topology.groups(Group.SHARD):
        hosts = [f"algo-{rank // request.processes_per_host + 1}" for rank in members]
        rows = host_rows(hosts)
        if isinstance(rows, str):
            found.append(rows)
        else:
            found.append((len(rows), len(rows[0])))
    return found


def buffer_bytes(request: Request, topology: Topology) -> int:
    """Return the bytes of the buffers on a rank; the first all-gather in phases allocates them."""
    if not request.uses_smddp or all(isinstance(grid, str) for grid in find_grids(request, topology)):
        return 0
    sizes = BufferSizes.from_environment(dict(request.environment))
    return sizes.scratch + sizes.sort


@dataclass(frozen=True)
class SmddpUse:
    """The way in which units are gathered in a job that has SMDDP as its backend.

    Attributes:
        share: part of the gathered bytes that goes through it, 0 to 1.
        largest: bytes of a rank's shard of the largest unit.
        pieces: the number of pieces of this shard; 0 if it does not go through SMDDP.
        reason: why the rest falls back to the plain backend; None if nothing does.
    """

    sizes: BufferSizes
    share: float
    largest: int
    pieces: int
    reason: str | None

    @classmethod
    def of(cls, request: Request, topology: Topology, shards: list[int]) -> SmddpUse:
        """Compute the use for a request.

        Args:
            shards: by unit, bytes of a rank's shard.
        """
        sizes = BufferSizes.from_environment(dict(request.environment))
        largest, through, pieces, reason = max(shards, default=0), 0, 0, None
        groups = find_grids(request, topology)
        for grid in groups:
            if isinstance(grid, str):
                reason = reason or grid
                continue
            fitting = [shard for shard in shards if sizes.pieces(shard, *grid)]
            if reason is None and len(fitting) < len(shards):
                reason = sizes.pieces_reason(largest, *grid)
            through += sum(fitting)
            pieces = max(pieces, sizes.pieces(largest, *grid))
        whole = len(groups) * sum(shards)
        return cls(sizes, through / whole if whole else 0.0, largest, pieces, reason)

    def __str__(self) -> str:
        if not self.largest:
            return "nothing is large enough to be sharded, so the SMDDP all-gather has nothing to do"
        said = f"{self.share:.0%} of the gathered bytes go through the SMDDP all-gather"
        if self.share:
            how = f"goes in {self.pieces} piece{'s' * (self.pieces != 1)}" if self.pieces else "is too large for them"
            said += (
                f", in buffers of {self.sizes.scratch / MIB:.4g} and {self.sizes.sort / MIB:.4g} MiB, which are counted; the "
                f"shard of the largest unit, {self.largest / MIB:.1f} MiB, {how}"
            )
        return said if self.reason is None else f"{said}; the plain backend does the rest: {self.reason}"
