"""The timeline as a trace that ``chrome://tracing`` and ui.perfetto.dev open: one process per rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import JobTimeline, RankStep, Step

KIND_WORDS = {"F": "forward", "B": "backward", "S": "step function"}

#: Chrome's names for blue, orange and grey; Perfetto chooses its own colours.
_CHROME_COLOURS = {"F": "thread_state_runnable", "B": "rail_animation", "S": "grey"}

#: Rows of a rank's process.
_COMPUTED, _CALLS = 0, 1


def chrome_trace(timeline: JobTimeline, only: Step | None = None) -> dict[str, Any]:
    """A trace in the JSON object format; times in microseconds from the first block.

    Args:
        only: this step instead of all.
    """
    steps = [only] if only is not None else list(timeline.steps)
    origin = min(min(step.window[0], *(rank.start for rank in step.ranks)) for step in steps)
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
