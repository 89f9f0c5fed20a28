"""All ranks at a glance: who is named for holding the others up, and what tables and programs get."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.platform.command_line import call

from smp_estimator import progress
from smp_estimator.watching.rank_table import rows_of
from smp_estimator.watching.stragglers import Stragglers
from smp_launch.watch import pace
from smp_records import rank_record
from smp_records.records import PaceRecord, format_pace


def record(rank: int, *, steps: int = 4, compute: float = 0.4, waiting: float = 0.0, **more: object) -> PaceRecord:
    fields = {"step": 8, "seconds": 1.0, "collectives": 0.0, "data": 0.1, "saving": 0.0, **more}
    return PaceRecord(rank=rank, steps=steps, compute=compute, waiting=waiting, **fields)


def varied(place: int) -> float:
    """Some percent of noise, the same in each run."""
    return 1 + 0.02 * ((place * 7919) % 11 - 5) / 5


@pytest.mark.parametrize("world", [2, 4, 16])
def test_the_rank_that_is_slow_is_named_with_its_share(world: int) -> None:
    seen = Stragglers()
    for place in range(6):
        for rank in range(world):
            slow = rank == 1
            own = (0.8 if slow else 0.4) * varied(place * world + rank)
            seen.add([record(rank, compute=own, waiting=0.0 if slow else 0.4, host="algo-1")])
    (found,) = seen.found()
    assert (found.rank, found.mostly) == (1, "computing")
    assert found.share == pytest.approx(0.4, rel=0.1)  # of a step of 0.25 s, 0.1 s is beyond the usual
    assert (found.own, found.usual) == (pytest.approx(0.225, rel=0.1), pytest.approx(0.125, rel=0.1))
    assert found.z > 10
    assert str(found).startswith("rank 1 (algo-1) holds the others up: 2")
    assert "40% of each step" in str(found) or "39% of each step" in str(found) or "41% of each step" in str(found)


def test_what_takes_it_long_is_told() -> None:
    seen = Stragglers()
    for place in range(4):
        seen.add([record(0, data=0.6 * varied(place)), record(1), record(2)])
    assert [(one.rank, one.mostly) for one in seen.found()] == [(0, "data")]


def test_nobody_is_named_for_noise_or_for_another_stage_of_a_pipeline() -> None:
    seen = Stragglers()
    for place in range(20):
        for rank in range(8):
            stage = rank // 4
            seen.add([record(rank, stage=stage, compute=(0.2 + 0.5 * stage) * varied(place * 8 + rank))])
    assert seen.found() == []
    alone = Stragglers()
    for _ in range(5):
        alone.add([record(0, stage=0, compute=0.1), record(1, stage=1, compute=0.9)])
    assert alone.found() == []


def test_looks_shorter_than_a_step_are_put_together() -> None:
    seen = Stragglers()
    for look in range(20):  # a step begins in each fifth
        for rank in (0, 1):
            seen.add([record(rank, steps=int(look % 5 == 4), compute=0.9 if rank else 0.3, seconds=1.0)])
    (found,) = seen.found()
    assert (found.rank, found.own, found.usual) == (1, pytest.approx(5.0), pytest.approx(2.0))
    assert found.share == pytest.approx(0.6)


def test_waiting_in_collectives_is_told_from_communication_by_the_rank_that_came_last() -> None:
    rows = rows_of(
        [record(0, compute=0.1, collectives=0.7), record(1, compute=0.6, collectives=0.2), record(2, seconds=0.0)]
    )
    assert [(row.rank, round(row.waiting, 6), row.communication) for row in rows] == [(0, 0.5, 0.2), (1, 0.0, 0.2)]
    assert [row.step_seconds for row in rows] == [0.25, 0.25]


def log_of(slow: int = 1) -> str:
    lines = ["a line of the script"]
    for _ in range(5):
        lines += [
            format_pace(record(rank, compute=0.8 if rank == slow else 0.4, memory_bytes=2**30)) for rank in range(3)
        ]
    return "\n".join([*lines, "smp-pace {cut"]) + "\n"


def test_the_command_reads_a_log(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(log_of())
    said = call("top", "myjob", "--log", str(tmp_path / "job.log"), "--once")
    assert said.output.count("ms/step") == 1
    assert "1.00 GiB" in said.output
    assert "rank 1 holds the others up" in " ".join(said.output.split())
    told = call("top", "myjob", "--log", str(tmp_path / "job.log"), "--once", "--json")
    content = json.loads(told.output)
    assert content["job"] == "myjob"
    assert [row["rank"] for row in content["ranks"]] == [0, 1, 2]
    assert [one["rank"] for one in content["stragglers"]] == [1]


def test_a_log_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("nothing\n")
    said = call("top", "--log", str(tmp_path / "job.log"), code=1)
    assert "SMP_RANK_RECORDS" in said.output


def test_a_job_that_does_not_run_is_refused() -> None:
    said = call("top", "no-job-of-this-name", "--once", code=1)
    assert "no job 'no-job-of-this-name'" in said.output


RANK = """
import sys, time
from smp_records import rank_record
notes = rank_record.begin({rank_record.FOLDER_VARIABLE: sys.argv[1]}, int(sys.argv[2]))
notes.pace.tell(stage=0)
print("ready", flush=True)
while True:
    notes.begin_step()
    for _ in range(int(sys.argv[3])):
        time.sleep(0.004)
    position = notes.collective(notes.text("all_reduce"), notes.ranks((0, 1)), 1, 1, 0)
    notes.begin_wait(position)
    time.sleep(0.004 * (5 - int(sys.argv[3])))
    notes.end_wait(position)
    notes.enter(rank_record.BETWEEN)
"""


def test_a_running_job_is_looked_at_from_outside(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), str(units)],
            stdout=subprocess.PIPE,
            env={**os.environ, rank_record.FOLDER_VARIABLE: str(tmp_path), "TRAINING_JOB_NAME": f"top-{tmp_path.name}"},
        )
        for rank, units in ((0, 1), (1, 4))
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
        said = call("top", f"top-{tmp_path.name}", "--once", "--json", "--seconds", "0.5")
        rows = json.loads(said.output)["ranks"]
        before, seen = pace.read_records(tmp_path), Stragglers()
        for _ in range(4):
            subprocess.run(["sleep", "0.15"], check=True)
            after = pace.read_records(tmp_path)
            seen.add(pace.compare_records(before, after))
            before = after
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(row["memory_bytes"] > 1 << 20 and row["step"] > 0 for row in rows)
    assert rows[0]["waiting"] > rows[1]["waiting"]
    assert rows[1]["compute"] > rows[0]["compute"]
    assert [one.rank for one in seen.found()] == [1]


def test_fit_shows_the_ranks_and_hides_their_lines() -> None:
    out = io.StringIO()
    progress.show(log_of().splitlines()[:-1], view=progress.PlainView(out))
    assert out.getvalue().splitlines()[0] == "a line of the script"
    assert "smp-pace" not in out.getvalue()
    tracker = progress.ProgressTracker()
    for line in log_of().splitlines():
        if (found := progress.parse_pace(line)) is not None:
            tracker.rank(found)
    from rich.console import Console

    console = Console(file=io.StringIO(), width=140, color_system=None, record=True)
    console.print(progress.render(tracker))
    text = console.export_text()
    assert "ms/step" in text
    assert "rank 1 holds the others up" in text
    html = "".join(progress._html(tracker))
    assert html.count("<tr>") == 4
    assert "rank 1 holds the others up" in html
