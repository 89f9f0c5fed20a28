"""A comparison in words, and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from smp_records.numerics import GRADIENT, LOSS, OUTPUT, OUTPUT_GRADIENT, PHASES, UPDATE, WEIGHT

if TYPE_CHECKING:
    from smp_estimator.numerics.comparison import Compared, Comparison
    from smp_estimator.numerics.recorded_run import Drift

#: Ranks that a sentence lists.
_MOST_RANKS = 16


def write_verdict(found: Comparison) -> list[str]:
    """Return the verdict in sentences; the first one is enough on its own."""
    if not found.compared:
        return ["nothing was compared: the runs have no recorded step in common; record both with the same steps"]
    said = []
    if (drifted := found.first_drift) is not None:
        said.append(_of_copies(*drifted))
    first = found.first
    if first is not None:
        said.append(_of_difference(first, bool(said)))
        said += found.causes or _hints(found, first)
    else:
        said += found.causes
    said += found.findings
    if not said:
        steps = len({(each.step, each.call) for each in found.compared})
        said.append(f"equal within rounding: {len(found.compared):,} tensors of {steps} step(s)")
    return said


def _of_copies(run: str, drift: Drift) -> str:
    name = f" of {drift.key.name}" if drift.key.name else ""
    return (
        f"copies differ first in {run} at step {drift.step}: {drift.key.phase}{name} is not the same on ranks {drift.ranks[0]} and "
        f"{drift.ranks[1]}, which should have copies; relative distance {drift.error:.2g}"
    )


def _of_difference(first: Compared, is_second: bool) -> str:
    step = f"step {first.step}"
    places = [f"{step}, call {first.call + 1}" if first.call else step]
    if first.microbatches:
        places.append(f"microbatch(es) {', '.join(map(str, first.microbatches))}")
    more = " …" if len(first.ranks) > _MOST_RANKS else ""
    places.append(f"rank(s) {', '.join(map(str, first.ranks[:_MOST_RANKS]))}{more}")
    begin = "the runs differ" if is_second else "differs"
    text = f"{begin} first at {', '.join(places)}: {first.where}"
    if first.text:
        return f"{text}; {first.text}"
    size = "not finite in one of the runs" if math.isinf(first.error) else f"relative error {first.error:.2g}"
    roundings = f", {first.roundings:.2g} roundings of its type" if math.isfinite(first.roundings) else ""
    return f"{text}; {size}{roundings}, and rounding explains {first.allowed:.1g}"


def _hints(found: Comparison, first: Compared) -> Iterator[str]:
    """Yield sentences on frequent causes of such a difference."""
    phase = first.key.phase
    if phase == WEIGHT and first.step == 0:
        yield "the runs began with other weights: the script draws them without a seed, or with one of the rank"
    elif phase == WEIGHT:
        yield "the updates before it do not explain it: weights were changed between two steps, as by loading a checkpoint"
    elif phase == LOSS:
        yield from _loss_hint(found)
    elif phase == UPDATE and not first.text:
        yield "the gradients are equal, so the optimizer has other settings or state, or clips them"
    if phase in (OUTPUT_GRADIENT, GRADIENT, UPDATE):
        yield from _scale_hint(found, first)


def _loss_hint(found: Comparison) -> Iterator[str]:
    outputs_differ = any(each.differs for each in found.compared if each.key.phase == OUTPUT)
    if outputs_differ:
        return
    other_weight = "on each rank" if found.other.heads[0].is_plain else "in each microbatch"
    yield (
        "what the model gives is equal, so the loss is put together in another way: a mean over tokens that are not "
        f"ignored has another weight {other_weight}"
    )


def _scale_hint(found: Comparison, first: Compared) -> Iterator[str]:
    """Yield a sentence if one run's norm is a multiple of the other's."""
    at = first.step, first.call
    ours, theirs = (run.moments[at].get(first.key) for run in (found.one, found.other))
    if ours is None or theirs is None or not ours.norm > 0:
        return
    ratio = theirs.norm / ours.norm
    # A norm that is not finite is a multiple of no other.
    if not ratio or not math.isfinite(ratio):
        return
    multiple = max(ratio, 1 / ratio)
    whole = round(multiple)
    if whole > 1 and abs(multiple / whole - 1) < 0.05:
        how = f"{whole} times" if ratio > 1 else f"1/{whole} of"
        yield (
            f"the second run has {how} the norm: a loss or gradient that is not divided by {whole} microbatches, steps or "
            "replicas, or divided twice"
        )


def phase_table(found: Comparison) -> Table:
    """Return a table of the tensor that comes closest to, or exceeds most, its allowed error, by step and phase."""
    worst: dict[tuple[int, int, str], Compared] = {}
    counts: dict[tuple[int, int, str], int] = {}
    for each in found.compared:
        at = each.step, each.call, each.key.phase
        counts[at] = counts.get(at, 0) + 1
        if at not in worst or _used(each) > _used(worst[at]):
            worst[at] = each
    table = Table()
    for column in ("step", "phase", "tensors", "greatest error", "explained", "where", ""):
        table.add_column(column, overflow="fold")
    first = found.first
    for (step, call, phase), each in sorted(worst.items(), key=lambda item: (*item[0][:2], PHASES.index(item[0][2]))):
        sign = "[red]differs[/red]" if each.differs else "[green]equal[/green]"
        if first is not None and (step, call, phase) == (first.step, first.call, first.key.phase):
            sign, each = "[red]first[/red]", first
        number = f"{step}" + (f".{call + 1}" if call else "")
        table.add_row(
            number,
            phase,
            str(counts[step, call, phase]),
            f"{each.error:.2g}",
            f"{each.allowed:.2g}",
            escape(each.where),
            sign,
        )
    return table


def _used(each: Compared) -> float:
    if each.allowed:
        return each.error / each.allowed
    return math.inf if each.error else 0.0
