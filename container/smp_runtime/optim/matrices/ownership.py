"""Which rank updates which matrix: the one with most of its elements, so that fewest are sent, and the work is divided.

Every rank computes this from the same table of all ranks' regions, so that all agree without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_config.limits import MATRIX_ROUND_BYTES

if TYPE_CHECKING:
    from smp_runtime.optim.matrices.regions import Region

#: A matrix: the name of its parameter, and its number there; of several parameters, its own name and -1.
Key = tuple[str, int]
#: A part of a matrix: a rank, and the name of the parameter that has it there.
Part = tuple[int, str]


@dataclass(frozen=True)
class MatrixHolding:
    """What a rank has of the matrices of a stage.

    Attributes:
        sharers: the ranks that share its optimizer state with it; itself if they are alone.
        tensor: the ranks of its tensor parallel group.
        regions: by parameter.
        split: names of the parameters that tensor parallelism cuts.
        widths: by parameter, bytes of an element as it is sent.
        joined: by parameter, the matrix that it is a part of, if it has none of its own.
    """

    sharers: tuple[int, ...]
    tensor: tuple[int, ...]
    regions: Mapping[str, Sequence[Region]]
    split: frozenset[str]
    widths: Mapping[str, int]
    joined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix with parts on several ranks, or in several parameters.

    Attributes:
        owner: the rank that updates it.
        parts: its elements.
        width: bytes of an element as it is sent.
    """

    key: Key
    owner: int
    parts: Mapping[Part, Region]
    width: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters with its elements."""
        return tuple(sorted({name for _, name in self.parts}))

    @property
    def is_on_one_rank(self) -> bool:
        """Return whether its owner has all parts."""
        return all(rank == self.owner for rank, _ in self.parts)

    def of_rank(self, rank: int) -> dict[str, Region]:
        """Return the parts of a rank, by parameter."""
        return {name: region for (holder, name), region in self.parts.items() if holder == rank}

    @property
    def bytes(self) -> int:
        """Return the bytes of the whole matrix as it is sent."""
        rows, columns = next(iter(self.parts.values())).shape
        return rows * columns * self.width


def share_out(holdings: Mapping[int, MatrixHolding]) -> list[SharedMatrix]:
    """Choose the owner of every matrix that no rank has whole, in one parameter.

    Args:
        holdings: of all ranks of a stage, by rank.

    Returns:
        All of them, of all replicas, in the same order on every rank.
    """
    loads = {rank: _work_alone(holding) for rank, holding in holdings.items()}
    widths = {name: width for holding in holdings.values() for name, width in holding.widths.items()}
    shared = []
    for (key, _), parts in sorted(_parts(holdings).items()):
        if _are_lacking(parts):
            raise AssertionError(f"the ranks {sorted(parts)} lack elements of matrix {key[1]} of {key[0]}")
        elements: dict[int, int] = {}
        for (rank, _), region in parts.items():
            elements[rank] = elements.get(rank, 0) + region.elements
        owner = min(elements, key=lambda rank: (-elements[rank], loads[rank], rank))
        (_, name), region = next(iter(parts.items()))
        loads[owner] += work(region.shape)
        shared.append(SharedMatrix(key, owner, parts, widths[name]))
    return shared


def _work_alone(holding: MatrixHolding) -> int:
    """Return the work for the matrices that a rank has whole, which no other rank can take over."""
    total = 0
    for regions in holding.regions.values():
        total += sum(work(region.shape) for region in regions if region.is_whole)
    return total


def is_complete(holdings: Mapping[int, MatrixHolding]) -> bool:
    """Return whether the ranks together have all elements of every matrix that any of them has a part of."""
    return not any(map(_are_lacking, _parts(holdings).values()))


def _parts(holdings: Mapping[int, MatrixHolding]) -> dict[tuple[Key, tuple[int, ...]], dict[Part, Region]]:
    """Return the parts of the matrices that no rank has whole, for the ranks that have them together."""
    found: dict[tuple[Key, tuple[int, ...]], dict[Part, Region]] = {}
    for rank, holding in sorted(holdings.items()):
        for name, regions in holding.regions.items():
            members = _members(holdings, rank) if name in holding.split else tuple(sorted(holding.sharers))
            for region in regions:
                if not region.is_whole:
                    key = holding.joined.get(name, name), region.number
                    found.setdefault((key, members), {})[rank, name] = region
    return found


def _are_lacking(parts: Mapping[Part, Region]) -> bool:
    rows, columns = next(iter(parts.values())).shape
    return sum(part.elements for part in parts.values()) < rows * columns


def _members(holdings: Mapping[int, MatrixHolding], rank: int) -> tuple[int, ...]:
    """Return the ranks that together have all of what tensor parallelism cuts."""
    members: set[int] = set()
    for peer in holdings[rank].tensor:
        members.update(holdings[peer].sharers)
    return tuple(sorted(members))


def work(shape: Sequence[int]) -> int:
    """Return a number that grows as the arithmetic of an iteration for a matrix: three products of its shorter side."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def in_rounds(shared: Sequence[SharedMatrix]) -> list[list[SharedMatrix]]:
    """Divide matrices into rounds, so that an owner has memory for all that it assembles in one round."""
    most = max([MATRIX_ROUND_BYTES, *(matrix.bytes for matrix in shared)])
    rounds: list[list[SharedMatrix]] = []
    at: dict[int, int] = {}
    filled: dict[int, int] = {}
    for matrix in shared:
        owner = matrix.owner
        number, bytes_there = at.get(owner, 0), filled.get(owner, 0)
        if bytes_there and bytes_there + matrix.bytes > most:
            number, bytes_there = number + 1, 0
        at[owner], filled[owner] = number, bytes_there + matrix.bytes
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(matrix)
    return rounds
