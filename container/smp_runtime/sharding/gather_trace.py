"""What the ranks of a sharding group gathered, told in a number, so that a difference is noticed."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from smp_config import Group
from smp_runtime.errors import SMPUserError
from smp_runtime.job.ranks import Ranks

#: Sums of float32 are exact for integers below this.
_EXACT = 2**24


class GatherTrace:
    """The sequence of units that were gathered.

    Attributes:
        digest: equal for equal sequences, and with all likelihood only for them; below 2**24.
    """

    def __init__(self) -> None:
        self._checksum = 0

    @property
    def digest(self) -> int:
        return self._checksum % _EXACT

    def note(self, number: int) -> None:
        """A unit is gathered."""
        self._checksum = zlib.crc32(number.to_bytes(4, "little"), self._checksum)

    def forget(self) -> None:
        """Begin anew."""
        self._checksum = 0


def refuse_unequal(sharing: Sequence[Sequence[int]], digests: Sequence[int]) -> None:
    """Refuse gradients that were computed with parameters of mixed units.

    Args:
        sharing: the sharding groups, as positions in ``digests``.
        digests: of every rank's sequence.

    Raises:
        SMPUserError: two ranks of a sharding group have gathered other units, or in another order.
    """
    for positions in sharing:
        others = [p for p in positions if digests[p] != digests[positions[0]]]
        if others:
            raise SMPUserError(
                f"data parallel ranks {others} have gathered other modules' parameters in this step than rank "
                f"{positions[0]} of their sharding group of {len(positions)}: forward called, or backward reached, other "
                "modules there, for example because the loss takes one of several outputs by rank; let the loss of every "
                "rank depend on the same outputs: add 0 * other.sum() for each that it does not use"
            )


def sharing_positions(ranks: Ranks) -> list[list[int]]:
    """The sharding groups among the ranks that hold the same parameters, as positions among these."""
    alike = ranks.members(Group.RDP)
    return [[alike.index(r) for r in ranks] for ranks in ranks.topology.groups(Group.SHARD) if ranks[0] in alike]
