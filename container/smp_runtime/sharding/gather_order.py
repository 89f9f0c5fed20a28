"""The order in which units are gathered: expected from the last window, and compared between ranks as a number."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

#: How many expected needs may be skipped before the order counts as another one.
_SKIPS = 8

#: Sums of float32 are exact for integers below this.
_EXACT = 2**24


class NeedOrder:
    """What was needed one after the other in the last window of a kind, and where the present one stands.

    A *window* is what repeats: a training step with all its microbatches, forward and backward, or an evaluation.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._recorded: list[int] = []
        self._position = 0
        self._follows = False

    def begin(self, kind: str) -> None:
        """A window begins; one that was open is forgotten."""
        self._kind = kind
        self._recorded = []
        self._position = 0
        self._follows = kind in self._known

    def note(self, number: int) -> None:
        """A unit is needed."""
        if self._kind is None:
            return
        self._recorded.append(number)
        if not self._follows:
            return
        ahead = self._known[self._kind][self._position : self._position + _SKIPS]
        if number in ahead:
            self._position += ahead.index(number) + 1
        else:
            self._follows = False

    def end(self) -> None:
        """The window ends; its order is what the next one of its kind will follow."""
        if self._kind is not None and self._recorded:
            self._known[self._kind] = self._recorded
        self._kind = None
        self._follows = False

    def upcoming(self, count: int) -> Iterator[int]:
        """The next units that are expected, at most ``count`` different ones; nothing while the order is unknown."""
        if not self._follows or self._kind is None:
            return
        seen: set[int] = set()
        for number in self._known[self._kind][self._position :]:
            if number not in seen:
                if len(seen) == count:
                    return
                seen.add(number)
                yield number


class GatherTrace:
    """The sequence of units that were gathered.

    Attributes:
        digest: equal for equal sequences, and with all likelihood only for them; below 2**24.
    """

    def __init__(self) -> None:
        self._checksum = 0

    @property
    def digest(self) -> int:
        """Of the sequence so far."""
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
