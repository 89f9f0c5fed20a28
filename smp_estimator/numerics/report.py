"""A comparison in words, as a table, and as a picture of how the error grows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from smp_config import ConfigError
from smp_config.errors import PackageMissing
from smp_config.numerics import LOSS, OUTPUT, OUTPUT_GRADIENT, PHASES, UPDATE, WEIGHT

if TYPE_CHECKING:
    from smp_estimator.numerics.comparison import Compared, Comparison
    from smp_estimator.numerics.recorded_run import Drift

#: Ranks that a sentence lists.
_MOST_RANKS = 16
#: Smaller errors are drawn there.
_FLOOR = 1e-17


def verdict(found: Comparison) -> list[str]:
    """The verdict in sentences, the first one alone enough."""
    if not found.compared:
        return ["nothing was compared: the runs have no recorded step in common; record both with the same steps"]
    said = []
    if (drifted := found.first_drift) is not None:
        said.append(_of_copies(*drifted))
    first = found.first
    if first is not None:
        said.append(_of_difference(first, bool(said)))
        said += _hints(found, first)
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
    places = [f"step {first.step}" + (f", call {first.call + 1}" if first.call else "")]
    if first.microbatches:
        places.append(f"microbatch(es) {', '.join(map(str, first.microbatches))}")
    ranks = ", ".join(map(str, first.ranks[:_MOST_RANKS])) + (" …" if len(first.ranks) > _MOST_RANKS else "")
    places.append(f"rank(s) {ranks}")
    begin = "the runs differ" if is_second else "differs"
    text = f"{begin} first at {', '.join(places)}: {first.where}"
    if first.text:
        return f"{text}; {first.text}"
    size = "not finite in one of the runs" if math.isinf(first.error) else f"relative error {first.error:.2g}"
    roundings = "" if not math.isfinite(first.roundings) else f", {first.roundings:.2g} roundings of its type"
    return f"{text}; {size}{roundings}, and rounding explains {first.allowed:.1g}"


def _hints(found: Comparison, first: Compared) -> Iterator[str]:
    """What such a difference often comes from."""
    phase = first.key.phase
    at = first.step, first.call
    ours, theirs = (run.moments[at].get(first.key) for run in (found.one, found.other))
    if phase == WEIGHT and first.step == 0:
        yield "the runs began with other weights: the script draws them without a seed, or with one of the rank"
    elif phase == WEIGHT:
        yield "the updates before it do not explain it: weights were changed between two steps, as by loading a checkpoint"
    elif phase == LOSS and not any(each.differs for each in found.compared if each.key.phase == OUTPUT):
        yield (
            "what the model gives is equal, so the loss is put together in another way: a mean over tokens that are not ignored "
            "has another weight in each microbatch"
        )
    elif phase == UPDATE and not first.text:
        yield "the gradients are equal, so the optimizer has other settings or state, or clips them"
    if ours is not None and theirs is not None and ours.norm > 0 and phase in (OUTPUT_GRADIENT, "gradient", UPDATE):
        ratio = theirs.norm / ours.norm
        whole = round(ratio) if ratio >= 1 else round(1 / ratio) if ratio else 0
        if whole > 1 and abs(max(ratio, 1 / ratio) / whole - 1) < 0.05:
            how = f"{whole} times" if ratio > 1 else f"1/{whole} of"
            yield (
                f"the second run has {how} the norm: a loss or gradient that is not divided by {whole} microbatches, steps or "
                "replicas, or divided twice"
            )


def phase_table(found: Comparison) -> Table:
    """By step and phase, the tensor that uses most of what rounding explains."""
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
    return each.error / each.allowed if each.allowed else math.inf if each.error else 0.0


def save_picture(found: Comparison, path: str) -> Path:
    """Draw every tensor's error in causal order beside what rounding explains; the ending of ``path`` says in which format.

    Raises:
        ConfigError: a format that matplotlib does not know.
        PackageMissing: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PackageMissing(f'drawing needs matplotlib ({error}); pip install "smp-estimator[plots]"') from None
    figure = Figure(figsize=(12.0, 5.0), dpi=120)
    canvas = FigureCanvasAgg(figure)
    target = Path(path)
    if target.suffix[1:].lower() not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"the picture {target} ends with {target.suffix!r}; the ending says the format: use .svg, .png or .pdf"
        )
    axes = figure.add_subplot()
    shown = [each for each in found.compared if math.isfinite(each.allowed)]
    for number, phase in enumerate(PHASES):
        points = [(at, each) for at, each in enumerate(shown) if each.key.phase == phase]
        if points:
            errors = [min(max(each.error, _FLOOR), 2.0) for _, each in points]
            axes.plot([at for at, _ in points], errors, ".", markersize=4, color=f"C{number}", label=phase)
    axes.plot(
        range(len(shown)),
        [max(each.allowed, _FLOOR) for each in shown],
        linewidth=0.6,
        color="0.5",
        label="explained by rounding",
    )
    first = found.first
    if first is not None and first in shown:
        at = shown.index(first)
        axes.axvline(at, color="red", linewidth=0.8)
        right = at > len(shown) / 2
        axes.annotate(
            f"first: {first.where}",
            (at, 3.0),
            xytext=(-4 if right else 4, 0),
            textcoords="offset points",
            color="red",
            fontsize=8,
            ha="right" if right else "left",
        )
    starts = {each.step: at for at, each in reversed(list(enumerate(shown)))}
    axes.set_xticks(list(starts.values()), [f"step {step}" for step in starts], fontsize=8)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 3, 10)
    axes.set_ylabel("relative error")
    axes.set_xlabel("tensors in the order in which one makes the next")
    axes.set_title(f"{found.one.name} and {found.other.name}", fontsize=10)
    axes.grid(visible=True, axis="x", linewidth=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=5, fontsize=8, frameon=False)
    figure.savefig(target, bbox_inches="tight")
    return target
