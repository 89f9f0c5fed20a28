"""How jobs end before their time: a rank fails or is killed, somebody stops the job, the parent dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.matrix import sampled

from smp_records.records import FAILURE_CHARACTERS

PACKAGES = Path(__file__).parents[2] / "container"

pytestmark = pytest.mark.job

#: Most seconds from a rank's failure to the bootstrap's end, on a busy machine; what is not ended would sleep for a minute.
SOON = 30.0

#: What the other rank does meanwhile.
OTHERS = {
    "sleeps": "time.sleep(60)",
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    "waits in a receive": "from mpi4py import MPI; MPI.COMM_WORLD.recv(source=1)",
}

#: How rank 1 fails, and the beginning of the failure file.
FAILURES = {
    'raise ValueError("boom")': "rank 1 (algo-1): ValueError: boom\n\nTraceback (most recent call last):\n",
    "os.kill(os.getpid(), signal.SIGKILL)": "rank 1 (algo-1): was killed by signal 9 (SIGKILL): often the machine ran out",
    "os._exit(5)": "rank 1 (algo-1): ended with exit code 5",
}


def script(other, failure):
    return f"""
import os, signal, sys, time
if os.environ["SMP_RANK"] == "1":
    time.sleep(0.3)
    print("failing now")
    {failure}
else:
    {other}
"""


def check_soon(running):
    code = running.wait()
    ended = time.time()
    failed = next(came for came, line in running.lines if line == "failing now")
    assert ended - failed < SOON
    return code


@pytest.mark.parametrize("other", sampled(OTHERS, {"waits in a receive"}))
def test_a_rank_that_raises(launcher, other):
    failure = 'raise ValueError("boom")'
    job = launcher.job(script(OTHERS[other], failure))
    running = launcher.start(job)
    assert check_soon(running) == 1
    assert job.failure().startswith(FAILURES[failure])
    assert "[rank1]: Traceback (most recent call last):" in running.log
    assert "[rank1]: ValueError: boom" in running.log
    assert "smp-launch: failed: rank 1 (algo-1): ValueError: boom" in running.log
    assert not any(line.startswith("smp-failure") or "-----" in line for line in running.log)
    # The traceback begins with the script, not with the wrapper around it.
    assert "smp_launch" not in job.failure()


@pytest.mark.parametrize("failure", sampled([f for f in FAILURES if "raise" not in f], {"os._exit(5)"}))
def test_a_rank_that_dies(launcher, failure):
    job = launcher.job(script(OTHERS["ignores SIGTERM"], failure))
    running = launcher.start(job)
    assert check_soon(running) != 0
    assert job.failure().startswith(FAILURES[failure])


def test_the_first_cause_is_told_not_its_consequence(launcher):
    """Rank 0 notices rank 1's death and raises; rank 1's death is the reason."""
    job = launcher.job(
        """
        import os, signal, time
        path = "../output/data/pid"
        if os.environ["SMP_RANK"] == "1":
            with open(path + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(path + ".part", path)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        while not os.path.exists(path):
            time.sleep(0.01)
        pid = open(path).read()
        def alive():
            try:
                return "Z" not in open(f"/proc/{pid}/stat").read().split()[2]
            except OSError:
                return False
        while alive():
            time.sleep(0.001)
        raise ConnectionError("peer is gone")
        """
    )
    assert launcher.run(job)[0] != 0
    assert job.failure().startswith("rank 1 (algo-1): was killed by signal 9 (SIGKILL)")


def test_a_long_message_leaves_room_for_rank_and_exception(launcher):
    job = launcher.job('raise ValueError("first line\\n" + "é" * 5000)', processes=1)
    assert launcher.run(job)[0] == 1
    head = job.failure()[:FAILURE_CHARACTERS]
    assert head.startswith("rank 0 (algo-1): ValueError: first line éé")
    assert "\n" in head


@pytest.mark.parametrize(
    ("line", "code", "headline"),
    [
        pytest.param("sys.exit(4)", 4, "rank 0 (algo-1): SystemExit: 4", marks=pytest.mark.full),
        ('sys.exit("no data")', 1, "rank 0 (algo-1): SystemExit: no data"),
        ("x = = 1", 1, "rank 0 (algo-1): SyntaxError: invalid syntax"),
        pytest.param(
            "import nothing_like_this",
            1,
            "rank 0 (algo-1): ModuleNotFoundError: No module named",
            marks=pytest.mark.full,
        ),
    ],
)
def test_other_ways_to_fail(launcher, line, code, headline):
    job = launcher.job(f"import sys\n{line}\n", processes=1)
    assert launcher.run(job)[0] == code
    assert job.failure().startswith(headline)


def test_a_failure_file_of_the_script_is_kept(launcher):
    job = launcher.job('open("../output/failure", "w").write("mine"); raise ValueError', processes=1)
    assert launcher.run(job)[0] == 1
    assert job.failure() == "mine"


SAVES = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    print("saved", os.environ["SMP_RANK"])
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(60)
print("not reached")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
@pytest.mark.parametrize("processes", [2, None])
def test_ranks_may_save_and_end_well(launcher, number, processes):
    job = launcher.job(SAVES, processes=processes)
    running = launcher.start(job)
    running.wait_for("ready", processes or 1)
    running.process.send_signal(number)
    assert running.wait() == 0, running.log
    assert sum(line.startswith("saved") for line in running.log) == (processes or 1)
    assert job.failure() == ""


def test_a_handler_may_print_while_the_script_prints(launcher):
    job = launcher.job(
        """
        import signal, sys
        def save(number, frame):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        while True:
            print("x" * 1000)
        """,
        processes=None,
    )
    running = launcher.start(job)
    running.wait_for("xxx", 5)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0, running.log[-20:]
    assert running.log[-1].endswith("saved")


def test_two_hosts_are_stopped_and_end_well(launcher):
    job = launcher.job(SAVES, hosts=2)
    both = [launcher.start(job, host=host) for host in job.hosts]
    both[0].wait_for("ready", 4)
    for running in both:
        running.process.send_signal(signal.SIGTERM)
    assert [running.wait() for running in both] == [0, 0]
    assert sum(line.startswith("saved") for line in both[0].log) == 4


def test_the_parent_s_death_stops_the_job(launcher):
    job = launcher.job(SAVES)
    running = launcher.start(job, lifeline=True)
    running.wait_for("ready", 2)
    running.process.stdin.close()
    assert running.wait() == 0, running.log
    assert sum(line.startswith("saved") for line in running.log) == 2


IN_PYTHON, IN_MPI = "time.sleep(60)", "from mpi4py import MPI; MPI.COMM_WORLD.recv()"


@pytest.mark.parametrize("body", sampled([IN_PYTHON, IN_MPI], {IN_MPI}))
def test_a_script_without_handler_ends_quickly(launcher, body):
    job = launcher.job(f'import time\nprint("ready")\n{body}')
    running = launcher.start(job)
    running.wait_for("ready", 2)
    time.sleep(0.3)
    sent = time.time()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143
    assert time.time() - sent < SOON
    assert "the job was stopped by SIGTERM" in job.failure().partition("\n")[0]


def test_everything_is_killed_after_the_grace(launcher):
    """Also a child that made itself a session of its own."""
    job = launcher.job(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        print("ready")
        time.sleep(60)
        """
    )
    running = launcher.start(job, environment={"SMP_LAUNCH_GRACE_SECONDS": "0.5"})
    running.wait_for("ready", 2)
    sent = time.time()
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143
    assert time.time() - sent < SOON
    assert "did not end within 0.5 s after SIGTERM" in job.failure()
    assert launcher.left() == []


def test_a_second_interrupt_ends_all_patience(launcher):
    job = launcher.job(
        'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint("ready")\ntime.sleep(60)'
    )
    running = launcher.start(job)
    running.wait_for("ready", 2)
    running.process.send_signal(signal.SIGINT)
    running.wait_for("stopping because of SIGINT")
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130


@pytest.mark.parametrize(("output", "processes"), [("None", 2), ("subprocess.DEVNULL", None)])
def test_a_child_that_outlives_the_script_is_ended(launcher, output, processes):
    """mpirun would wait for one that holds the rank's output."""
    job = launcher.job(
        f"""
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        subprocess.Popen(sleep, start_new_session=True, stdout={output}, stderr={output})
        """,
        processes=processes,
    )
    began = time.time()
    assert launcher.run(job)[0] == 0
    assert time.time() - began < SOON
    assert launcher.left() == []


def test_a_worker_whose_leader_is_killed_ends(launcher):
    job = launcher.job('import time\nprint("ready")\ntime.sleep(60)', hosts=2, processes=1)
    leader, worker = (launcher.start(job, host=host) for host in job.hosts)
    leader.wait_for("ready", 2)
    worker.wait_for("waits for algo-1")
    # A killed leader cannot clean up; its session is what the platform would end with the container.
    for pid in launcher.pids():
        if pid != worker.process.pid:
            os.kill(pid, signal.SIGKILL)
    leader.wait()
    assert worker.wait() == 1
    assert "died without a word" in job.failure("algo-2")


def test_a_rank_whose_child_holds_its_output_is_killed(launcher):
    job = launcher.job(
        """
        import os, signal, subprocess, sys, time
        if os.environ["SMP_RANK"] == "1":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            time.sleep(0.3)
            print("failing now")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    running = launcher.start(job)
    assert check_soon(running) != 0
    assert job.failure().startswith("rank 1 (algo-1): was killed by signal 9")


def test_a_stop_while_the_ranks_start_reaches_them(launcher):
    job = launcher.job(SAVES.replace('print("ready")', 'print("ready")\ntime.sleep(0.2)'))
    running = launcher.start(job)
    running.wait_for("smp-launch: 1 host")
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    assert "stopped by SIGTERM" in job.failure() or running.process.returncode == 0


@pytest.mark.parametrize("processes", [2, pytest.param(None, marks=pytest.mark.full)])
def test_a_shell_script_may_save_and_end_well(launcher, processes):
    job = launcher.job(
        """
        trap 'sleep 0.3; echo "saved $SMP_RANK"; exit 0' TERM
        echo ready
        # Not one long sleep: bash runs its trap between commands, and a command that has just begun misses the signal.
        while true; do sleep 0.2; done
        """,
        processes=processes,
        entry_point="run.sh",
    )
    running = launcher.start(job)
    running.wait_for("ready", processes or 1)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0, running.log
    assert sum(line.startswith("saved") for line in running.log) == (processes or 1)


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.full), None])
def test_a_program_of_a_shell_script_may_save_and_end_well(launcher, processes):
    """Bash itself dies of the signal, and no rank ends another's time to save."""
    job = launcher.job(f"{sys.executable} save.py\necho not reached", processes=processes, entry_point="run.sh")
    slowly = SAVES.replace("time.sleep(0.5)", 'time.sleep(0.2 + int(os.environ["SMP_RANK"]))')
    (job.tree() / "code" / "save.py").write_text(slowly.replace('print("ready")', 'print("ready", flush=True)'))
    running = launcher.start(job)
    running.wait_for("ready", processes or 1)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0, running.log
    assert sum(line.startswith("saved") for line in running.log) == (processes or 1)
    assert "not reached" not in running.log


def test_a_shell_script_without_anybody_who_saves_is_told_as_stopped(launcher):
    job = launcher.job("echo ready\nsleep 60", entry_point="run.sh")
    running = launcher.start(job)
    running.wait_for("ready", 2)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143
    assert "run.sh was killed by SIGTERM" in job.failure()


def test_a_stop_after_the_job_s_end_changes_nothing():
    """Docker Compose stops every container once the first has ended, and may find a launcher on its last lines."""
    code = (
        "import os, signal\nfrom smp_launch.machine.signals import StopRequests\n"
        "with StopRequests() as stop:\n    {ended}\nos.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(1)"
    )
    for ended, expected in (("stop.job_has_ended()", 1), ("pass", -signal.SIGTERM)):
        done = subprocess.run([sys.executable, "-c", code.format(ended=ended)], env={"PYTHONPATH": str(PACKAGES)})
        assert done.returncode == expected
