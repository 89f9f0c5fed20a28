"""The timeline shown: in numbers as rich tables, as a picture of a step, and as a trace for a browser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from smp_config import ConfigError
from smp_estimator.figures.colours import colour_of
from smp_estimator.figures.matplotlib_figure import LIGHT, Theme, colour_axes, figure_for, save

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import JobTimeline, RankStep, Step

#: What legends call the kinds of actions.
KIND_WORDS = {"F": "forward", "B": "backward", "W": "gradients of weights", "S": "step function"}

#: Chrome's names for blue, orange and grey; Perfetto chooses its own colours.
_CHROME_COLOURS = {"F": "thread_state_runnable", "B": "rail_animation", "W": "rail_load", "S": "grey"}

#: Rows of a rank's process.
_COMPUTED, _CALLS = 0, 1

#: Idle fractions of more ranks are given as least and most.
_LISTED_RANKS = 8

#: Lanes of more ranks would be thinner than their names.
_MOST_RANKS = 128

#: A number is written if its block is at least this part of the step wide.
_WIDE_ENOUGH = 0.012

#: Blocks of one microbatch that lie this close (part of the step) carry one number.
_TOUCHING = 0.002

#: Part of a lane's height that its blocks fill.
_LANE = 0.82


def step_table(timeline: JobTimeline) -> Table:
    """Return a table with one row per step: its duration, and the part of it in which the ranks waited."""
    listed = len(timeline.ranks) <= _LISTED_RANKS
    table = Table(
        title=f"{len(timeline.steps)} steps of {timeline.job or 'a job without a name'}", title_justify="left"
    )
    table.add_column("step", justify="right")
    table.add_column("kind")
    table.add_column("micro-\nbatches", justify="right")
    table.add_column("makespan\nms", justify="right")
    for name in [f"rank {rank}\nidle" for rank in timeline.ranks] if listed else ["least\nidle", "most\nidle"]:
        table.add_column(name, justify="right")
    table.add_column("all\nidle", justify="right")
    table.add_column("(p−1)/\n(m+p−1)", justify="right")
    for step in timeline.steps:
        idle = [step.idle_of(rank) for rank in step.ranks]
        table.add_row(
            str(step.number),
            step.kind,
            str(step.microbatches),
            _milliseconds(step.makespan),
            *map(_percent, idle if listed else (min(idle), max(idle))),
            _percent(step.idle),
            _percent(step.expected_idle),
        )
    return table


def rank_table(step: Step) -> Table:
    """Return a table with one row per rank of a step: its busy time by kind of work, and its idle time."""
    table = Table(title=f"{step.title}, {_milliseconds(step.makespan)} ms", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("stage", justify="right")
    table.add_column("host")
    # Gradients of weights are apart in the schedule zero_bubble only.
    kinds = "FBWS" if any(block.kind == "W" for rank in step.ranks for block in rank.blocks) else "FBS"
    names = {"F": "forward\nms", "B": "backward\nms", "W": "weights\nms", "S": "step fn\nms"}
    for name in (*(names[kind] for kind in kinds), "busy\nms", "busy", "idle", "actions"):
        table.add_column(name, justify="right")
    for rank in step.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.stage),
            rank.host,
            *(_milliseconds(rank.busy_seconds(kind)) for kind in kinds),
            _milliseconds(rank.busy_seconds()),
            _percent(1 - step.idle_of(rank)),
            _percent(step.idle_of(rank)),
            str(len(rank.blocks)),
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def save_picture(step: Step, path: str | Path, theme: Theme = LIGHT) -> Path:
    """Draw a step; the suffix of ``path`` selects the format (``.png``, ``.svg``, ``.pdf``).

    Raises:
        ConfigError: too many ranks, or a format that matplotlib does not know.
        PackageMissing: matplotlib is not installed.
    """
    if len(step.ranks) > _MOST_RANKS:
        raise ConfigError(
            f"the step has {len(step.ranks)} ranks, too many lanes for one picture (most: {_MOST_RANKS}); write --trace FILE.json "
            "and open it in ui.perfetto.dev, which can zoom",
            code="SMP116",
        )
    figure = figure_for(path, 12.0, 1.3 + 0.45 * len(step.ranks), theme)
    axes = colour_axes(figure.add_subplot(), theme)
    start, stop = step.window
    width = (stop - start) * 1e3
    for lane, rank in enumerate(step.ranks):
        _draw_lane(axes, lane, rank, start, width, theme)
    axes.set_xlim(0, width)
    axes.set_ylim(len(step.ranks) - 0.5, -0.5)
    axes.set_yticks(
        range(len(step.ranks)), [f"rank {r.rank}  {step.idle_of(r):.0%} idle" for r in step.ranks], fontsize=8
    )
    axes.set_xlabel("milliseconds", color=theme.ink)
    axes.set_title(step.headline, fontsize=10, color=theme.ink)
    there = {block.kind for rank in step.ranks for block in rank.blocks}
    for kind, word in KIND_WORDS.items():
        if kind in there:
            axes.plot([], [], linewidth=6, color=colour_of(kind, 0), label=word)
    axes.plot([], [], linestyle="", label="colour and number: microbatch")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.35 / len(step.ranks) - 0.12),
        ncol=len(there) + 1,
        fontsize=8,
        frameon=False,
        labelcolor=theme.ink,
    )
    return save(figure, path)


def _draw_lane(axes: Any, lane: int, rank: RankStep, origin: float, width: float, theme: Theme) -> None:
    """Draw one rank's blocks; ``width`` is the step's, in milliseconds."""
    bars, colours = [], []
    for block in rank.blocks:
        bars.append(((block.start - origin) * 1e3, (block.stop - block.start) * 1e3))
        colours.append(colour_of(block.kind, block.microbatch))
    line = 0.4 if len(bars) < 600 else 0.0
    axes.broken_barh(bars, (lane - _LANE / 2, _LANE), facecolors=colours, edgecolor=theme.background, linewidth=line)
    for begin, end, (kind, microbatch) in _runs(rank, origin, width):
        if kind == "S" or end - begin < _WIDE_ENOUGH * width:
            continue  # waiting is grey, whatever its microbatch; a narrow run has no room
        ink = "black" if kind == "F" else "white"
        axes.text((begin + end) / 2, lane, str(microbatch), ha="center", va="center", fontsize=7, color=ink)


def _runs(rank: RankStep, origin: float, width: float) -> Iterator[tuple[float, float, tuple[str, int]]]:
    """Yield adjacent blocks of one kind and microbatch as one run.

    Each item has the begin and end in milliseconds, and the pair of kind and microbatch.
    """
    begin, end, before = 0.0, 0.0, None
    for block in rank.blocks:
        left, right = (block.start - origin) * 1e3, (block.stop - origin) * 1e3
        if before is not None and before == (block.kind, block.microbatch) and left - end <= _TOUCHING * width:
            end = max(end, right)
            continue
        if before is not None:
            yield begin, end, before
        begin, end, before = left, right, (block.kind, block.microbatch)
    if before is not None:
        yield begin, end, before


def begin_of(steps: Sequence[Step]) -> float:
    """Return the first moment of the steps, in seconds of the job's clock."""
    begins = []
    for step in steps:
        begins.append(step.window[0])
        begins += [rank.start for rank in step.ranks]
    return min(begins)


def chrome_trace(timeline: JobTimeline, only: Step | None = None, origin: float | None = None) -> dict[str, Any]:
    """Return a trace of all steps, or ``only`` one, in the JSON object format.

    Args:
        origin: seconds of the job's clock from which times are counted, in microseconds; default: the first moment
            of the steps.
    """
    steps = [only] if only is not None else list(timeline.steps)
    origin = begin_of(steps) if origin is None else origin
    events: list[dict[str, Any]] = []
    for rank in steps[-1].ranks:
        events += _names(rank)
    for step in steps:
        for rank in step.ranks:
            events += _events(step, rank, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"job": timeline.job}}


def _names(rank: RankStep) -> Iterator[dict[str, Any]]:
    host = f", {rank.host}" if rank.host else ""
    metadata = {
        "process_name": {"name": f"rank {rank.rank} (stage {rank.stage}{host})"},
        "process_sort_index": {"sort_index": rank.rank},
    }
    for name, value in metadata.items():
        yield {"name": name, "ph": "M", "pid": rank.rank, "tid": _COMPUTED, "args": value}
    for thread, name in ((_COMPUTED, "computes"), (_CALLS, "steps")):
        yield {"name": "thread_name", "ph": "M", "pid": rank.rank, "tid": thread, "args": {"name": name}}


def _events(step: Step, rank: RankStep, origin: float) -> Iterator[dict[str, Any]]:
    yield {
        "name": step.title,
        "cat": "step",
        "ph": "X",
        "pid": rank.rank,
        "tid": _CALLS,
        "ts": _microseconds(rank.start - origin),
        "dur": _microseconds(rank.stop - rank.start),
        "args": {"idle": round(step.idle_of(rank), 4)},
    }
    for block in rank.blocks:
        yield {
            "name": block.name,
            "cat": KIND_WORDS[block.kind],
            "ph": "X",
            "pid": rank.rank,
            "tid": _COMPUTED,
            "ts": _microseconds(block.start - origin),
            "dur": _microseconds(block.stop - block.start),
            "cname": _CHROME_COLOURS[block.kind],
            "args": {"microbatch": block.microbatch, "module": block.path, "step": step.number},
        }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
