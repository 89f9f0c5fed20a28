"""A timeline on its way: switched on by the estimator, written by the ranks of two hosts, read from what comes back."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

pytestmark = [pytest.mark.job, pytest.mark.timeout(120)]

SCRIPT = """
import time
import smdistributed.modelparallel.torch as smp
from smp_runtime.job import session
from smp_runtime.pipeline.observe.recorder import recorder_of_job

smp.init()
recorder = recorder_of_job(smp.rank(), session.current_session().control)
for number in range(5):
    smp.barrier()
    recorder.begin_step(number)
    start = time.perf_counter()
    recorder.add("F0 layers", "F", 0, "layers", start, start + 0.010)
    recorder.end_step()
recorder.close()
if smp.rank() == 1 and FAILS:
    raise ValueError("boom")
"""


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_ranks_files_come_back_and_are_read(gpt_job, text, tmp_path, fails):
    from smp_estimator.cli.main import main
    from smp_estimator.timeline import read_timeline

    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "record.py").write_text(SCRIPT.replace("FAILS", str(fails)))
    job = gpt_job(
        1,
        hosts=2,
        entry_point="record.py",
        source_dir=str(tmp_path / "src"),
        estimator={"environment": {"SMP_TIMELINE": "3"}},
    )
    if fails:  # its folder is kept, and nothing is packed
        with pytest.raises(ValueError, match="boom"):
            job.fit({"train": f"file://{text}"}, logs=False)
        output = str(job.sagemaker_session.job(job._current_job_name).tree.root)
    else:
        job.fit({"train": f"file://{text}"}, logs=False)
        output = str(tmp_path / "out")
        assert (tmp_path / "out" / "output.tar.gz").exists()
    timeline = read_timeline(output)
    assert timeline.job.startswith(job._current_job_name)
    assert (timeline.ranks, timeline.missing) == ((0, 1), ())
    assert [step.number for step in timeline.steps] == [2, 3, 4]
    assert [rank.host for rank in timeline.step().ranks] == ["algo-1", "algo-2"]
    # One clock: the steps of the ranks began together, at a barrier.
    assert all(step.makespan < 5.0 for step in timeline.steps)
    assert timeline.step().ranks[1].busy_seconds() == pytest.approx(0.010, abs=1e-6)
    said = CliRunner().invoke(main, ["timeline", output, "--step", "3"])
    assert said.exit_code == 0, said.output
    assert "algo-2" in said.output
