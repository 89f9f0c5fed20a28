"""One recorded training: the files of its ranks, put together to the numbers of whole tensors and whole batches."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from smp_config import ConfigError
from smp_records.numerics import (
    EVERY_VARIABLE,
    FILE_PREFIX,
    FILE_SUFFIX,
    INPUT,
    LOSS,
    NUMBERS_OF_CALL,
    OUTPUT,
    OUTPUT_GRADIENT,
    PHASES,
    PROJECTIONS,
    ROUNDING,
    VARIABLE,
    Head,
    RecordedMoment,
    RecordedValue,
    parse,
)

#: Largest file of one rank that is read, in bytes.
_LARGEST = 1 << 31

#: Copies that differ by more than their type rounds: this many times.
_COPIES = 16

#: Inputs with fewer numbers may be equal by chance.
_LEAST_INPUT = 8


class TensorKey(NamedTuple):
    """A tensor of a moment."""

    phase: str
    name: str
    nth: int


class MicrobatchPiece(NamedTuple):
    """The part of a tensor that belongs to one microbatch of one owner."""

    owner: int | None
    microbatch: int | None


@dataclass
class PartialSum:
    """A sum over some parts of a tensor; the fields are those of :class:`~smp_records.numerics.RecordedValue`."""

    elements: int = 0
    square: float = 0.0
    projections: list[float] = field(default_factory=lambda: [0.0] * PROJECTIONS)
    ranks: set[int] = field(default_factory=set)

    def add(self, value: RecordedValue) -> None:
        """Add a part."""
        self.elements += value.elements
        self.square += value.square
        self.projections = [a + b for a, b in zip(self.projections, value.projections, strict=True)]

    def merge(self, other: PartialSum) -> None:
        """Add another sum."""
        self.elements += other.elements
        self.square += other.square
        self.projections = [a + b for a, b in zip(self.projections, other.projections, strict=True)]
        self.ranks = self.ranks | other.ranks

    @property
    def is_bad(self) -> bool:
        """Return whether an element is not finite."""
        return not math.isfinite(self.square) or not all(map(math.isfinite, self.projections))

    @property
    def norm(self) -> float:
        """Return the square root of the sum of squares, or NaN if the sum is negative or NaN."""
        return math.sqrt(self.square) if self.square >= 0 else math.nan


def relative_error(distance: float, size: float, one: PartialSum, other: PartialSum) -> float:
    """Return a distance relative to a size; for sums that are not finite, infinity if only one is such, and 0 if both are."""
    if one.is_bad != other.is_bad:
        return math.inf
    if one.is_bad:
        return 0.0
    if not math.isfinite(distance + size):
        return math.inf
    if not size:
        return 0.0
    return distance / size


@dataclass
class Total(PartialSum):
    """A whole tensor, or the sum over all microbatches and replicas."""

    key: TensorKey = TensorKey("", "", 0)  # noqa: RUF009 - a named tuple does not change
    dtype: str = ""
    columns: int = 1
    greatest: float = 0.0
    small: list[int] = field(default_factory=list)
    time: float = math.inf  # when a rank had it first
    pieces: dict[MicrobatchPiece, PartialSum] = field(default_factory=dict)

    @property
    def rounding(self) -> float:
        """Return the rounding error of the tensor's type; 0 for integers."""
        return ROUNDING.get(self.dtype, 0.0)

    @property
    def length(self) -> int:
        """Return the number of terms in the longest sum that computes an element, estimated from the shape."""
        return max(self.columns, self.elements // max(self.columns, 1), 1)


class Drift(NamedTuple):
    """Ranks that should have copies of a tensor, and do not."""

    step: int
    call: int
    key: TensorKey
    ranks: tuple[int, int]
    error: float


Totals = dict[TensorKey, Total]


def without_calls(totals: Totals) -> Totals:
    """Add up all calls of a module in a microbatch: pipeline stages may make them in a different order."""
    made: Totals = {}
    for key, total in totals.items():
        if key.phase not in (OUTPUT, OUTPUT_GRADIENT):
            made[key] = total
            continue
        key = key._replace(nth=key.nth % NUMBERS_OF_CALL)
        if key not in made:
            # A copy in all its parts, since merge() changes them.
            made[key] = replace(
                total,
                key=key,
                pieces={piece: replace(part) for piece, part in total.pieces.items()},
                ranks=set(total.ranks),
            )
            continue
        known = made[key]
        known.merge(total)
        known.time, known.greatest = min(known.time, total.time), max(known.greatest, total.greatest)
        for piece, part in total.pieces.items():
            known.pieces.setdefault(piece, PartialSum()).merge(part)
    return made


@dataclass
class RecordedRun:
    """A training.

    Attributes:
        name: the folder, as it was given.
        moments: by update and call, the tensors.
        random: by update, call and rank, the digest of the generators.
        drifts: copies that differ.
        warnings: sentences about missing records.
    """

    name: str
    heads: list[Head]
    moments: dict[tuple[int, int], Totals]
    random: dict[tuple[int, int, int], str]
    drifts: list[Drift]
    warnings: list[str]

    @property
    def degrees(self) -> dict[str, int]:
        """Return the parallel degrees by axis."""
        return self.heads[0].degrees

    @property
    def was_pipeline(self) -> bool:
        """Return whether the run was a pipeline at any time: stages may make a module's calls in a different order."""
        is_pipeline = self.degrees["pp"] > 1
        return is_pipeline or any(head.was_pipeline for head in self.heads)

    @property
    def title(self) -> str:
        """Return the run's degrees in words."""
        head = self.heads[0]
        degrees = " × ".join(f"{name} {degree}" for name, degree in head.degrees.items() if degree > 1)
        return f"{head.world} rank(s), {degrees or 'all degrees 1'}, {head.microbatches} microbatch(es)"

    @property
    def sampler_advice(self) -> str:
        """Return what gives each replica a batch of its own."""
        if self.heads[0].is_plain:
            return "give the DataLoader a DistributedSampler, or let each rank take a part of its own of the data"
        return (
            "give the sampler num_replicas=smp.dp_size() and rank=smp.dp_rank() (smp.rdp_size() and smp.rdp_rank() with a "
            "prescaled batch)"
        )

    @property
    def rounding(self) -> float:
        """Return the rounding error of the coarsest type that the run's modules compute in."""
        types = {
            total.rounding for totals in self.moments.values() for total in totals.values() if total.key.phase != INPUT
        }
        return max([*types, *(head.rounding for head in self.heads)], default=ROUNDING["float32"])

    @classmethod
    def read(cls, folder: str) -> RecordedRun:
        """Read the files of a folder; ranks may still be writing them.

        Raises:
            ConfigError: there are no files, or broken ones.
        """
        place = Path(folder)
        files = sorted(place.rglob(f"{FILE_PREFIX}*{FILE_SUFFIX}")) if place.is_dir() else []
        if not files:
            raise ConfigError(
                f"{folder} holds no {FILE_PREFIX}*{FILE_SUFFIX}; ranks write them into the folder that {VARIABLE} or "
                f"smp.record_numerics names ({place.absolute()} was looked into): run the job with it, and name that folder",
                code="SMP119",
            )
        return cls.of(folder, [_read(file) for file in files])

    @classmethod
    def of(cls, name: str, files: Iterable[tuple[Head, list[RecordedMoment]]]) -> RecordedRun:
        """Combine the records of all ranks into a run.

        Raises:
            ConfigError: the files are of different jobs.
        """
        found = sorted(files, key=lambda file: file[0].rank)
        heads = [head for head, _ in found]
        if any((head.world, head.degrees) != (heads[0].world, heads[0].degrees) for head in heads):
            raise ConfigError(
                f"{name} holds files of jobs with {' and '.join(sorted({str(head.world) for head in heads}))} ranks, or of "
                "different degrees; each job has a folder of its own: name one, or remove the files of the other",
                code="SMP119",
            )
        if len({head.rank for head in heads}) < len(heads):
            raise ConfigError(
                f"{name} holds several files of one rank in folders of their own; name the folder of one job",
                code="SMP119",
            )
        missing = sorted(set(range(heads[0].world)) - {head.rank for head in heads})
        warnings = (
            [f"{name} has no file of rank(s) {missing[:16]}: their part of each tensor is missing"] if missing else []
        )
        moments: dict[tuple[int, int], Totals] = {}
        random: dict[tuple[int, int, int], str] = {}
        drifts: list[Drift] = []
        for at, by_rank in _by_moment(found).items():
            moments[at] = _combined(at, by_rank, drifts)
            random.update({(*at, rank): text for rank, (text, _) in by_rank.items() if text})
        return cls(name, heads, dict(sorted(moments.items())), random, drifts, warnings)

    def equal_batches(self) -> tuple[int, ...]:
        """Return owners that read the same batches in every recorded step, although the steps differ.

        Empty if there are none.
        """
        seen: list[dict[int, tuple[float, ...]]] = []
        for totals in self.moments.values():
            inputs = {key: total for key, total in totals.items() if _is_large_input(total)}
            if inputs:
                seen.append(_read_by(inputs))
        if len(seen) < 2 or len(seen[0]) < 2:
            return ()
        first, batch = next(iter(seen[0].items()))
        steps_are_equal = all(read.get(first) == batch for read in seen)
        return () if steps_are_equal else _first_with_equal_batches(seen)


def _is_large_input(total: Total) -> bool:
    """Return whether a tensor is a batch with so many elements that two equal ones are no accident."""
    return total.key.phase == INPUT and total.elements >= _LEAST_INPUT


def _read_by(totals: Mapping[TensorKey, Total]) -> dict[int, tuple[float, ...]]:
    """Return the projections of the batch that each owner has read in a moment."""
    found: dict[int, list[float]] = {}
    for total in totals.values():
        for piece, part in total.pieces.items():
            if piece.owner is None:
                continue
            numbers = found.setdefault(piece.owner, [0.0] * PROJECTIONS)
            for index, number in enumerate(part.projections):
                numbers[index] += number
    rounded = {}
    for owner, numbers in sorted(found.items()):
        rounded[owner] = tuple(round(number, 6) for number in numbers)
    return rounded


def _read(file: Path) -> tuple[Head, list[RecordedMoment]]:
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror or error}); change its permissions", code="SMP119"
        ) from None
    if len(content) > _LARGEST:
        raise ConfigError(
            f"{file} has more than {_LARGEST:,} bytes; record fewer steps, with a greater {EVERY_VARIABLE}",
            code="SMP119",
        )
    text = content.decode("utf-8", errors="replace")
    return parse(io.StringIO(text, newline="\n"), str(file))


_Told = dict[int, tuple[str, list[RecordedValue]]]


def _by_moment(files: Iterable[tuple[Head, list[RecordedMoment]]]) -> dict[tuple[int, int], _Told]:
    """Return the records of the last start, by update and call and then by rank."""
    found: dict[tuple[int, int], _Told] = {}
    for head, moments in files:
        for at, lines in _lines_of_moments(moments).items():
            values: list[RecordedValue] = []
            text = ""
            for moment in lines.values():
                values += moment.values
                text = text or moment.random
            found.setdefault(at, {})[head.rank] = text, values
    return found


def _first_with_equal_batches(seen: list[dict[int, tuple[float, ...]]]) -> tuple[int, ...]:
    """Return the first owners with equal batches in all steps; ``seen`` has the batch of each owner, by step."""
    owners_of: dict[tuple[tuple[float, ...] | None, ...], list[int]] = {}
    for owner in seen[0]:
        batches = tuple(read.get(owner) for read in seen)
        owners_of.setdefault(batches, []).append(owner)
    for owners in owners_of.values():
        if len(owners) > 1:
            return tuple(owners)
    return ()


def _lines_of_moments(moments: Iterable[RecordedMoment]) -> dict[tuple[int, int], dict[str, RecordedMoment]]:
    written: dict[tuple[int, int], dict[str, RecordedMoment]] = {}
    for moment in moments:
        # A step and its update are a line each; of a step that was repeated after a restart, the later line counts.
        kind = "step" if moment.random else "update"
        written.setdefault((moment.step, moment.call), {})[kind] = moment
    return written


def _combined(at: tuple[int, int], by_rank: _Told, drifts: list[Drift]) -> Totals:
    totals: Totals = {}
    counted: dict[tuple[TensorKey, MicrobatchPiece, str], tuple[int, RecordedValue]] = {}
    for rank, (_, values) in sorted(by_rank.items()):
        for value in values:
            key, piece = TensorKey(value.phase, value.name, value.nth), MicrobatchPiece(value.owner, value.microbatch)
            total = totals.setdefault(key, Total(key=key, dtype=value.dtype, columns=value.columns))
            part = total.pieces.setdefault(piece, PartialSum())
            total.ranks.add(rank)
            part.ranks.add(rank)
            total.time = min(total.time, value.time)
            former = counted.setdefault((key, piece, value.part), (rank, value))
            if former[1] is not value:
                error = _copies_error(former[1], value) if former[0] != rank else 0.0
                if error > 0:
                    drifts.append(Drift(*at, key, (former[0], rank), error))
                continue
            total.add(value)
            part.add(value)
            total.greatest = max(total.greatest, value.greatest)
            total.small = [a + b for a, b in zip(total.small or [0] * len(value.small), value.small, strict=False)]
    return totals


def _copies_error(one: RecordedValue, other: RecordedValue) -> float:
    """Return the distance between two copies relative to their norm, or 0 if rounding explains it."""
    if one.phase not in PHASES or one.phase == LOSS:
        return 0.0
    if not one.is_finite or not other.is_finite:
        return 0.0
    # Equal bits need no estimate, and zeros have no norm to relate it to.
    is_same = one.bits == other.bits and one.projections == other.projections
    scale = math.sqrt(max(one.square, other.square))
    if is_same or not scale:
        return 0.0
    error = estimate_distance(one.projections, other.projections) / scale
    limit = _COPIES * ROUNDING.get(one.dtype, 0.0)
    if error <= limit:
        return 0.0
    return error


def estimate_distance(one: Iterable[float], other: Iterable[float]) -> float:
    """Return the expected distance between two tensors, from their projections."""
    squares = [(a - b) ** 2 for a, b in zip(one, other, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
