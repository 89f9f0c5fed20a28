"""The range of keys that each query attends to: what causality, windows, chunks and packed documents have in common."""

from __future__ import annotations

from collections import OrderedDict

import torch

from smp_runtime.context.attention.positions import RowIndex, keep
from smp_runtime.context.host_values import always_computed


class KeyBounds:
    """For each query of a sequence the first and the last key that it attends to.

    All ranks know them, so that nothing is exchanged about them.

    Args:
        first, last: positions of keys by position of the query, int64 on the CPU. A query attends to nothing if its last is
            before its first.
    """

    def __init__(self, first: torch.Tensor, last: torch.Tensor) -> None:
        self.first, self.last = first, last
        self._both = RowIndex(first), RowIndex(last)

    def visible(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether rows attend to keys, ``[rows, keys]``, from their positions on a device."""
        first, last = (each.on(rows.device)[rows][:, None] for each in self._both)
        return (keys >= first) & (keys <= last)

    @always_computed
    def needed(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Return which of ``length`` keys some row attends to."""
        first = self.first[rows].clamp(0, length)
        behind = (self.last[rows] + 1).clamp(0, length)
        open_rows = first < behind
        change = torch.zeros(length + 1, dtype=torch.int64)
        one = torch.ones(int(open_rows.sum()), dtype=torch.int64)
        change.index_add_(0, first[open_rows], one)
        change.index_add_(0, behind[open_rows], -one)
        return change.cumsum(0)[:length] > 0

    def is_diagonal(self, rows: torch.Tensor) -> bool:
        """Return whether rows attend to each other as causality has it."""
        in_order = torch.equal(self.last[rows], rows) and bool((rows.diff() > 0).all())
        return in_order and int(self.first[rows].max()) <= int(rows[0])

    def breaks(self, rows: torch.Tensor) -> list[int]:
        """Return the places of rows with which another document begins: their first key is another, and not the next one."""
        step = self.first[rows].diff()
        return ((step != 0) & (step != 1)).nonzero()[:, 0].add(1).tolist()


_causal: OrderedDict[int, KeyBounds] = OrderedDict()
_known: OrderedDict[object, tuple[object, KeyBounds]] = OrderedDict()


@always_computed
def bounds_of(key_range: tuple[torch.Tensor, torch.Tensor] | None, length: int, *, causal: bool) -> KeyBounds | None:
    """Return the bounds of queries, or None if each attends to all keys; the same object for the same tensors.

    Raises:
        AssertionError: they are not one for each of ``length`` queries.
    """
    if key_range is None:
        if not causal:
            return None
        if length not in _causal:
            keep(_causal, length, KeyBounds(torch.zeros(length, dtype=torch.int64), torch.arange(length)))
        return _causal[length]
    key = (*((id(each), 0 if each.is_inference() else each._version) for each in key_range), causal)
    if key not in _known:
        first, last = (each.to("cpu", torch.int64) for each in key_range)
        if first.shape != (length,) or last.shape != (length,):
            raise AssertionError(f"ranges of keys of shapes {tuple(first.shape)} are not those of {length} queries")
        last = torch.minimum(last, torch.arange(length)) if causal else last
        keep(
            _known, key, (key_range, KeyBounds(first, last))
        )  # the tensors too, so that no other gets their identities
    return _known[key][1]
