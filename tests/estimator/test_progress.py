"""The display: what is shown, what is not, and the numbers in it."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from smp_estimator import progress
from smp_records.records import ProgressRecord, UsageRecord, format_progress, format_usage


def record(step: int, **fields: Any) -> ProgressRecord:
    return ProgressRecord(step=step, total_steps=10, loss=2.5, samples_per_second=100.0, memory_bytes=2**29, **fields)


def test_plain_view_shows_lines_and_few_progress_lines() -> None:
    out = io.StringIO()
    events = ["first", format_progress(record(1)), *(format_progress(record(n)) for n in range(2, 9)), "last", None]
    progress.show(events, view=progress.PlainView(out))
    lines = out.getvalue().splitlines()
    assert [lines[0], lines[2]] == ["first", "last"]
    assert lines[1].startswith("step 1/10 | loss 2.5000 | samples/s 100.0 | memory 0.50 GiB | elapsed 0:00:00")
    assert lines[3].startswith("step 8/10")
    assert len(lines) == 4
    assert "smp-progress" not in out.getvalue()


def test_plain_view_is_chosen_for_files() -> None:
    assert isinstance(progress.open_view(io.StringIO()), progress.PlainView)


def test_live_view_keeps_the_log_above_the_bar() -> None:
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=30, color_system=None)
    progress.show(["[bold]as written[/bold]", record(5), "\x1b[31mred\x1b[0m"], view=progress.LiveView(console))
    shown = out.getvalue()
    assert "[bold]as written[/bold]" in shown
    assert "red" in shown
    assert shown.index("red") < shown.rindex("step 5/10")


def test_bar_and_numbers_have_a_line_each() -> None:
    from rich.console import Console

    tracker = progress.ProgressTracker()
    tracker.update(record(5))
    console = Console(file=io.StringIO(), width=120, color_system=None, record=True)
    console.print(progress.render(tracker))
    bar, numbers = console.export_text().rstrip().splitlines()
    assert set(bar.strip()) <= {"━", "╸", "╺", " "}
    assert numbers.split("  ")[:3] == ["step 5/10", "loss 2.5000", "samples/s 100.0"]


def test_notebook_view_replaces_one_display(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display = pytest.importorskip("IPython.display")
    drawn: list[dict[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            drawn.append(content)

    def show(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        drawn.append(content)
        return Handle()

    monkeypatch.setattr(display, "display", show)
    progress.show(["a line", record(3), record(4)], view=progress.NotebookView())
    assert capsys.readouterr().out == "a line\n"
    assert 'value="4" max="10"' in drawn[-1]["text/html"]
    assert drawn[-1]["text/plain"].startswith("step 4/10 | loss 2.5000")


def test_eta_follows_the_recent_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tracker = progress.ProgressTracker()
    assert tracker.eta_seconds is None
    tracker.update(ProgressRecord(step=50, total_steps=100))
    assert tracker.eta_seconds is None, "a job that resumed at 50 has not shown its pace yet"
    now = 1004.0
    tracker.update(ProgressRecord(step=52, total_steps=100))
    assert tracker.eta_seconds == pytest.approx(96.0)
    now = 1005.0
    assert tracker.eta_seconds == pytest.approx(95.0)


def test_evaluation_stays_in_sight() -> None:
    tracker = progress.ProgressTracker()
    tracker.update(record(1, eval_loss=3.25))
    tracker.update(record(2))
    assert ("eval loss", "3.2500") in tracker.fields()


def test_without_a_total() -> None:
    tracker = progress.ProgressTracker()
    tracker.update(ProgressRecord(step=7))
    assert tracker.compact() == "step 7 | elapsed 0:00:00"
    assert progress.render(tracker)


def test_a_narrow_encoding_does_not_end_the_display() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress.show(["naïve → ok"], view=progress.PlainView(stream))
    assert raw.getvalue() == b"na\\xefve \\u2192 ok\n"


def test_timeout_ends_the_display() -> None:
    def forever() -> Any:
        while True:
            time.sleep(0.01)
            yield None

    progress.show(forever(), view=progress.PlainView(io.StringIO()), timeout_seconds=0.1)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (61.4, "0:01:01"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert progress.format_duration(seconds) == text


GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "cores", "said"),
    [
        ([0.5], [0.9], "peak memory: 0.50 GiB; CPU: 0.90 cores"),
        ([0.5], [None], "peak memory: 0.50 GiB"),
        (
            [0.5, 0.75, 0.25],
            [1.0, 0.9, 0.5],
            "peak memory by rank: 0.50, 0.75, 0.25 GiB (most: rank 1); CPU: 0.80 cores per rank (least: rank 2, 0.50)",
        ),
        (
            [*range(8), 1.0],
            [1.0] * 9,
            "peak memory: 7.00 GiB on rank 7, the most of 9 ranks (least: rank 0, 0.00 GiB); CPU: 1.00 cores per rank (least: "
            "rank 0, 1.00)",
        ),
    ],
)
def test_what_the_ranks_used_is_the_last_thing_of_the_log(
    memory: list[float], cores: list[float | None], said: str
) -> None:
    out = io.StringIO()
    used = [
        UsageRecord(rank=rank, memory_bytes=int(m * GIB), cpu_cores=c)
        for rank, (m, c) in enumerate(zip(memory, cores, strict=True))
    ]
    progress.show([record(9), *map(format_usage, reversed(used)), "last"], view=progress.PlainView(out))
    assert out.getvalue().splitlines()[1:] == ["last", said]


def test_a_rank_that_tells_alone_is_named() -> None:
    assert progress.usage_line({3: UsageRecord(rank=3, memory_bytes=GIB)}) == "peak memory of rank 3: 1.00 GiB"
