"""The first place where two trainings differ by more than rounding, in causal order.

The allowed error follows from the types, the lengths of the sums, and the differences that both runs have already. An
earlier error may be passed on and grow; only a new one is a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from smp_estimator.numerics.causal_order import common_keys_in_order, time_by_calls
from smp_estimator.numerics.recorded_run import (
    Drift,
    RecordedRun,
    TensorKey,
    Total,
    Totals,
    estimate_distance,
    relative_error,
    without_calls,
)
from smp_records.numerics import (
    BUFFER,
    GRADIENT,
    INPUT,
    LOSS,
    LOSS_SCALE,
    NUMBERS_OF_CALL,
    OUTPUT,
    OUTPUT_GRADIENT,
    PHASES,
    ROUNDING,
    SMALL,
    UPDATE,
    WEIGHT,
)

#: Roundings of one element that an operation and its neighbours may make, and of each of the terms of a sum, in float32.
_ROUNDINGS, _SUMMED = 16.0, 32.0
#: An error that is there already may be handed on this many times greater.
_HANDED_ON = 8.0
#: What is allowed at most, relative to the tensor's norm; twice the tensor is an error of one half.
_MOST = 0.25
#: Gradients are compared relative to at least these parts of the root mean square of all: sums that cancel have no size of their
#: own.
_LEAST_GRADIENT, _LEAST_OUTPUT_GRADIENT = 1e-2, 1e-3
#: Times of each other that the norms of all updates may be.
_UPDATE_RATIO = 1.5
#: Of numbers that must be equal.
_EXACT = 1e-9

#: Phases in which a tensor is a rank's state, not the result of a call.
_STATE = (WEIGHT, BUFFER, GRADIENT, UPDATE)


@dataclass(frozen=True)
class Compared:
    """One tensor of both runs.

    Attributes:
        error: distance of the two, relative to their size.
        allowed: what rounding explains.
        roundings: the error in units of the type's rounding.
        ranks: of the second run that have it; of those with the error, where the runs can be compared piece by piece.
        microbatches: likewise.
    """

    step: int
    call: int
    key: TensorKey
    error: float
    allowed: float
    roundings: float
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...] = ()
    text: str = ""

    @property
    def differs(self) -> bool:
        """Return whether the error exceeds what rounding explains; no error is none, even if nothing finite explains it."""
        return self.error != 0 and not self.error <= self.allowed

    @property
    def where(self) -> str:
        """Return the name of the tensor in words."""
        phase, name = self.key.phase, self.key.name
        if not name and phase in (INPUT, OUTPUT, OUTPUT_GRADIENT):
            name = "the model"
        if not name:
            return phase
        call, tensor = 0, self.key.nth
        if phase in (OUTPUT, OUTPUT_GRADIENT):
            call, tensor = divmod(self.key.nth, NUMBERS_OF_CALL)
        words = [f"{phase} of {name}"]
        if call:
            words.append(f"call {call + 1}")
        if tensor:
            words.append(f"tensor {tensor + 1}")
        return ", ".join(words)


@dataclass
class Comparison:
    """The result of comparing two runs: their common tensors and the differences.

    Attributes:
        compared: in causal order.
        drifts: of either run, with its name.
        alone: tensors that only one run has, or for which the runs have different parts.
        findings: faults that facts show, beside the numbers.
        causes: likely causes of the first difference.
    """

    one: RecordedRun
    other: RecordedRun
    compared: list[Compared] = field(default_factory=list)
    drifts: list[tuple[str, Drift]] = field(default_factory=list)
    alone: set[TensorKey] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Compared | None:
        """Return the first tensor with an error that rounding does not explain."""
        return next((each for each in self.compared if each.differs), None)

    @property
    def first_drift(self) -> tuple[str, Drift] | None:
        """Return the first copies that differ, unless the runs themselves differ earlier."""
        found = min(self.drifts, key=lambda drift: _order(drift[1].step, drift[1].call, drift[1].key), default=None)
        first = self.first
        if found is None or first is None:
            return found
        is_before = _order(found[1].step, found[1].call, found[1].key) <= _order(first.step, first.call, first.key)
        return found if is_before else None

    @property
    def is_equal(self) -> bool:
        """Return whether rounding explains all compared differences, and nothing else was found."""
        return self.first is None and not self.drifts and not self.findings


def _order(step: int, call: int, key: TensorKey) -> tuple[int, int, int]:
    return step, call, PHASES.index(key.phase)


def compare(one: RecordedRun, other: RecordedRun) -> Comparison:
    """Compare two recorded trainings moment by moment."""
    found = Comparison(one, other)
    found.drifts = [(run.name, drift) for run in (one, other) for drift in run.drifts]
    common = [at for at in one.moments if at in other.moments]
    if not common:
        found.notes.append("the runs have no recorded step in common")
    judge = _Judge(one, other)
    first = True
    for at in common:
        totals = one.moments[at], other.moments[at]
        ordering = 0 if one.degrees["pp"] <= other.degrees["pp"] else 1
        if one.was_pipeline or other.was_pipeline:
            calls, totals = totals, (without_calls(totals[0]), without_calls(totals[1]))
            time_by_calls(totals[ordering], calls[ordering], calls[1 - ordering])
        keys = common_keys_in_order(totals[ordering], totals[1 - ordering])
        found.alone |= set(totals[0]) ^ set(totals[1])
        found.compared += judge.moment(at, totals, keys, found.alone, is_first=first)
        first = False
    found.notes += _notes(one, other)
    return found


def _notes(one: RecordedRun, other: RecordedRun) -> Iterator[str]:
    yield from (*one.warnings, *other.warnings)
    if one.degrees == other.degrees and one.heads[0].world == other.heads[0].world:
        differing = [at for at, text in one.random.items() if other.random.get(at, text) != text]
        if differing:
            step, _, rank = min(differing)
            yield f"random numbers differ from step {step} on, first on rank {rank}: that matters where the model has dropout"


class _Judge:
    """Judge of differences, with the differences of earlier steps that it allows for."""

    def __init__(self, one: RecordedRun, other: RecordedRun) -> None:
        self._runs = one, other
        self._rounding = max(one.rounding, other.rounding)
        #: By parameter, how far the weights may be apart; updates add to it.
        self._weights_apart: dict[str, float] = {}
        #: By parameter, the greatest error of its gradients so far: an optimizer with momentum remembers it.
        self._gradients_apart: dict[str, float] = {}
        self._last_step = 0

    def moment(
        self,
        at: tuple[int, int],
        totals: tuple[Totals, Totals],
        keys: list[TensorKey],
        alone: set[TensorKey],
        *,
        is_first: bool,
    ) -> Iterator[Compared]:
        ours, theirs = totals
        self._begin(at[0], ours, is_first)
        noise = 0.0
        moved = self._relative_weights(totals, keys) if at[0] and not is_first else 0.0
        least = {phase: _least(ours, theirs, phase) for phase in (OUTPUT_GRADIENT, GRADIENT)}
        gradients: dict[str, Compared] = {}
        if at == min(self._runs[1].moments):
            yield from self._equal_batches(at)
        updates = [0.0, 0.0]
        for key in keys:
            a, b = ours[key], theirs[key]
            has_norm = key.phase != LOSS
            if a.elements != b.elements and key.phase not in (LOSS, LOSS_SCALE):
                if key.phase in (*_STATE, INPUT):
                    yield self._of_other_size(at, key, a, b)
                    continue
                if not _has_no_batch(a, b):  # their places in the whole are not known
                    alone.add(key)
                    continue
                a, b = (_per_piece(total) if key.phase == OUTPUT else total for total in (a, b))
                has_norm = False
            if key.phase == UPDATE:
                updates = [updates[0] + a.square, updates[1] + b.square]
                found = self._update(at, a, b, key.name in gradients, totals)
            else:
                found = self._compared(at, a, b, totals, noise, moved, least, has_norm=has_norm)
            if found.key.phase == GRADIENT:
                gradients[key.name] = found
            if key.phase in (OUTPUT, LOSS, OUTPUT_GRADIENT, GRADIENT) and not found.differs:
                noise = max(noise, found.error)
            yield self._placed(found, a, b)
        yield from self._of_all_updates(at, *updates)

    def _of_all_updates(self, at: tuple[int, int], ours: float, theirs: float) -> Iterator[Compared]:
        """Compare the sums of the squares of all updates; updates that are not finite were found one by one."""
        if min(ours, theirs) <= 0 or not math.isfinite(ours + theirs):
            return
        ratio = math.sqrt(theirs / ours)
        error, allowed = 1 - min(ratio, 1 / ratio), 1 - 1 / _UPDATE_RATIO
        if error > allowed:
            key = TensorKey(UPDATE, "all parameters", 0)
            ranks = tuple(head.rank for head in self._runs[1].heads)
            text = f"the updates of all parameters together have {ratio:.3g} times the norm"
            yield Compared(*at, key, error, allowed, math.nan, ranks, (), text)

    def _begin(self, step: int, ours: Totals, is_first: bool) -> None:
        """Scale the distances of the weights by the number of steps that were not recorded since the last one."""
        skipped = step - self._last_step
        if skipped > 1 and not is_first:
            self._weights_apart = {name: apart * skipped for name, apart in self._weights_apart.items()}
        self._last_step = step

    def _relative_weights(self, totals: tuple[Totals, Totals], keys: list[TensorKey]) -> float:
        """Return the distance between all weights of the two runs that are finite, relative to their norm."""
        apart, size = 0.0, 0.0
        ours, theirs = totals
        for key in keys:
            one, other = ours[key], theirs[key]
            if key.phase != WEIGHT or one.is_bad or other.is_bad:  # that is a finding of its own, or alike in both
                continue
            apart += estimate_distance(one.projections, other.projections) ** 2
            size += one.square
        return math.sqrt(apart / size) if size else 0.0

    def _equal_batches(self, at: tuple[int, int]) -> Iterator[Compared]:
        for run in self._runs:
            owners = run.equal_batches()
            if not owners:
                continue
            keys: set[TensorKey] = set()
            for totals in run.moments.values():
                keys.update(total.key for total in totals.values() if total.key.phase == INPUT)
            totals_there = run.moments.get(at, {}).values()
            pieces = next((total.pieces for total in totals_there if total.key in keys), {})
            ranks: set[int] = set()
            for piece, part in pieces.items():
                if piece.owner in owners:
                    ranks.update(part.ranks)
            if not ranks:
                ranks = {head.rank for head in run.heads}
            text = (
                f"in {run.name} the replicas {list(owners)} have read the same batch in every step, so that they train as one: "
                f"{run.sampler_advice}"
            )
            yield Compared(*at, min(keys), 1.0, 0.0, math.nan, tuple(sorted(ranks)), (), text)

    def _of_other_size(self, at: tuple[int, int], key: TensorKey, a: Total, b: Total) -> Compared:
        what = "numbers of the batch" if key.phase == INPUT else "elements"
        text = f"{a.elements:,} {what} in {self._runs[0].name}, {b.elements:,} in {self._runs[1].name}"
        return Compared(*at, key, math.inf, 0.0, math.inf, tuple(sorted(b.ranks)), (), text)

    def _compared(
        self,
        at: tuple[int, int],
        a: Total,
        b: Total,
        totals: tuple[Totals, Totals],
        noise: float,
        moved: float,
        least: dict[str, float],
        *,
        has_norm: bool,
    ) -> Compared:
        key, ours = a.key, totals[0]
        if key.phase == LOSS:
            x, y = a.projections[0] / max(a.elements, 1), b.projections[0] / max(b.elements, 1)
            apart, size, norms = abs(x - y), max(abs(x), abs(y)), 0.0
        else:
            apart, size = estimate_distance(a.projections, b.projections), max(a.norm, b.norm)
            norms = abs(a.norm - b.norm) if has_norm else 0.0
            if key.phase in least:
                size = max(size, least[key.phase] * math.sqrt(a.elements))
            if key.phase == GRADIENT and a.elements == a.columns:
                size = max(size, self._summed_over(a, ours))
        error = relative_error(max(apart, norms), size, a, b)
        allowed = self._allowed(at, a, b, noise, moved)
        if key.phase == OUTPUT and moved and size:
            allowed = min(allowed + 2.0 * _moved_by_biases(a, totals) / size, _MOST)
        unit = max(a.rounding, b.rounding) or ROUNDING["float64"]
        return Compared(*at, key, error, allowed, error / unit, tuple(sorted(b.ranks)))

    def _summed_over(self, gradient: Total, ours: Totals) -> float:
        """Return the norm of the output gradients that are summed for the gradient of a bias or a norm's weight.

        If the terms cancel, their rounding errors remain.
        """
        module = gradient.key.name.rpartition(".")[0]
        found = [total for key, total in ours.items() if key.phase == OUTPUT_GRADIENT and key.name == module]
        return math.sqrt(sum(total.square for total in found if total.columns == gradient.columns))

    def _allowed(self, at: tuple[int, int], a: Total, b: Total, noise: float, moved: float) -> float:
        phase = a.key.phase
        own = max(a.rounding, b.rounding)
        if phase == LOSS_SCALE or (phase == INPUT and not own):
            return _EXACT
        # The same numbers were rounded the same way; what is left is that of the projections.
        stored = _ROUNDINGS * (own if a.dtype != b.dtype else min(own, ROUNDING["float32"]))
        if phase == INPUT:
            return _ROUNDINGS * own + _SUMMED * ROUNDING["float32"] + _EXACT
        if phase == BUFFER:
            return stored + _EXACT
        if phase == WEIGHT:
            if not self._weights_apart:
                return stored
            apart = self._weights_apart.get(a.key.name, 0.0)
            if not a.norm:
                return math.inf if apart else _HANDED_ON * own
            return 2.0 * apart / a.norm + _HANDED_ON * own
        rounding = max(own, self._rounding)
        base = _ROUNDINGS * rounding + _SUMMED * ROUNDING["float32"] * math.sqrt(a.length)
        if phase == GRADIENT:  # summed over microbatches and replicas, too
            base *= 2.0
        rows = math.sqrt(max(a.elements // max(a.columns, 1), 1))
        return min(max(base, _HANDED_ON * noise, 4.0 * moved * rows), _MOST)

    def _update(
        self, at: tuple[int, int], a: Total, b: Total, has_gradient: bool, totals: tuple[Totals, Totals]
    ) -> Compared:
        """Compare the updates of a parameter.

        An adaptive optimizer makes a full update even if an element's gradient is only rounding error. Such elements are
        counted.
        """
        apart, size = estimate_distance(a.projections, b.projections), max(a.norm, b.norm)
        error = relative_error(apart, size, a, b)
        own = max(a.rounding, b.rounding)
        unit = own or ROUNDING["float64"]
        if not math.isfinite(apart + size):
            # No later error is explained by it: a run with such an update has weights that are not finite either.
            return Compared(*at, a.key, error, _HANDED_ON * own, error / unit, tuple(sorted(b.ranks)))
        weight = totals[0].get(TensorKey(WEIGHT, a.key.name, 0))
        # An update is the difference of two stored weights, so their rounding is in it.
        stored = 0.0
        if weight and size:
            stored = _HANDED_ON * own * weight.norm / size
        allowed = stored + _HANDED_ON * own
        if has_gradient:
            source, other = (found[TensorKey(GRADIENT, a.key.name, 0)] for found in totals)
            gradient = estimate_distance(source.projections, other.projections) / source.norm if source.norm else 0.0
            apart_before = max(self._gradients_apart.get(a.key.name, 0.0), gradient)
            self._gradients_apart[a.key.name] = apart_before
            turned = _turned_around(source, apart_before)
            # Elements near its epsilon move by their relative error, which is heavy-tailed: its mean square is that of the root.
            heavy = 2.0 * math.sqrt(apart_before)
            allowed += 2.0 if turned is None else max(_HANDED_ON * apart_before, 4.0 * math.sqrt(turned), heavy)
        explained = apart if error <= allowed else 0.0
        self._weights_apart[a.key.name] = self._weights_apart.get(a.key.name, 0.0) + max(
            1.5 * explained, min(allowed, 2.0) * size
        )
        return Compared(*at, a.key, error, allowed, error / unit, tuple(sorted(b.ranks)))

    def _placed(self, found: Compared, a: Total, b: Total) -> Compared:
        """Add the ranks and microbatches that have the error, if both runs have the same pieces."""
        if not found.differs or a.pieces.keys() != b.pieces.keys() or len(a.pieces) < 2:
            return found
        ranks: set[int] = set()
        microbatches: set[int] = set()
        for piece, part in b.pieces.items():
            other = a.pieces[piece]
            distance = estimate_distance(other.projections, part.projections)
            if relative_error(distance, max(part.norm, other.norm), other, part) <= found.allowed:
                continue
            ranks |= part.ranks
            if piece.microbatch is not None:
                microbatches.add(piece.microbatch)
        if not ranks:
            return found
        return replace(found, ranks=tuple(sorted(ranks)), microbatches=tuple(sorted(microbatches)))


def _moved_by_biases(result: Total, totals: tuple[Totals, Totals]) -> float:
    """Return how far different biases move the sum over a module's output: each row by the same amount."""
    ours, theirs = totals
    rows = result.elements // max(result.columns, 1)
    moved = 0.0
    for key, a in ours.items():
        if key.phase != WEIGHT or key not in theirs:
            continue
        is_of_module = key.name.rpartition(".")[0] == result.key.name
        is_vector = a.elements == a.columns == result.columns
        if is_of_module and is_vector:
            moved += estimate_distance(a.projections, theirs[key].projections)
    return rows * moved


def _has_no_batch(a: Total, b: Total) -> bool:
    """Return whether a module's output is the same for every microbatch, like that of a position embedding."""
    return a.elements * len(b.pieces) == b.elements * len(a.pieces)


def _per_piece(total: Total) -> Total:
    """Return the mean over microbatches of a tensor without a batch dimension."""
    count = len(total.pieces)
    projections = [number / count for number in total.projections]
    return replace(total, elements=total.elements // count, square=total.square / count, projections=projections)


def _least(ours: Totals, theirs: Totals, phase: str) -> float:
    """Return the smallest size that gradients of a phase are compared relative to.

    It is a fixed part of the root mean square of the elements that both runs have.
    """
    square, elements = 0.0, 0
    for key, total in ours.items():
        if key.phase != phase or key not in theirs:
            continue
        if math.isfinite(total.square):
            square += total.square
            elements += total.elements
    if not elements:
        return 0.0
    part = _LEAST_GRADIENT if phase == GRADIENT else _LEAST_OUTPUT_GRADIENT
    return part * math.sqrt(square / elements)


def _turned_around(gradient: Total, error: float) -> float | None:
    """Return the part of a gradient's elements that an error of this size may flip the sign of.

    Return None if it may be all of them.
    """
    for limit, count in zip(SMALL, gradient.small, strict=False):
        if 4.0 * error <= limit:
            return count / gradient.elements
    return None
