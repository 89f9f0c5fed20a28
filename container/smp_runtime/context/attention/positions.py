"""The positions that each rank holds, as attention needs them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import torch

from smp_runtime.context.host_values import always_computed

K = TypeVar("K")
V = TypeVar("V")

#: Sequences of so many lengths are remembered, and so many plans for each.
_MOST_KEPT = 64


class RowIndex:
    """Places of rows, on any device: a copy to a device is made once, since the host would wait for it in each call."""

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.places)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return them on a device."""
        if device not in self._on_device:
            with torch.inference_mode(False):
                self._on_device[device] = self.places.to(device)
        return self._on_device[device]


class HeldPositions:
    """The positions of one sequence that each member holds, in the order of its rows.

    Args:
        held: for each member its positions; together ``range(length)``, each once.

    Attributes:
        rows: the same, on any device.
        plans: what was planned for them.
    """

    def __init__(self, held: Sequence[torch.Tensor]) -> None:
        self.held = tuple(held)
        self.length = sum(len(each) for each in held)
        self.counts = [len(each) for each in held]
        self.rows = [RowIndex(each) for each in held]
        self._merged: dict[int, tuple[HeldPositions, list[torch.Tensor]]] = {}
        self.plans: OrderedDict[object, object] = OrderedDict()

    @always_computed
    def merged(self, size: int) -> tuple[HeldPositions, list[torch.Tensor]]:
        """Return the positions of groups of ``size`` neighboring members, sorted.

        The second result has, for each group, the place of each sorted position among the members' rows, one after the other.
        """
        if size not in self._merged:
            joined = [torch.cat(self.held[first : first + size]) for first in range(0, len(self.held), size)]
            orders = [each.argsort() for each in joined]
            groups = HeldPositions([each[order] for each, order in zip(joined, orders, strict=True)])
            self._merged[size] = groups, orders
        return self._merged[size]


_known: OrderedDict[tuple[tuple[int, int], ...], tuple[tuple[torch.Tensor, ...], HeldPositions]] = OrderedDict()


@always_computed
def positions_of(index: Sequence[torch.Tensor]) -> HeldPositions:
    """Return the positions in ``index``; what is derived from them is kept as long as the same tensors come again.

    Raises:
        AssertionError: they are not ``range(length)``, each once.
    """
    # Tensors of inference mode do not count their changes; the positions of a layout do not change.
    key = tuple((id(each), 0 if each.is_inference() else each._version) for each in index)
    if key in _known:
        _known.move_to_end(key)
        return _known[key][1]
    joined = torch.cat([each.reshape(-1) for each in index])
    if joined.device.type != "cpu" or not torch.equal(joined.sort().values, torch.arange(len(joined))):
        raise AssertionError("the ranks' positions are not those of a sequence, each once, on the CPU")
    found = HeldPositions([each.to(torch.int64) for each in index])
    keep(_known, key, (tuple(index), found))  # the tensors too, so that no other gets the identity of one
    return found


def keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    """Add to a dictionary of limited size; the oldest entry leaves it."""
    kept[key] = value
    while len(kept) > _MOST_KEPT:
        kept.popitem(last=False)


def runs_of(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Return the ranges of rows whose positions follow each other."""
    count = len(positions)
    if not count:
        return []
    breaks = (positions.diff() != 1).nonzero()[:, 0].add(1).tolist()
    edges = [0, *breaks, count]
    return list(itertools.pairwise(edges))
