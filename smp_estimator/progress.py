"""The display of a running job: its log lines, and its progress below them.

Any source of log lines can be shown: a job on this machine, or the log stream of a job in the cloud. Lines that
carry a record are never shown. They update the display, and at the end they report the ranks' resource usage.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any, TextIO

from smp_estimator.watching import rank_table
from smp_estimator.watching.stragglers import Stragglers
from smp_records.records import PaceRecord, ProgressRecord, UsageRecord, parse_pace, parse_progress, parse_usage

#: Without a terminal: seconds between two progress lines.
PLAIN_INTERVAL_SECONDS = 10.0
#: How often a notebook's display is replaced, in seconds.
_NOTEBOOK_INTERVAL_SECONDS = 0.5
#: Records that the speed is measured over, so that the estimate follows a change of pace.
_WINDOW = 50

#: The usage of so many ranks is listed one by one; of more ranks, only the greatest and the least.
_LISTED_RANKS = 8

Event = str | ProgressRecord | UsageRecord | PaceRecord | None


class View:
    """Display of a job, with the tracker that its records go to; used as a context manager."""

    def __init__(self) -> None:
        self._tracker = ProgressTracker()

    def line(self, text: str) -> None:
        """Show a line of the job's log."""
        print(text, flush=True)

    def update(self, record: ProgressRecord) -> None:
        """Process a new progress record."""
        self._tracker.update(record)
        self.tick()

    def rank(self, record: PaceRecord) -> None:
        """Process a record of how a rank has spent its time."""
        self._tracker.rank(record)
        self.tick()

    def tick(self) -> None:
        """Redraw the clock, if the view has one, although there is nothing new."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None: ...


def show(events: Iterable[Event], *, view: View | None = None, timeout_seconds: float | None = None) -> None:
    """Show a job until its events end.

    Args:
        events: log lines (raw records among them are recognized), records, and None for "still waiting".
        view: default: the view that suits the standard output.
        timeout_seconds: stop showing after this long; events must then come regularly, None if need be.
    """
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    used: dict[int, UsageRecord] = {}
    with view or open_view() as shown:
        for event in events:
            record = _record_in(event) if isinstance(event, str) else event
            if isinstance(record, UsageRecord):
                used[record.rank] = record
            elif isinstance(record, PaceRecord):
                shown.rank(record)
            elif record is not None:
                shown.update(record)
            elif isinstance(event, str):
                shown.line(event)
            else:
                shown.tick()
            if time.monotonic() > deadline:
                return
        if used:
            shown.line(usage_line(used))


def _record_in(line: str) -> ProgressRecord | UsageRecord | PaceRecord | None:
    """Return the record that a line of a log is, or None for any other line."""
    return parse_progress(line) or parse_usage(line) or parse_pace(line)


def usage_line(used: Mapping[int, UsageRecord]) -> str:
    """Return a line about the ranks' resource usage.

    For example ``peak memory by rank: 0.52, 0.49 GiB (most: rank 0); CPU: 0.97 cores per rank (least: rank 1, 0.93)``.
    """
    memory = {rank: used[rank].memory_bytes / 2**30 for rank in sorted(used)}
    most, least = max(memory, key=memory.__getitem__), min(memory, key=memory.__getitem__)
    if len(memory) == 1:
        # In a job that failed, perhaps only the failed rank has reported its usage.
        said = f"peak memory{f' of rank {most}' if most else ''}: {memory[most]:.2f} GiB"
    elif len(memory) <= _LISTED_RANKS and list(memory) == list(range(len(memory))):
        said = f"peak memory by rank: {', '.join(f'{one:.2f}' for one in memory.values())} GiB (most: rank {most})"
    else:
        said = (
            f"peak memory: {memory[most]:.2f} GiB on rank {most}, the most of {len(memory)} ranks (least: rank {least}, "
            f"{memory[least]:.2f} GiB)"
        )
    cores = {rank: one.cpu_cores for rank, one in sorted(used.items()) if one.cpu_cores is not None}
    if not cores:
        return said
    idlest = min(cores, key=cores.__getitem__)
    each = f" per rank (least: rank {idlest}, {cores[idlest]:.2f})" if len(cores) > 1 else ""
    return f"{said}; CPU: {sum(cores.values()) / len(cores):.2f} cores{each}"


def open_view(stream: TextIO | None = None) -> View:
    """Return a live display for a terminal or notebook, and plain lines otherwise."""
    if stream is None and _in_notebook():
        return NotebookView()
    stream = stream or sys.stdout
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return PlainView(stream)


class ProgressTracker:
    """Speed and remaining time, from the records as they arrive."""

    def __init__(self) -> None:
        self.record: ProgressRecord | None = None
        self._started = time.monotonic()
        self._window: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._ranks: dict[int, PaceRecord] = {}
        self._stragglers = Stragglers()

    def rank(self, record: PaceRecord) -> None:
        """Store a rank's record of how it has spent its time."""
        self._ranks[record.rank] = record
        self._stragglers.add([record])

    @property
    def rows(self) -> list[rank_table.RankRow]:
        """Return the table rows of the ranks that have reported their time."""
        return rank_table.most_worth_showing(rank_table.rows_of(self._ranks.values()))

    @property
    def stragglers(self) -> list[str]:
        """Return sentences about the ranks that slow down the others."""
        return [str(one) for one in self._stragglers.found()]

    def update(self, record: ProgressRecord) -> None:
        """Take the newest record."""
        former = self.record
        # Evaluations are rarer than steps; the last one stays in sight.
        if former is not None and record.eval_loss is None:
            record = record.model_copy(update={"eval_loss": former.eval_loss})
        self.record = record
        self._window.append((time.monotonic(), record.step))

    @property
    def elapsed_seconds(self) -> float:
        """Return seconds since this display began. They include the start-up, which the job's own clock does not measure."""
        return time.monotonic() - self._started

    @property
    def eta_seconds(self) -> float | None:
        """Return the remaining seconds at the recent pace, or None if they are not known yet and at the end."""
        record = self.record
        if record is None or not record.total_steps or record.step >= record.total_steps or len(self._window) < 2:
            return None
        (since, first), (until, last) = self._window[0], self._window[-1]
        if last <= first:
            return None
        remaining = max(0, record.total_steps - last)
        pace = (until - since) / (last - first)
        return max(0.0, remaining * pace - (time.monotonic() - until))

    def fields(self) -> list[tuple[str, str]]:
        """Return the known values as (name, value) pairs in display order."""
        record = self.record
        if record is None:
            return [("elapsed", format_duration(self.elapsed_seconds))]
        known = [("step", f"{record.step}/{record.total_steps}" if record.total_steps else str(record.step))]
        if record.loss is not None:
            known.append(("loss", f"{record.loss:.4f}"))
        if record.eval_loss is not None:
            known.append(("eval loss", f"{record.eval_loss:.4f}"))
        if record.samples_per_second is not None:
            known.append(("samples/s", f"{record.samples_per_second:,.1f}"))
        if record.memory_bytes is not None:
            known.append(("memory", f"{record.memory_bytes / 2**30:.2f} GiB"))
        known.append(("elapsed", format_duration(self.elapsed_seconds)))
        eta = self.eta_seconds
        if eta is not None:
            known.append(("ETA", format_duration(eta)))
        return known

    def compact(self) -> str:
        """Return one line: ``step 40/300 | loss 3.2100 | …``."""
        return " | ".join(f"{name} {value}" for name, value in self.fields())


def write_line(text: str, stream: TextIO) -> None:
    """Write a line of a log, escaping characters that the stream's encoding lacks, so that the display does not fail."""
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


class PlainView(View):
    """Lines only, for files, pipes and logs: a progress line first, every ten seconds, and last."""

    def __init__(self, stream: TextIO, interval_seconds: float = PLAIN_INTERVAL_SECONDS) -> None:
        super().__init__()
        self._stream = stream
        self._interval = interval_seconds
        self._printed_at = float("-inf")
        self._printed: ProgressRecord | None = None

    def line(self, text: str) -> None:
        """Write the line."""
        write_line(text, self._stream)

    def update(self, record: ProgressRecord) -> None:
        """Write the record, unless the last was written a moment ago."""
        self._tracker.update(record)
        if time.monotonic() - self._printed_at >= self._interval:
            self._print()

    def __exit__(self, *_: object) -> None:
        if self._tracker.record is not self._printed:
            self._print()

    def _print(self) -> None:
        self._printed, self._printed_at = self._tracker.record, time.monotonic()
        self.line(self._tracker.compact())
        for sentence in self._tracker.stragglers:
            self.line(sentence)


class LiveView(View):
    """A terminal: the log scrolls above a bar that stays at the bottom."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        super().__init__()
        self._console = console
        self._live = Live(
            get_renderable=lambda: render(self._tracker), console=console, refresh_per_second=4, transient=False
        )

    def line(self, text: str) -> None:
        """Print above the bar, in the line's own colours."""
        from rich.text import Text

        self._console.print(Text.from_ansi(text), soft_wrap=True)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


class NotebookView(View):
    """A notebook: one display that is replaced in place, and the log as the cell's output below it.

    Made on the notebook's own display protocol, since rich's live display needs widgets that many lack.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._drawn_at = float("-inf")

    def tick(self) -> None:
        """Draw again, unless that was done a moment ago."""
        if time.monotonic() - self._drawn_at >= _NOTEBOOK_INTERVAL_SECONDS:
            self._draw()

    def __enter__(self) -> View:
        from IPython.display import display

        self._handle = display(self._content(), raw=True, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """Return the rich rendering as HTML, and as text for readers without HTML."""
        return {"text/html": "".join(_html(self._tracker)), "text/plain": self._tracker.compact()}


def render(tracker: ProgressTracker) -> Any:
    """Return the bar and the numbers as a rich renderable."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    record = tracker.record
    total = record.total_steps if record is not None else None
    bar = ProgressBar(
        total=float(total) if total else None,
        completed=float(record.step) if record is not None else 0.0,
        pulse=not total,
        width=None,
    )
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in tracker.fields()))
    # A grid, not a group: the bar alone ends without a line break.
    rows = Table.grid(expand=True)
    rows.add_row(bar)
    rows.add_row(numbers)
    if ranks := tracker.rows:
        rows.add_row(rank_table.table_of(ranks))
        for sentence in tracker.stragglers:
            rows.add_row(Text(sentence, style="yellow"))
    return rows


def format_duration(seconds: float) -> str:
    """Format seconds as ``1:02:03``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _html(tracker: ProgressTracker) -> Iterator[str]:
    record = tracker.record
    if record is not None and record.total_steps:
        yield f'<progress style="width:100%" value="{record.step}" max="{record.total_steps}"></progress>'
    else:
        yield '<progress style="width:100%"></progress>'
    yield "<div>"
    for name, value in tracker.fields():
        yield f'<span style="opacity:.6">{name}</span> <b>{value}</b>&ensp;'
    yield "</div>"
    if ranks := tracker.rows:
        yield rank_table.html_of(ranks)
        for sentence in tracker.stragglers:
            yield f"<div>{escape(sentence)}</div>"


def _in_notebook() -> bool:
    """Return whether the code runs in a notebook's kernel; IPython in a terminal counts as a terminal."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell is not None and hasattr(shell, "kernel")
