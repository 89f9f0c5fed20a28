"""The timeline of a rehearsal is read like that of a job, and all its pictures are drawn for light and dark pages."""

import pytest
import torch
from click.testing import CliRunner

from smp_config import ConfigError
from smp_estimator.cli.main import main
from smp_estimator.rehearsal.figures import save_all
from smp_estimator.rehearsal.timeline import job_timeline, save_timeline, timelines_of
from smp_estimator.timeline import read_timeline
from smp_records.rehearsal import TimedBlock
from smp_tools.rehearsal.memory import RankPhase
from smp_tools.rehearsal.skip_compute_mode import SkipComputeMode
from smp_tools.rehearsal.work import ModuleTimes, WorkClock
from tests.rehearsal.test_command import GIB, kind, rehearsed


def block(sort, microbatch, start, stop, module=""):
    return TimedBlock(kind=sort, microbatch=microbatch, module=module, start=start, stop=stop)


def piped():
    """Two stages and one microbatch: a second forward and two backward each, and an update of three seconds on the second."""
    blocks = {
        0: [block("F", 0, 0, 1, "blocks.0"), block("B", 0, 4, 6, "blocks.0")],
        1: [block("F", 0, 1, 2, "blocks.1"), block("B", 0, 2, 4)],
    }
    planned = {"pipeline_seconds": 6.0, "pipeline_idle": {0: 0.5, 1: 0.5}, "pipeline_blocks": blocks}
    return rehearsed(kind(0, GIB, step_seconds=3.0, **planned), kind(1, GIB, rank=8, step_seconds=6.0))


def test_a_pipeline_s_planned_order_is_read_as_a_job_s_timeline(tmp_path):
    files = save_timeline(piped(), tmp_path)
    assert [path.name for path in files] == ["timeline-rank0.json", "timeline-rank8.json"]
    step = read_timeline(str(tmp_path)).step()
    assert (step.stages, step.microbatches, step.trains, step.makespan) == (2, 1, True, 9.0)
    first, second = step.ranks
    assert (first.host, second.host) == ("algo-1", "algo-2")
    assert [(one.name, one.start, one.stop) for one in second.blocks] == [
        ("F0 blocks.1", 1, 2),
        ("B0 (model)", 2, 4),
        ("S0 update", 6, 9),
    ]
    assert first.busy_seconds() == 3
    assert CliRunner().invoke(main, ["timeline", str(tmp_path)]).exit_code == 0


def test_each_run_of_the_order_in_a_step_is_there():
    found = piped().rehearsal
    twice = [one.model_copy(update={"pipeline_runs": 2, "step_seconds": 9.0}) for one in found.kinds]
    made = rehearsed(*twice)
    assert made.rehearsal.step_seconds == 2 * 6 + 9 - 2 * 3
    second = job_timeline(timelines_of(made)).step().ranks[1]
    assert [(one.name, one.start, one.stop) for one in second.blocks] == [
        ("F0 blocks.1", 1, 2),
        ("B0 (model)", 2, 4),
        ("F0 blocks.1", 7, 8),
        ("B0 (model)", 8, 10),
        ("S0 update", 12, 15),
    ]


def test_without_a_pipeline_the_rank_s_own_blocks_are_the_timeline():
    found = rehearsed(kind(0, GIB, blocks=[block("F", 0, 0, 0.1), block("B", 0, 0.1, 0.3), block("S", 0, 0.4, 0.5)]))
    (rank,) = job_timeline(timelines_of(found)).step().ranks
    assert [one.name for one in rank.blocks] == ["F0 (model)", "B0 (model)", "S0 step function"]
    assert rank.stop == 0.5


def test_without_times_there_is_no_timeline():
    with pytest.raises(ConfigError, match="the rehearsal has no times: the rates of 'ml.p4d.24xlarge' are not known"):
        timelines_of(rehearsed(kind(0, GIB)))


def test_all_pictures_are_drawn_for_both_pages(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = [path.name for path in save_all(piped(), tmp_path / "made")]
    assert drawn == ["memory.png", "memory-dark.png", "timeline.png", "timeline-dark.png"]
    assert all((tmp_path / "made" / name).stat().st_size > 1000 for name in drawn)


class Rates:
    """A second for each multiplication."""

    def seconds_of_work(self, flops, moved, dtype):
        return flops


def test_blocks_end_where_a_rank_waits_or_does_something_else():
    clock, at, number = WorkClock(), {"phase": "forward"}, {"microbatch": 0}
    times = ModuleTimes(lambda: RankPhase(at["phase"], ""), Rates(), clock)
    times.keeps_blocks = True
    times.microbatch = lambda: number["microbatch"]
    row, column = torch.ones(1, 1), torch.ones(1, 1)  # two operations: multiply and add
    with SkipComputeMode([times]):
        row @ column
        row @ column
        clock.wait_until(10)
        row @ column
        at["phase"] = "backward"
        row @ column
        at["phase"], number["microbatch"] = "update", None
        row @ column
    assert [(one.kind, one.microbatch, one.start, one.stop) for one in times.blocks(0.0)] == [
        ("F", 0, 0, 4),
        ("F", 0, 10, 12),
        ("B", 0, 12, 14),
        ("S", 0, 14, 16),
    ]
    assert times.blocks(10.0)[1].start == 0
