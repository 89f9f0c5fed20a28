"""Compares copies of parameters over the ranks of a stage, and names the first element in which two differ."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from smp_config import Group
from smp_runtime.errors import NumericsError
from smp_tools.numerics.checksums import bits_in, checksum, copies_of
from smp_tools.numerics.sketch import bits_of, plain_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.model.local_part import LocalPart, ParallelState
    from smp_tools.numerics.checksums import Copy

#: Elements that two ranks send to find the first one that differs.
_BLOCK = 1 << 16
#: Parameters with the most copies that may differ by rounding which are looked at in one comparison.
_MOST_CLOSE = 8
#: Copies that tensor parallel ranks update by themselves may differ by so much of their norm, and by so much per element: an
#: adaptive optimizer turns a gradient that is only rounding into a whole update.
_OF_NORM, _PER_ELEMENT = 0.05, 1e-2

#: A row of a table: ``exact``, ``close``, checksum.
_EXACT, _CLOSE, _SUM = range(3)


class _Pair(NamedTuple):
    """Two ranks with different copies of the same elements."""

    usual: int
    odd: int


class _Difference(NamedTuple):
    """The difference between two ranks' copies."""

    first: int  # flat index of the first element that differs
    values: tuple[float, float]  # there, on the usual and on the odd rank
    greatest: float  # difference, in the block that was compared


@torch.no_grad()
def compare_copies(part: LocalPart, placed: ParallelState, ranks: Ranks, update: int) -> None:
    """Compare all copies of a stage's parameters; every data parallel rank calls it.

    Each parameter becomes one checksum, on its device. All of them are read at once, and sent in one all-gather.

    Args:
        update: after which it is done, for the message.

    Raises:
        NumericsError: on all ranks of the stage, if copies differ.
    """
    if placed.sharded_state is not None:
        placed.sharded_state.settle()  # pending gathers must arrive before the checksums read them
    copies = [copy for copy in copies_of(part, placed, ranks) if copy.tensor.numel()]
    members = ranks.members(Group.DP)
    sums: list[int] = []
    if copies:  # one wait for the device
        sums = torch.stack([checksum(copy.tensor).to(ranks.device) for copy in copies]).tolist()
    table = array("q")
    for copy, number in zip(copies, sums, strict=True):
        table.extend((copy.exact, copy.close, number))
    texts = ranks.control.allgather(table.tobytes(), members)
    if all(text == texts[0] for text in texts):
        return
    tables = [_table(text) for text in texts]
    exact = _differing(tables, _EXACT)
    if exact is not None:
        key, pair = exact[0]
        mine = next((copy for copy in copies if copy.exact == key), None)
        name, difference = _difference(mine, pair, ranks)
        raise NumericsError(_message(name, pair, difference, len(exact), ranks, update))
    close = _differing(tables, _CLOSE) or []
    for key, pair in close[:_MOST_CLOSE]:
        mine = next((copy for copy in copies if copy.close == key), None)
        far = _far_apart(mine, pair, ranks)
        if far is not None:
            raise NumericsError(_message(far, pair, None, 1, ranks, update))


def _table(text: bytes) -> torch.Tensor:
    """Read a rank's table: int64, ``[copies, 3]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.int64).view(-1, 3) if text else torch.zeros(0, 3).long()


def _differing(tables: Sequence[torch.Tensor], column: int) -> list[tuple[int, _Pair]] | None:
    """Return the keys with different sums, in the order of the first rank that has them, with two positions each."""
    every = torch.cat(list(tables))
    every = every[every[:, column] != 0]
    keys, order = every[:, column].sort(stable=True)
    sums = every[order, _SUM]
    is_other = (keys[1:] == keys[:-1]) & (sums[1:] != sums[:-1])
    bad = set(keys[1:][is_other].tolist())
    if not bad:
        return None
    having: dict[int, dict[int, int]] = {}
    for position, table in enumerate(tables):
        for row in table.tolist():
            if row[column] in bad:
                having.setdefault(row[column], {})[position] = row[_SUM]
    return [(key, _pair(found)) for key, found in having.items()]


def _pair(sums: dict[int, int]) -> _Pair:
    """Return the first position with the sum that most have, and the first with another."""
    usual = Counter(sums.values()).most_common(1)[0][0]
    positions = list(sums)
    return _Pair(
        next(position for position in positions if sums[position] == usual),
        next(position for position in positions if sums[position] != usual),
    )


def _difference(copy: Copy | None, pair: _Pair, ranks: Ranks) -> tuple[str, _Difference | None]:
    """Return the name of a copy, and the first element in which two ranks' differ; every rank of the stage calls it."""
    members, takes_part = ranks.members(Group.DP), ranks.rank_in(Group.DP) in pair
    payload = None
    if takes_part and copy is not None:
        blocks = bits_in(copy.tensor).split(_BLOCK)
        payload = (copy.name, torch.cat([bits_of(block) for block in blocks]).tolist())
    said = ranks.control.allgather(payload, members)
    name, usual_sums = said[pair.usual]
    _, odd_sums = said[pair.odd]
    numbers = zip(usual_sums, odd_sums, strict=True)
    block = next((index for index, (one, other) in enumerate(numbers) if one != other), None)
    if block is None:  # pieces have changed places
        return name, None
    values = _block(copy.tensor, block) if takes_part and copy is not None else None
    said = ranks.control.allgather(values, members)
    return name, _compared(said[pair.usual], said[pair.odd], block * _BLOCK)


def _block(tensor: torch.Tensor, block: int) -> tuple[list[int], list[float]]:
    """Return the bits and the values of a block."""
    start, stop = block * _BLOCK, (block + 1) * _BLOCK
    values = plain_numbers(tensor).reshape(-1)[start:stop].to(torch.float64)
    return bits_in(tensor)[start:stop].tolist(), values.tolist()


def _compared(usual: tuple[list[int], list[float]], odd: tuple[list[int], list[float]], start: int) -> _Difference:
    usual_bits, usual_numbers = usual
    odd_bits, odd_numbers = odd
    first = next(index for index, bits in enumerate(usual_bits) if bits != odd_bits[index])
    greatest = 0.0
    for one, other in zip(usual_numbers, odd_numbers, strict=True):
        distance = abs(one - other)
        greatest = max(greatest, math.inf if math.isnan(distance) else distance)
    return _Difference(start + first, (usual_numbers[first], odd_numbers[first]), greatest)


def _far_apart(copy: Copy | None, pair: _Pair, ranks: Ranks) -> str | None:
    """Return the name of a copy that differs by more than rounding; every rank of the stage calls it.

    Large ones are not compared: norms and biases are what tensor parallel ranks update by themselves.
    """
    payload = None
    is_of_pair = ranks.rank_in(Group.DP) in pair
    if is_of_pair and copy is not None and copy.tensor.numel() <= _BLOCK:
        numbers = plain_numbers(copy.tensor).reshape(-1).to(torch.float64)
        payload = (copy.name, numbers.tolist())
    # All ranks of the stage take part, also those that have nothing to compare.
    by_rank = ranks.control.allgather(payload, ranks.members(Group.DP))
    usual, odd = by_rank[pair.usual], by_rank[pair.odd]
    if usual is None or odd is None:
        return None
    name, numbers = usual
    distance, norm = math.dist(numbers, odd[1]), math.hypot(*numbers)
    limit = _OF_NORM * norm + _PER_ELEMENT * math.sqrt(len(numbers))
    return None if distance <= limit else str(name)


def _message(name: str, pair: _Pair, difference: _Difference | None, count: int, ranks: Ranks, update: int) -> str:
    members = ranks.members(Group.DP)
    usual, odd = members[pair.usual], members[pair.odd]
    more = f", and {count - 1} more tensors differ" if count > 1 else ""
    where = ""
    if difference is not None:
        one, other = difference.values
        where = (
            f": element {difference.first} is {one:.9g} on rank {usual} and {other:.9g} on rank {odd}, and the greatest "
            f"difference is {difference.greatest:.3g}"
        )
    return (
        f"{name} is not the same on rank {odd} as on rank {usual} after update {update}{where}{more}. These ranks have copies of "
        "one tensor. Possible causes: code of the script that writes weights, skips an update, or sets a learning rate on some "
        "ranks only; an optimizer that draws random numbers, without a common seed; a fault of the machine or of this library. "
        "Look for a branch on smp.rank() or smp.dp_rank() around the optimizer, compare with smp-estimator diff, and resume from "
        'a checkpoint that was saved before; "check_invariants": False goes on without this check'
    )
