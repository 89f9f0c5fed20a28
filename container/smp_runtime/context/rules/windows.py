"""Operations of windows along a sequence, as convolutions: each rank fetches the few positions around its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from smp_runtime.context.fetching import fetch
from smp_runtime.context.layout import zigzag
from smp_runtime.context.sequence import ShardedSequence, rule, sequences_in

if TYPE_CHECKING:
    from smp_runtime.context.layout import SequenceLayout


@dataclass(frozen=True)
class Windows:
    """The windows of an operation: result j reads the positions from ``j × step - before``, ``reach`` of them.

    Args:
        before, after: positions of padding.
        reach: positions from the first to the last of a window.
        step: positions between two windows.
    """

    before: int
    after: int
    reach: int
    step: int

    def count(self, length: int) -> int:
        """Return the number of results for a sequence of a length."""
        return (length + self.before + self.after - self.reach) // self.step + 1

    def read_by(self, results: range) -> range:
        """Return the positions that results read, some of them in the padding."""
        first = results.start * self.step - self.before
        return range(first, first + (len(results) - 1) * self.step + self.reach)


def _layout_of_results(layout: SequenceLayout, windows: Windows, size: int) -> SequenceLayout:
    """Return who computes which results: the rank that has their positions, if there is one for each."""
    count = windows.count(layout.length)
    if count == layout.length:
        return layout
    inside = layout.without_padding()
    if inside.length == count and windows.before == windows.after == 0:  # padded by hand
        return inside
    if windows.step == 1 and windows.before and 0 < count - layout.length <= windows.reach:
        return layout.padded(0, count - layout.length)  # of which a causal convolution leaves the last ones out
    return zigzag(count, size)


def run_windows(
    sequence: ShardedSequence, windows: Windows, compute: Callable[[torch.Tensor], torch.Tensor], fill: float = 0.0
) -> Any:
    """Run an operation of windows along the last dim on each run of a rank's results.

    Args:
        compute: the operation without padding.
        fill: the value of the padding.
    """
    layout, size = sequence.sequence_layout, sequence.group.size
    if layout.outer != 1 or layout.inner != 1 or sequence.dim_held != sequence.dim() - 1:
        return NotImplemented
    if windows.count(layout.length) < 2 * size or min(layout.counts()) == 0:
        return NotImplemented
    results = _layout_of_results(layout, windows, size)
    if any(not runs for runs in results.runs()):
        return NotImplemented
    inside = range(layout.length)
    read = [[windows.read_by(run) for run in runs] for runs in results.runs()]
    wanted = tuple(tuple(_overlap(each, inside) for each in of_rank) for of_rank in read)
    fetched = fetch(sequence.local, sequence.dim_held, layout, wanted, sequence.group)
    mine, parts = wanted[sequence.group.rank], []
    pieces = fetched.split([len(each) for each in mine], -1)
    for part, each, had in zip(pieces, read[sequence.group.rank], mine, strict=True):
        ends = (had.start - each.start, each.stop - had.stop)
        parts.append(compute(F.pad(part, ends, value=fill) if any(ends) else part))
    return sequence.like(torch.cat(parts, -1), sequence.dim_held, results)


def _overlap(one: range, other: range) -> range:
    start = min(max(one.start, other.start), other.stop)
    return range(start, max(start, min(one.stop, other.stop)))


def _single(value: Any, default: int) -> int | None:
    if value is None:
        return default
    found = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    return found if isinstance(found, int) else None


def _padding_of(padding: Any, reach: int) -> tuple[int, int] | None:
    """Return the positions of padding before and after a sequence."""
    if padding == "same":
        return (reach - 1) // 2, reach - 1 - (reach - 1) // 2
    width = 0 if padding == "valid" else _single(padding, 0)
    return None if width is None else (width, width)


@rule("conv1d", "F.conv1d")
def _convolve(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sequence, weight = given["input"], given["weight"]
    others = {key: value for key, value in given.items() if key != "input"}
    if not isinstance(sequence, ShardedSequence) or sequences_in(others):
        return NotImplemented
    step, dilation = (_single(given.get(name), 1) for name in ("stride", "dilation"))
    if step is None or dilation is None:
        return NotImplemented
    reach = dilation * (weight.shape[-1] - 1) + 1
    ends = _padding_of(given.get("padding"), reach)
    if ends is None:
        return NotImplemented
    compute = functools.partial(
        F.conv1d, weight=weight, bias=given.get("bias"), stride=step, dilation=dilation, groups=given.get("groups", 1)
    )
    return run_windows(sequence, Windows(*ends, reach, step), compute)
