"""A step as a picture: one lane per rank, what it computed for which microbatch, and where it waited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError
from smp_estimator.timeline.chrome import KIND_WORDS

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import RankStep, Step

_COLOURS = {"F": "#5b8fd9", "B": "#e8964a", "S": "#9b9b9b"}

#: Lanes of more ranks would be thinner than their names.
_MOST_RANKS = 128

#: A number is written where its block is at least this part of the step wide.
_WIDE_ENOUGH = 0.012

#: Blocks of one microbatch that lie this close (part of the step) carry one number.
_TOUCHING = 0.002

_LANE = 0.82


def save_picture(step: Step, path: str | Path) -> Path:
    """Draw a step; the ending of ``path`` says in which format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: too many ranks, or a format that matplotlib does not know.
        RuntimeError: matplotlib is not installed.
    """
    if len(step.ranks) > _MOST_RANKS:
        raise ConfigError(
            f"the step has {len(step.ranks)} ranks, too many lanes for one picture (most: {_MOST_RANKS}); write --trace FILE.json "
            "and open it in ui.perfetto.dev, which can zoom"
        )
    try:
        # No pyplot: its global state and its choice of a screen are not needed for a file.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f'drawing needs matplotlib ({error}); pip install "smp-estimator[plots]", or write --trace FILE.json'
        ) from None
    figure = Figure(figsize=(12.0, 1.3 + 0.45 * len(step.ranks)), dpi=120)
    canvas = FigureCanvasAgg(figure)
    target = Path(path)
    if target.suffix[1:].lower() not in canvas.get_supported_filetypes():
        raise ConfigError(
            f"the picture {target} ends with {target.suffix!r}; the ending says the format: use .png, .svg or .pdf"
        )
    axes = figure.add_subplot()
    start, stop = step.window
    width = (stop - start) * 1e3
    for lane, rank in enumerate(step.ranks):
        _draw_lane(axes, lane, rank, start, width)
    axes.set_xlim(0, width)
    axes.set_ylim(len(step.ranks) - 0.5, -0.5)
    axes.set_yticks(
        range(len(step.ranks)), [f"rank {r.rank}  {step.idle_of(r):.0%} idle" for r in step.ranks], fontsize=8
    )
    axes.set_xlabel("milliseconds")
    axes.set_title(title(step), fontsize=10)
    for kind, colour in _COLOURS.items():
        axes.plot([], [], linewidth=6, color=colour, label=KIND_WORDS[kind])
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.35 / len(step.ranks) - 0.12), ncol=3, fontsize=8, frameon=False
    )
    figure.savefig(target, bbox_inches="tight")
    return target


def title(step: Step) -> str:
    """``step 12: 311 ms, 23.1 % idle ((p − 1)/(m + p − 1) = 20.0 % for 2 stages, 4 microbatches)``."""
    return (
        f"{step.title}: {step.makespan * 1e3:.3g} ms, {step.idle:.1%} idle ((p − 1)/(m + p − 1) = {step.expected_idle:.1%} "
        f"for {step.stages} stages, {step.microbatches} microbatches)"
    )


def _draw_lane(axes: Any, lane: int, rank: RankStep, origin: float, width: float) -> None:
    """Draw one rank's blocks; ``width`` is the step's, in milliseconds."""
    for kind, colour in _COLOURS.items():
        bars = [((b.start - origin) * 1e3, (b.stop - b.start) * 1e3) for b in rank.blocks if b.kind == kind]
        line = 0.4 if len(bars) < 200 else 0.0
        axes.broken_barh(bars, (lane - _LANE / 2, _LANE), facecolors=colour, edgecolor="white", linewidth=line)
    for begin, end, microbatch in _runs(rank, origin, width):
        if end - begin >= _WIDE_ENOUGH * width:
            axes.text((begin + end) / 2, lane, str(microbatch), ha="center", va="center", fontsize=7, color="white")


def _runs(rank: RankStep, origin: float, width: float) -> Iterator[tuple[float, float, int]]:
    """Neighbouring blocks of one kind and microbatch as one: begin and end in milliseconds, and the microbatch."""
    begin, end, before = 0.0, 0.0, None
    for block in rank.blocks:
        left, right = (block.start - origin) * 1e3, (block.stop - origin) * 1e3
        if before is not None and before == (block.kind, block.microbatch) and left - end <= _TOUCHING * width:
            end = max(end, right)
            continue
        if before is not None:
            yield begin, end, before[1]
        begin, end, before = left, right, (block.kind, block.microbatch)
    if before is not None:
        yield begin, end, before[1]
