"""What a rank still does when its script has failed, and what mpirun may say without hiding or losing anything."""

from __future__ import annotations

import itertools
import stat
import time

import pytest
from support.matrix import sampled

pytestmark = pytest.mark.job

#: Most seconds from a failure to the bootstrap's end, on a busy machine; what is not ended would take a minute.
SOON = 30.0

RULE = "-" * 74


def failing(running):
    """The exit code, after the seconds from the failure to the end were found short."""
    code = running.wait()
    ended = time.time()
    failed = next(came for came, line in running.lines if line == "failing now")
    assert ended - failed < SOON
    return code


HOLDS = """
import atexit, os, sys, time
{before}
if os.environ["SMP_RANK"] == os.environ["LAST"]:
    kept = open("../output/data/kept", "w")
    kept.write("not flushed")
    atexit.register(lambda: print("handler ran"))
    atexit.register(lambda: open("../output/data/by-handler", "w").write("late"))
    print("failing now")
    raise ValueError("boom")
time.sleep(60)
"""

BEFORE = {
    "plain": "",
    "MPI": "from mpi4py import MPI",
    "an endless thread": "import threading; threading.Thread(target=time.sleep, args=[60]).start()",
}


@pytest.mark.parametrize(
    ("before", "processes"),
    sampled([*((b, 2) for b in BEFORE), ("plain", None)], {("MPI", 2), ("an endless thread", 2), ("plain", None)}),
)
def test_open_files_and_exit_handlers_of_a_failing_script(launcher, before, processes):
    job = launcher.job(HOLDS.format(before=BEFORE[before]), processes=processes)
    running = launcher.start(job, environment={"LAST": "1" if processes else "0"})
    assert failing(running) == 1
    assert "ValueError: boom" in job.failure().partition("\n")[0]
    assert "handler ran" in running.log
    data = job.tree() / "output" / "data"
    assert (data / "kept").read_text() == "not flushed"
    assert (data / "by-handler").read_text() == "late"


@pytest.mark.parametrize(
    "hang", [pytest.param("time.sleep(60)", marks=pytest.mark.full), "ctypes.PyDLL(None).sleep(60)"]
)
def test_an_exit_handler_that_hangs_is_not_waited_for(launcher, hang):
    """Nor one that keeps the interpreter's lock meanwhile."""
    job = launcher.job(
        f"""
        import atexit, ctypes, os, time
        if os.environ["SMP_RANK"] == "1":
            kept = open("../output/data/kept", "w")
            kept.write("not flushed")
            atexit.register(lambda: {hang})
            print("failing now")
            raise ValueError("boom")
        time.sleep(60)
        """
    )
    assert failing(launcher.start(job)) != 0
    assert job.failure().startswith("rank 1 (algo-1): ValueError: boom")
    assert (job.tree() / "output" / "data" / "kept").read_text() == "not flushed"


def test_a_group_of_torch_does_not_hold_a_failing_rank(launcher):
    pytest.importorskip("torch")
    job = launcher.job(
        """
        import os, time
        import torch, torch.distributed as dist
        rank = int(os.environ["SMP_RANK"])
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath("../output/data/meet"), rank=rank, world_size=2)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        if rank == 1:
            print("failing now")
            raise ValueError("boom")
        dist.recv(ones, src=1)
        """
    )
    assert failing(launcher.start(job)) == 1
    assert job.failure().startswith("rank 1 (algo-1): ValueError: boom")


RAISES, EXITS = 'raise RuntimeError("in the hook")', "os._exit(9)"


@pytest.mark.parametrize(
    ("hook", "processes"), sampled(itertools.product((RAISES, EXITS), (1, None)), {(RAISES, 1), (EXITS, None)})
)
def test_a_hook_of_the_script_does_not_hide_the_cause(launcher, hook, processes):
    job = launcher.job(
        f"""
        import os, sys
        def hook(*error):
            {hook}
        sys.excepthook = hook
        raise ValueError("boom")
        """,
        processes=processes,
    )
    code, log = launcher.run(job)
    assert code != 0
    assert job.failure().startswith("rank 0 (algo-1): ValueError: boom")
    if "raise" in hook:
        assert {"ValueError: boom", "RuntimeError: in the hook"} <= set(log)


def fake_mpirun(folder, text):
    path = folder / "mpirun"
    path.write_text(f"#!/bin/bash\n[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.0' && exit\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return {"SMP_LAUNCH_MPIRUN": str(path)}


@pytest.mark.full
def test_a_script_without_mpirun_may_print_rules(launcher):
    job = launcher.job(
        f"""
        import time
        print("{RULE}")
        print("MPI_ABORT was invoked, now", time.time())
        time.sleep(3)
        print("{RULE}")
        """,
        processes=None,
    )
    running = launcher.start(job)
    assert running.wait() == 0
    assert running.log.count(RULE) == 2
    late = [came - float(line.split()[-1]) for came, line in running.lines if "now" in line]
    assert late[0] < 2


def test_a_rule_of_mpirun_without_its_pair_does_not_withhold_the_log(launcher, tmp_path):
    job = launcher.job("", processes=1)
    running = launcher.start(job, environment=fake_mpirun(tmp_path, f"echo {RULE}\necho a word\nsleep 4\necho end"))
    running.wait_for("end")
    came = {line: when for when, line in running.lines}
    assert came["end"] - came["a word"] > 1.5
    assert running.wait() == 0


def test_a_rank_that_starts_is_heard_behind_marks_of_mpirun(launcher, tmp_path):
    job = launcher.job("", processes=1)
    marks = "trap 'echo stopped well; exit 0' USR2\necho \"Sat Nov 21 20:00:00<stderr>: smp-started 0 $$\" >&2"
    running = launcher.start(
        job, environment=fake_mpirun(tmp_path, f"{marks}\necho ready\nfor n in {{1..60}}; do sleep 0.5; done")
    )
    running.wait_for("ready")
    running.process.terminate()
    assert running.wait() == 0
    assert "stopped well" in running.log


def test_an_allocation_of_slurm_is_not_the_job_s(launcher):
    job = launcher.job(
        """
        import os
        print("rank", os.environ["SMP_RANK"], sorted(name for name in os.environ if name.startswith("SLURM")))
        """
    )
    names = ("SLURM_NODELIST", "SLURM_JOB_NODELIST")
    allocation = {
        **dict.fromkeys(("SLURM_JOBID", "SLURM_JOB_ID"), "7"),
        **dict.fromkeys(names, "far-away[1-2]"),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"), "1(x2)"),
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "0",
        "SLURM_TMPDIR": "/scratch",
    }
    code, log = launcher.run(job, environment=allocation)
    assert code == 0, log
    assert {f"rank {rank} ['SLURM_TMPDIR']" for rank in (0, 1)} <= set(log)
