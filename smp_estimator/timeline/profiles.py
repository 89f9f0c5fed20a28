"""The traces of PyTorch's profiler on all ranks, merged with the pipeline's timeline on one clock."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.table import Table

from smp_config import ConfigError
from smp_config.errors import kind_of
from smp_config.formats.values import is_number
from smp_estimator.timeline.files import place_of, read_files, read_timeline
from smp_estimator.timeline.views import begin_of, chrome_trace
from smp_records.profiling import ABOUT, CLOCK_MARK, FILE_PREFIX, FILE_SUFFIX, VARIABLE, About

if TYPE_CHECKING:
    from smp_estimator.timeline.steps import JobTimeline

#: Names of the files that ranks write.
_PATTERN = f"{FILE_PREFIX}*{FILE_SUFFIX}"
#: Bytes of a rank's trace when it is unpacked.
_LARGEST = 1 << 31
#: Rows of processes that are no rank's own, such as its GPU, begin here in a trace.
_BESIDE = 1_000_000
_MOST_BESIDE = 100

Event = dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """A rank's trace, as the profiler recorded it.

    Attributes:
        about: the rank, its job and its clock.
        events: in Chrome's format, with times of the profiler's own clock in microseconds.
        shift: seconds to add to these times to get times of rank 0's clock.
    """

    about: About
    events: tuple[Event, ...]
    shift: float

    @property
    def begin(self) -> float:
        """Return the time of the first event, in seconds of rank 0's clock."""
        return min(event["ts"] for event in self.events if _is_timed(event)) / 1e6 + self.shift

    @property
    def seconds(self) -> float:
        """Return the seconds from the first event to the end of the last."""
        timed = [event for event in self.events if _is_timed(event)]
        begin = min(event["ts"] for event in timed)
        end = max(event["ts"] + event.get("dur", 0) for event in timed)
        return (end - begin) / 1e6

    def longest(self) -> tuple[str, float]:
        """Return the operation with the most time, including operations inside it, and its seconds."""
        spent: dict[str, float] = defaultdict(float)
        for event in self.events:
            is_operation = event.get("ph") == "X" and event.get("cat") in ("cpu_op", "kernel")
            if is_operation:
                spent[str(event.get("name", ""))] += event.get("dur", 0) / 1e6
        if not spent:
            return "–", 0.0
        return max(spent.items(), key=lambda item: item[1])


def read_profiles(job_output: str) -> list[RankTrace]:
    """Return the traces of all ranks that were profiled, sorted by rank.

    Args:
        job_output: as for :func:`~smp_estimator.timeline.read_timeline`.

    Raises:
        ConfigError: there are no traces, broken ones, or traces of several jobs.
    """
    found = sorted(
        (_parsed(content, name) for name, content in read_files(place_of(job_output), _PATTERN)),
        key=lambda trace: trace.about.rank,
    )
    if not found:
        raise ConfigError(
            f"{job_output} holds no {_PATTERN}, neither plain nor in an archive; ranks write them when steps are profiled: "
            f'give the estimator profile={{"steps": (10, 12)}}, or its environment {VARIABLE}=10-12, and run the job again',
            code="SMP116",
        )
    jobs, ranks = {trace.about.job for trace in found}, [trace.about.rank for trace in found]
    if len(jobs) > 1 or len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"{job_output} holds profiles of {len(jobs)} runs ({', '.join(sorted(jobs)[:4])}) of ranks {ranks[:16]}; name the "
            "output of one job",
            code="SMP116",
        )
    return found


def timeline_beside(job_output: str) -> JobTimeline | None:
    """Return the timeline of the same output; None if its ranks have recorded none."""
    try:
        return read_timeline(job_output)
    except ConfigError:
        return None


def merged_trace(traces: Sequence[RankTrace], timeline: JobTimeline | None = None) -> dict[str, Any]:
    """Return one trace for ui.perfetto.dev: a process per rank, with its threads below its pipeline's blocks.

    Times are microseconds from the first event of any rank, on rank 0's clock.
    """
    begins = [trace.begin for trace in traces]
    if timeline is not None:
        begins.append(begin_of(timeline.steps))
    origin = min(begins)
    events: list[Event] = chrome_trace(timeline, origin=origin)["traceEvents"] if timeline is not None else []
    named = {event["pid"] for event in events if event["ph"] == "M"}
    for trace in traces:
        if trace.about.rank not in named:
            events += _names(trace.about)
        events += _moved(trace, origin)
    error = max(trace.about.offset_error for trace in traces)
    other = {"job": traces[0].about.job, "clock_error_seconds": error}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def profile_table(traces: Sequence[RankTrace]) -> Table:
    """Return a table with a row for each rank."""
    table = Table(title=f"profile of {traces[0].about.job}", title_justify="left")
    for head in ("rank", "stage", "steps", "seconds", "events"):
        table.add_column(head, justify="right")
    for head in ("host", "most time in"):
        table.add_column(head)
    for trace in traces:
        about, (name, seconds) = trace.about, trace.longest()
        cells = about.rank, about.stage, f"{about.first}–{about.last}", f"{trace.seconds:.3f}", f"{len(trace.events):,}"
        table.add_row(*map(str, cells), about.host, f"{name} ({seconds:.3f} s)")
    return table


def _names(about: About) -> Iterator[Event]:
    host = f", {about.host}" if about.host else ""
    name = {"name": f"rank {about.rank} (stage {about.stage}{host})"}
    yield {"name": "process_name", "ph": "M", "pid": about.rank, "tid": 0, "args": name}
    yield {"name": "process_sort_index", "ph": "M", "pid": about.rank, "tid": 0, "args": {"sort_index": about.rank}}


def _moved(trace: RankTrace, origin: float) -> Iterator[Event]:
    rank, own = trace.about.rank, _own_process(trace.events)
    places: dict[Any, int] = {own: rank}
    for event in trace.events:
        process = event.get("pid")
        if process not in places:
            places[process] = _BESIDE + rank * _MOST_BESIDE + min(len(places), _MOST_BESIDE) - 1
        moved = {**event, "pid": places[process]}
        if event.get("ph") == "M":
            if event.get("name") in ("process_name", "process_labels", "process_sort_index"):
                if process == own:
                    continue  # it has its name
                if event["name"] == "process_name":
                    moved["args"] = {"name": f"rank {rank}: {(event.get('args') or {}).get('name', process)}"}
        elif _is_timed(event):
            moved["ts"] = round((event["ts"] / 1e6 + trace.shift - origin) * 1e6, 3)
        if "id" in event:
            moved["id"] = f"{rank}:{event['id']}"
        yield moved


def _own_process(events: Sequence[Event]) -> Any:
    """Return the process that computed: the one with the clock's mark."""
    return next(event.get("pid") for event in events if _is_mark(event))


def _is_timed(event: Event) -> bool:
    return event.get("ph") != "M" and "ts" in event


def _is_mark(event: Event) -> bool:
    has_time = event.get("ph") == "X" and "ts" in event
    return has_time and str(event.get("name", "")).startswith(CLOCK_MARK)


def _parsed(content: bytes, name: str) -> RankTrace:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        found = json.loads(text)
        about = About.model_validate(found[ABOUT])
        events = tuple(_checked(event) for event in found["traceEvents"])
        shift, inexact = _shift(events, about)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise ConfigError(
            f"{name} is no profile of a rank ({type(error).__name__}: {str(error)[:200]}); it may have been cut when the job was "
            "killed: remove it to see the others, and profile again",
            code="SMP116",
        ) from None
    about = about.model_copy(update={"offset_error": about.offset_error + inexact})
    return RankTrace(about, events, shift + about.offset)


def _shift(events: Sequence[Event], about: About) -> tuple[float, float]:
    """Return the seconds from the profiler's clock to the rank's own, and the largest possible error.

    The value comes from the mark with the shortest duration.
    """
    begun = {str(event["name"]): event["ts"] / 1e6 for event in events if _is_mark(event)}
    known = []
    for number, (before, after) in enumerate(about.marks):
        seen = begun.get(f"{CLOCK_MARK}{number}")
        if seen is not None:
            known.append((after - before, (before + after) / 2, seen))
    if not known:
        raise ValueError("the marks of the rank's clock are missing")
    width, middle, seen = min(known)
    return middle - seen, max(0.0, width / 2)


def _checked(event: Any) -> Event:
    """Return an event after checking that its times are numbers, which later code assumes."""
    if not isinstance(event, dict):
        raise TypeError(f"an event is {kind_of(event)}")
    for name in ("ts", "dur"):
        number = event.get(name, 0)
        if not is_number(number) or not abs(number) < 1e18:  # NaN too
            raise ValueError(f"{name} of an event is {str(number)[:40]!r}")
    has_process = not isinstance(event.get("pid"), list | dict)
    has_arguments = isinstance(event.get("args", {}), dict | None)
    if not has_process or not has_arguments:
        raise TypeError("an event of another form")
    return event
