"""The timeline in numbers, as rich tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import JobTimeline, Step

#: Idle fractions of more ranks are given as least and most.
_LISTED_RANKS = 8


def step_table(timeline: JobTimeline) -> Table:
    """One row per step: how long it took, and which part of it the ranks waited."""
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
    """One row per rank of a step: what it was busy with, and how long it waited."""
    table = Table(title=f"{step.title}, {_milliseconds(step.makespan)} ms", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("stage", justify="right")
    table.add_column("host")
    for name in ("forward\nms", "backward\nms", "step fn\nms", "busy\nms", "busy", "idle", "actions"):
        table.add_column(name, justify="right")
    for rank in step.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.stage),
            rank.host,
            *(_milliseconds(rank.busy_seconds(kind)) for kind in "FBS"),
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
