"""Element by element comparison of two whole tensors: different elements, size of the differences, and ranks that have them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smp_config import ConfigError
from smp_estimator.numerics.recorded_run import TensorKey
from smp_records.numerics import (
    CLOSEUP_PREFIX,
    INPUT,
    LOSS,
    NUMBERS_OF_CALL,
    OUTPUT,
    OUTPUT_GRADIENT,
    ROUNDING,
    Head,
    KeptTensor,
)

Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: Roundings of an element that are no difference.
_ROUNDINGS = 16.0
#: Runs of indices that a sentence lists.
_MOST_RUNS = 6
#: Ratios that are so near to each other are one.
_SAME_RATIO = 1e-3


@dataclass
class WholeTensor:
    """A tensor of one run.

    Attributes:
        values: float64, in the whole tensor's shape; of a batch, samples of all replicas and microbatches one after the other.
        shares: by rank, its elements of the flattened tensor, if no rank has all.
        pieces: of a batch, replica, microbatch and number of samples.
        heads: number of attention heads, 0 if it is not known.
    """

    values: Numbers
    dtype: str
    shares: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    heads: int = 0


class CloseupFiles:
    """The whole tensors that the ranks of a repeated run have kept.

    Raises:
        ConfigError: a file of the folder is not from these ranks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = [kept for file in sorted(folder.glob(f"{CLOSEUP_PREFIX}*.jsonl")) for kept in _read_index(file)]

    @property
    def keys(self) -> list[TensorKey]:
        """Return the keys of all kept tensors."""
        return list(dict.fromkeys(TensorKey(kept.phase, kept.name, kept.nth) for kept in self._kept))

    def whole(self, key: TensorKey, rank: int | None = None, call: int = 0) -> WholeTensor | None:
        """Assemble a tensor; return None if no rank has kept it.

        Args:
            rank: the only rank with a copy or part that counts; None for all.
            call: call of a step since the last update, for tensors with a batch.
        """
        found = [kept for kept in self._kept if _is_of(kept, key) and rank in (None, kept.rank)]
        has_batch = key.phase in (INPUT, OUTPUT, OUTPUT_GRADIENT, LOSS)
        if has_batch:
            # Each call of a step has a batch of its own; weights and gradients are of all of them.
            found = [kept for kept in found if kept.call == call]
        if not found:
            return None
        return self._of_batch(found) if has_batch else self._of_parts(found)

    def _values(self, kept: KeptTensor) -> Numbers:
        try:
            return np.load(self._folder / Path(kept.file).name, allow_pickle=False).astype(np.float64)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._folder / kept.file} cannot be read ({error}); repeat the run", code="SMP119"
            ) from None

    def _of_parts(self, found: Sequence[KeptTensor]) -> WholeTensor:
        first = found[0]
        shape = tuple(first.shape)
        whole = np.full(math.prod(shape), np.nan)
        places = np.arange(whole.size).reshape(shape)
        shares: dict[int, npt.NDArray[np.int64]] = {}
        for kept in found:
            mine = places
            if kept.axis is not None:
                starts, stops = kept.cuts[::2], kept.cuts[1::2]
                runs = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
                mine = places.take(np.concatenate(runs), kept.axis)
            mine = mine.reshape(-1)[kept.flat[0] : kept.flat[1]]
            whole[mine] = self._values(kept)
            if mine.size < whole.size:
                shares[kept.rank] = mine
        return WholeTensor(whole.reshape(shape), first.dtype, shares, heads=first.heads)

    def _of_batch(self, found: Sequence[KeptTensor]) -> WholeTensor:
        by_piece: dict[tuple[int, int, int], KeptTensor] = {}
        for kept in found:
            # Several ranks may keep a copy of a piece; the first one counts.
            by_piece.setdefault((kept.owner or 0, kept.microbatch or 0, kept.nth), kept)
        parts: list[Numbers] = []
        pieces: list[tuple[int, int, int]] = []
        for (owner, microbatch, _), kept in sorted(by_piece.items()):
            values = self._values(kept).reshape(kept.shape or (1,))
            parts.append(values)
            pieces.append((owner, microbatch, len(values)))
        have_other_lengths = len({part.shape[1:] for part in parts}) > 1
        if have_other_lengths:  # then as they come
            parts = [part.reshape(-1) for part in parts]
        return WholeTensor(np.concatenate(parts), found[0].dtype, pieces=pieces, heads=found[0].heads)


def _is_of(kept: KeptTensor, key: TensorKey) -> bool:
    return (kept.phase, kept.name) == (key.phase, key.name) and _same_call(kept, key)


def _same_call(kept: KeptTensor, key: TensorKey) -> bool:
    """Return whether a kept tensor is of the key's call, or of any call if the key stands for all calls.

    A pipeline's calls of a module in a microbatch are compared together.
    """
    if kept.nth == key.nth:
        return True
    stands_for_all = key.phase in (OUTPUT, OUTPUT_GRADIENT) and key.nth < NUMBERS_OF_CALL
    return stands_for_all and kept.nth % NUMBERS_OF_CALL == key.nth


def _read_index(file: Path) -> Iterator[KeptTensor]:
    names = {each.name for each in fields(KeptTensor)}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            content: dict[str, Any] = json.loads(line)
            yield KeptTensor(**{name: content[name] for name in names})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file} holds {line[:60]!r}, which says of no tensor ({error!r}); repeat the run", code="SMP119"
            ) from None


# -- what differs ----------------------------------------------------------------------------------------------------


def order_of_samples(one: CloseupFiles, other: CloseupFiles) -> npt.NDArray[np.int64] | None:
    """Return the position in the second run of each sample of the first.

    Return None if both runs have the same order, or different samples.
    """
    for key in one.keys:
        if key.phase != INPUT:
            continue
        ours, theirs = one.whole(key), other.whole(key)
        if ours is None or theirs is None:
            continue
        if ours.values.shape != theirs.values.shape or ours.values.ndim < 2:
            continue
        our_rows = ours.values.reshape(len(ours.values), -1)
        their_rows = theirs.values.reshape(len(theirs.values), -1)
        if np.array_equal(our_rows, their_rows):
            return None
        # Sorted alike, runs with the same samples have equal rows.
        our_order = np.lexsort(our_rows.T[::-1])
        their_order = np.lexsort(their_rows.T[::-1])
        if np.array_equal(our_rows[our_order], their_rows[their_order]):
            found = np.empty(len(our_rows), dtype=np.int64)
            found[our_order] = their_order
            return found
    return None


@dataclass(frozen=True)
class RunNames:
    """The names of the two runs in sentences."""

    one: str
    other: str


def describe_differences(
    one: WholeTensor,
    other: WholeTensor,
    key: TensorKey,
    allowed: float,
    heads: tuple[Sequence[Head], Sequence[Head]],
    names: RunNames,
) -> list[str]:
    """Describe the differences between two tensors in sentences.

    Args:
        allowed: how far they may be apart, relative to the norm.
        heads: of the ranks of both runs.
    """
    a, b = one.values, other.values
    if a.shape != b.shape:
        return [
            f"{list(a.shape)} elements in {names.one}, {list(b.shape)} in {names.other}, which cannot be laid side by side"
        ]
    if not a.size:
        return ["no elements"]
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
        apart[np.isnan(a) & np.isnan(b)] = 0.0
        apart[np.isnan(apart)] = np.inf
    differs = apart > _limit(one, other, allowed)
    if not differs.any():
        place = _index(apart, int(np.argmax(apart)))
        return [f"no element is beyond rounding; the greatest difference is {float(apart.max()):.3g}, at {place}"]
    said = [_summary(a, b, apart, differs, names)]
    said += _where(differs, one, other, heads)
    said += _how(a, b, differs, names)
    return said


def _limit(one: WholeTensor, other: WholeTensor, allowed: float) -> Numbers:
    rounding = max(ROUNDING.get(one.dtype, 0.0), ROUNDING.get(other.dtype, 0.0))
    a, b = (np.nan_to_num(np.abs(run.values), nan=0.0, posinf=0.0, neginf=0.0) for run in (one, other))
    size = math.sqrt(float(np.mean(a**2)))
    limit: Numbers = _ROUNDINGS * rounding * np.maximum(a, b) + min(allowed, 1.0) * size
    return limit


def _summary(a: Numbers, b: Numbers, apart: Numbers, differs: Flags, names: RunNames) -> str:
    first, most = int(np.argmax(differs)), int(np.argmax(apart))
    count = f"{np.count_nonzero(differs):,} of {a.size:,} elements of {list(a.shape)}"
    text = f"{count} differ; the first is {_pair(a, b, first, names)}"
    return text + (f"; the greatest difference is {_pair(a, b, most, names)}" if most != first else "")


def _pair(a: Numbers, b: Numbers, at: int, names: RunNames) -> str:
    return f"{_index(a, at)}: {a.flat[at]:.9g} in {names.one}, {b.flat[at]:.9g} in {names.other}"


def _index(tensor: Numbers, at: int) -> str:
    return str([int(index) for index in np.unravel_index(at, tensor.shape)])


#: Names of the last axes, by their number from the end.
_AXES_FROM_LAST = {1: "columns", 2: "rows"}


def _where(
    differs: Flags, one: WholeTensor, other: WholeTensor, heads: tuple[Sequence[Head], Sequence[Head]]
) -> Iterator[str]:
    """Yield the axes along which only a part differs, with the ranks, microbatches or heads that have it."""
    runs = (one, heads[0]), (other, heads[1])
    for axis, length in enumerate(differs.shape):
        other_axes = tuple(number for number in range(differs.ndim) if number != axis)
        hit = np.flatnonzero(differs.any(other_axes))
        if len(hit) == length:
            continue
        if one.pieces and axis == 0:
            name, whose = "samples", list(_owners_of_samples(hit, one, other))
        else:
            name, whose = _AXES_FROM_LAST.get(differs.ndim - axis, "places"), []
            for run, of_run in runs:
                whose += _shares_along(hit, axis, length, differs.shape, run, of_run)
            whose += _attention_heads(hit, length, max(one.heads, other.heads), is_last=axis == differs.ndim - 1)
        owners = "".join(f", {each}" for each in dict.fromkeys(whose))
        yield f"only {name} {_runs(hit)} of {length} along axis {axis} differ{owners}"
    for run, of_run in runs:
        yield from _in_shards(differs, run, of_run)


def _in_shards(differs: Flags, run: WholeTensor, heads: Sequence[Head]) -> Iterator[str]:
    """Yield the ranks with shards that hold all differences, if others hold none."""
    if not any(_is_flat(share, differs.shape) for share in run.shares.values()):
        return
    flat = np.flatnonzero(differs)
    ranks = []
    for rank, share in sorted(run.shares.items()):
        if np.isin(flat, share).any():
            ranks.append(str(rank))
    if len(ranks) < len(heads):
        yield f"all of them are in the shards of rank(s) {', '.join(ranks)}"


def _owners_of_samples(hit: npt.NDArray[np.int64], one: WholeTensor, other: WholeTensor) -> Iterator[str]:
    for run in (other, one):
        begin, found = 0, []
        for owner, microbatch, count in run.pieces:
            samples = np.arange(begin, begin + count)
            if np.isin(samples, hit).any():
                found.append((owner, microbatch))
            begin += count
        if len(found) < len(run.pieces):
            owners = sorted({owner for owner, _ in found})
            microbatches = sorted({microbatch for _, microbatch in found})
            yield f"microbatch(es) {', '.join(map(str, microbatches))} of replica(s) {', '.join(map(str, owners))}"
            return


def _shares_along(
    hit: npt.NDArray[np.int64], axis: int, length: int, shape: tuple[int, ...], run: WholeTensor, heads: Sequence[Head]
) -> Iterator[str]:
    """Yield the tensor parallel ranks with all different places of an axis in their shard."""
    degree = heads[0].degrees["tp"]
    if degree == 1:
        return
    places = {head.rank: head.place["tp"] for head in heads}
    shares: dict[int, npt.NDArray[np.int64]] = {}
    for rank, share in run.shares.items():
        along = np.unique(np.unravel_index(share, shape)[axis])
        if len(along) < length:
            shares[places[rank]] = np.union1d(shares.get(places[rank], along), along)
    if not run.shares and length % degree == 0:
        size = length // degree
        shares = {place: np.arange(place * size, (place + 1) * size) for place in range(degree)}
    for place, along in sorted(shares.items()):
        if np.array_equal(along, hit):
            yield f"the share of tp rank {place}"
        elif np.isin(hit, along).all():
            yield f"in the share of tp rank {place}"


def _attention_heads(hit: npt.NDArray[np.int64], length: int, heads: int, *, is_last: bool) -> Iterator[str]:
    """Yield the attention heads that make up exactly the differing places.

    If queries, keys and values are side by side, name the affected ones too.
    """
    if heads < 2:
        return
    for groups in (1, 3):
        if length % (heads * groups):
            continue
        size = length // (heads * groups)
        found = sorted({int(place) // size for place in hit})
        if len(found) * size != len(hit):
            continue
        numbers = ", ".join(map(str, sorted({number % heads for number in found})))
        of = ""
        if groups > 1:
            kinds = sorted({number // heads for number in found})
            of = " of " + ", ".join(("queries", "keys", "values")[kind] for kind in kinds)
        yield f"head(s) {numbers} of {heads}{of}"
        return


def _is_flat(share: npt.NDArray[np.int64], shape: tuple[int, ...]) -> bool:
    """Return whether a shard is a contiguous range of the flattened tensor."""
    if not len(shape) or not len(share):
        return False
    span = int(share[-1]) - int(share[0]) + 1
    return span == len(share)


def _runs(hit: npt.NDArray[np.int64]) -> str:
    breaks = np.flatnonzero(np.diff(hit) > 1)
    starts, stops = [0, *(breaks + 1)], [*breaks, len(hit) - 1]
    runs = [
        f"{hit[start]}" if start == stop else f"{hit[start]}–{hit[stop]}"
        for start, stop in zip(starts, stops, strict=True)
    ]
    return ", ".join(runs[:_MOST_RUNS]) + (f" … ({len(hit)} in all)" if len(runs) > _MOST_RUNS else "")


def _how(a: Numbers, b: Numbers, differs: Flags, names: RunNames) -> Iterator[str]:
    """Describe how the second tensor differs from the first: zero, a multiple, or rows in a different order."""
    x, y = a[differs], b[differs]
    if not y.any() or not x.any():
        yield f"all of them are 0 in {names.other if not y.any() else names.one}"
        return
    known = (x != 0) & np.isfinite(x) & np.isfinite(y)
    if known.any():
        ratios = y[known] / x[known]
        middle = float(np.median(ratios))
        if known.all() and np.all(np.abs(ratios - middle) <= _SAME_RATIO * abs(middle)):
            yield f"each is {middle:.6g} times as great in {names.other}"
            return
    moved = _moved_rows(a, b)
    if moved:
        yield f"rows are in another order: {moved}"


def _moved_rows(a: Numbers, b: Numbers) -> str:
    """Return the mapping from rows of the first tensor to rows of the second, if both have the same rows."""
    if a.ndim < 2 or len(a) > 1 << 16:
        return ""
    ours = a.reshape(len(a), -1)
    theirs = b.reshape(len(b), -1)
    our_order = np.lexsort(ours.T[::-1])
    their_order = np.lexsort(theirs.T[::-1])
    if not np.allclose(ours[our_order], theirs[their_order], rtol=1e-5, atol=0.0):
        return ""
    pairs = zip(our_order, their_order, strict=True)
    moved = sorted((int(row), int(other)) for row, other in pairs if row != other)
    shown = ", ".join(f"row {row} is row {other} of the other run" for row, other in moved[:_MOST_RUNS])
    return f"{shown} …" if len(moved) > _MOST_RUNS else shown
