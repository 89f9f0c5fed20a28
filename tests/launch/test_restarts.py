"""Ranks that are started again after a failure: which failures are worth it, pauses, what is told, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from smp_config.errors import ConfigError
from smp_config.recovery import interval_steps, max_restarts, restart_count, wants_memory
from smp_launch.failures.failure import Cause
from smp_launch.machine.signals import StopRequests
from smp_launch.supervision import restarts
from smp_launch.supervision.restarts import Attempt, Restarts


def killed(step, pid=4711, rank=1):
    headline = f"rank {rank} (algo-1): was killed by signal 9 (SIGKILL) in backward of step {step}, process {pid}"
    return Attempt(137, Cause(headline, rank=rank), step)


def raised(error, step=None, message="boom"):
    return Attempt(1, Cause(f"rank 0 (algo-1): {error}: {message}", "trace", error, 0), step)


WELL = Attempt(0)


@pytest.fixture
def stop():
    with StopRequests() as requests:
        yield requests


@pytest.fixture
def starts(stop, monkeypatch, capfd):
    """Runs starts that end as they are given: ``starts(limit, *ends)`` gives exit code, cause, number of starts, pauses, log."""
    pauses = []
    monkeypatch.setattr(Restarts, "_pause", lambda self, seconds: pauses.append(seconds))

    def run(limit, *ends):
        counts = []
        pauses.clear()

        def start(count):
            counts.append(count)
            return ends[count]

        code, cause = Restarts(limit, stop).run(start)
        assert counts == list(range(len(counts)))
        return code, cause, len(counts), list(pauses), capfd.readouterr().err

    return run


def test_a_job_goes_on_after_failures_at_different_steps(starts):
    code, cause, count, pauses, log = starts(3, killed(4), killed(9), raised("RuntimeError", 12), WELL)
    assert (code, cause, count) == (0, None, 4)
    assert pauses == [0, 0, 0]  # each came further than the one before
    assert "failed in step 4: rank 1 (algo-1): was killed by signal 9" in log
    assert "(restart 1 of 3)" in log
    assert "failed in step 12: rank 0 (algo-1): RuntimeError: boom" in log
    assert "(restart 3 of 3)" in log


def test_a_lost_host_is_no_fault_that_comes_again(starts):
    """Neither an error before the first step, nor the same fault at the same step, where the host that caused it is gone."""
    lost = Attempt(1, Cause("host algo-2 is gone", error="RuntimeError"), None, is_host_lost=True)
    early = Attempt(1, Cause("rank 3 (algo-2): ImportError: boom", error="ImportError"), None, is_host_lost=True)
    assert starts(3, lost, lost, early, WELL)[:3] == (0, None, 4)
    for_good = Attempt(1, Cause("host algo-1 is gone"), None, is_final=True, is_host_lost=True)
    assert starts(3, for_good)[2] == 1


def test_the_first_cause_is_told_when_restarts_are_used_up(starts):
    code, cause, count, _, _ = starts(2, killed(4), raised("OSError", 7, "gone"), raised("RuntimeError", 9))
    assert (code, count) == (1, 3)
    assert cause.headline.startswith("rank 1 (algo-1): was killed by signal 9")
    assert "after 2 restarts; all 2 restarts of SMP_MAX_RESTARTS are used up" in cause.headline
    assert cause.headline.endswith("the last failure: rank 0 (algo-1): RuntimeError: boom")
    assert "start 2, failed in step 7: rank 0 (algo-1): OSError: gone\n\ntrace" in cause.detail


def test_without_restarts_the_cause_stays_as_it_is(starts):
    failed = raised("RuntimeError", 3)
    assert starts(0, failed)[:3] == (1, failed.cause, 1)


def test_the_same_fault_at_the_same_step_ends_the_job(starts):
    # Other numbers of processes are no other fault; another step, or another error, is.
    code, cause, count, _, _ = starts(9, killed(4), killed(5), raised("RuntimeError", 5), killed(4, pid=99))
    assert (code, count) == (137, 4)
    assert "the same fault came in step 4 before: the ranks are not started again" in cause.headline


@pytest.mark.parametrize("error", ["ConfigError", "ModuleNotFoundError", "SyntaxError", "TypeError", "SystemExit"])
def test_errors_of_the_script_before_its_first_step_are_not_retried(starts, error):
    code, cause, count, _, _ = starts(3, raised(error))
    assert (code, count) == (1, 1)
    assert cause.headline == (
        f"rank 0 (algo-1): {error}: boom (before the first step, such an error would come again: the ranks are not started again)"
    )
    assert starts(3, raised(error, 5), WELL)[0] == 0  # afterwards it may be the data's


def test_errors_of_the_surroundings_are_retried_before_the_first_step(starts):
    assert starts(1, raised("ConnectionError"), WELL)[0] == 0


def test_a_job_that_was_stopped_is_not_started_again(starts):
    stopped = Attempt(143, Cause("the job was stopped by SIGTERM before its script ended"), 5, is_final=True)
    assert starts(3, killed(4), stopped)[:3] == (143, stopped.cause, 2)


def test_pauses_double_until_the_job_gets_further(starts):
    failures = [raised("OSError", 1, word) for word in "abcdefgh"]
    assert starts(9, *failures, killed(2), WELL)[3] == [0, 1, 2, 4, 8, 16, 30, 30, 0]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_stop_during_a_pause_ends_it(stop, monkeypatch, when):
    monkeypatch.setattr(restarts, "_FIRST_PAUSE", 60.0)
    ends = iter([raised("OSError", 1, "a"), raised("OSError", 1, "b")])

    def start(count):
        if count == 1 and when == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        elif count == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return next(ends)

    began = time.monotonic()
    code, cause = Restarts(5, stop).run(start)
    assert code == 143
    assert "the job was stopped by SIGTERM before its ranks were started again" in cause.headline
    assert time.monotonic() - began < 30  # not the minute of the pause


def test_what_variables_may_say():
    assert max_restarts({}) == 0
    assert max_restarts({"SMP_MAX_RESTARTS": "3"}) == 3
    assert restart_count({"SMP_RESTART_COUNT": "2"}) == 2
    assert (wants_memory({}), wants_memory({"SMP_MEMORY_CHECKPOINT": "1"})) == (False, True)
    assert interval_steps({"SMP_MEMORY_CHECKPOINT_STEPS": "5"}) == 5
    for name, value in {
        "SMP_MAX_RESTARTS": "-1",
        "SMP_MEMORY_CHECKPOINT": "yes",
        "SMP_MEMORY_CHECKPOINT_STEPS": "0",
    }.items():
        with pytest.raises(ConfigError, match=name):
            (max_restarts if name == "SMP_MAX_RESTARTS" else wants_memory)({name: value})


FAILS = """
import os, signal, time
from pathlib import Path
from smp_records.rank_record import current_record
rank, count = os.environ["SMP_RANK"], int(os.environ["SMP_RESTART_COUNT"])
folder = Path(os.environ["SMP_MEMORY_FOLDER"])
Path(f"../output/data/{rank}.{count}").write_text(str(folder))
assert folder.is_dir() and folder.stat().st_mode & 0o777 == 0o700
if rank == "0":
    (folder / f"kept-{count}").touch()
while not (folder / f"kept-{count}").exists():
    time.sleep(0.01)
if count:
    assert (folder / "kept-0").exists()
current_record().begin_step()
if count < 2:
    current_record().begin_step()
    for _ in range(count):
        current_record().begin_step()
    Path("../output/failure").write_text("of the script itself")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL) if count == 0 else time.sleep(100)
    time.sleep(100 if count == 0 else 0)
print("rank", rank, "is through")
"""


@pytest.mark.job
def test_a_killed_and_a_hung_rank_are_started_again_in_a_whole_job(launcher):
    job = launcher.job(FAILS)
    environment = {"SMP_MAX_RESTARTS": "2", "SMP_MEMORY_CHECKPOINT": "1", "SMP_HANG_SECONDS": "1"}
    code, log = launcher.run(job, environment=environment)
    text = "\n".join(log)
    assert code == 0, text
    assert job.failure() == ""  # that of a start that failed is not the job's
    assert "failed in step 2: rank 1 (algo-1): was killed by signal 9 (SIGKILL)" in text
    assert "failed in step 3: rank 1 (algo-1): hang" in text
    assert "(restart 2 of 2)" in text
    folders = {(job.tree() / "output" / "data" / f"{rank}.{n}").read_text() for rank in (0, 1) for n in range(3)}
    assert len(folders) == 1
    assert not os.path.exists(folders.pop())
