"""A rank that ends without a word is the first cause, whatever the others tell of the connection that they lost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from smp_launch.failures.failure import Cause, FailureCollector
from smp_launch.machine.output import LineAssembler, OutputLine
from smp_launch.machine.processes import is_ending
from smp_launch.machine.signals import StopRequests
from smp_launch.supervision.supervise import Supervisor
from smp_records.records import FailureRecord, format_failure

RULE = "-" * 74

#: What mpirun of both versions says of rank 1.
CODES = [
    f"{RULE}\nprterun detected that one or more processes exited with non-zero status,\nthus causing the job to be terminated. "
    f"The first process to do so was:\n\n   Process name: [prterun-vm-4810@1,1]\n   Exit code:    3\n{RULE}",
    f"{RULE}\nmpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. "
    f"The first process to do so was:\n\n  Process name: [[32759,1],1]\n  Exit code:    3\n{RULE}",
]

LOST = "the connection to stage 1 (rank 1) is lost"

#: Rank 0 raises as soon as rank 1 is gone, as those do that talk to it.
SCRIPT = """
import os, socket, time
if os.environ["SMP_RANK"] == "1":
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("meeting")
            break
        except OSError:
            time.sleep(0.01)
    connection.sendall(b"hello")
    {end}
server = socket.socket(socket.AF_UNIX)
server.bind("meeting.new")
server.listen()
os.rename("meeting.new", "meeting")
other, _ = server.accept()
other.recv(5)
if not other.recv(1):
    raise ConnectionError("rank 1 has gone")
"""


def heard(text, rank, error, message):
    """A collector that heard mpirun's ``text``, and why ``rank`` failed."""
    told = FailureRecord(
        rank=rank, host=f"algo-{rank + 1}", error_type=error, message=message, traceback=f"trace {rank}", when=1.0
    )
    collector = FailureCollector(lambda rank: f"algo-{rank + 1}")
    for line in text.split("\n"):
        collector.take(OutputLine(line))
    collector.take(OutputLine(format_failure(told), rank))
    collector.finish()
    return collector


@pytest.mark.parametrize("text", CODES)
@pytest.mark.parametrize("unheard", [None, {1}])
def test_a_code_comes_before_the_errors_that_it_causes(text, unheard):
    collector = heard(text, 0, "StageError", LOST)
    cause = collector.first_cause(3, first_ended=1, ended_unheard=unheard)
    assert cause.headline.startswith("rank 1 (algo-2): ended with exit code 3; it did not raise an exception")
    assert f"then rank 0 (algo-1): StageError: {LOST}\ntrace 0" in cause.detail


def test_a_code_after_another_rank_has_told_is_its_consequence():
    collector = heard(CODES[0], 0, "ValueError", "boom")
    assert collector.first_cause(3, first_ended=1, ended_unheard=set()).headline == "rank 0 (algo-1): ValueError: boom"


def test_a_rank_that_has_told_why_is_told_so():
    collector = heard(CODES[0], 1, "SystemExit", "3")
    assert collector.first_cause(3, first_ended=1, ended_unheard={1}) == Cause(
        "rank 1 (algo-2): SystemExit: 3", "trace 1", "SystemExit", 1
    )


@pytest.mark.parametrize(
    ("code", "error", "headline"),
    [
        (5, "StageError", "rank 1 (algo-2): ended with exit code 5"),
        # A rank that ended well before the others failed, whose exit code 1 is that of an exception.
        (1, "StageError", "rank 0 (algo-1): StageError"),
        (5, "SystemExit", "rank 0 (algo-1): SystemExit"),
    ],
)
def test_when_mpirun_says_nothing_a_code_that_no_exception_has_is_another_rank_s(code, error, headline):
    collector = heard("", 0, error, LOST)
    assert collector.first_cause(code, first_ended=1, ended_unheard={1}).headline.startswith(headline)


@pytest.fixture
def zombie():
    """A process that has ended, and of which only the exit code is left; gives its number."""
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


def test_a_process_is_ending_from_the_moment_that_it_exits(zombie):
    assert is_ending(zombie)
    assert not is_ending(os.getpid())
    os.waitpid(zombie, 0)
    assert not is_ending(zombie)  # there is no such process


def test_who_is_ending_when_the_first_failure_is_told_has_ended_unheard(zombie):
    """Rank 0 lives, and tells that it fails; rank 1 has ended, which the supervisor has not noticed yet."""
    told = [format_failure(FailureRecord(rank=rank, error_type="StageError", message=LOST)).encode() for rank in (0, 2)]
    read, write = os.pipe()
    with StopRequests() as stop, open(read, "rb"), open(write, "wb", buffering=0) as output:
        supervisor = Supervisor(stop, FailureCollector(lambda rank: ""), ranks=3)
        supervisor._outcome.ended_unheard = set()
        supervisor._watched.update({0: os.getpid(), 1: zombie})
        output.write(b"a word\n")
        supervisor._on_output(read, LineAssembler(None), 2)
        assert supervisor._outcome.ended_unheard == set()
        output.write(told[0] + b"\n")
        supervisor._on_output(read, LineAssembler(None), 2)
        assert supervisor._outcome.ended_unheard == {1}
        supervisor._watched[2] = zombie
        output.write(told[1] + b"\n")
        supervisor._on_output(read, LineAssembler(None), 2)
        assert supervisor._outcome.ended_unheard == {1}, (
            "who ends after the first failure was told may be its consequence"
        )


@pytest.mark.job
@pytest.mark.parametrize(
    ("end", "headline"),
    [
        ("os._exit(5)", "rank 1 (algo-1): ended with exit code 5; it did not raise an exception"),
        ("raise SystemExit(5)", "rank 1 (algo-1): SystemExit: 5"),
    ],
)
def test_a_job_whose_rank_ends_while_another_waits_for_it(launcher, end, headline):
    job = launcher.job(SCRIPT.format(end=end))
    running = launcher.start(job)
    assert running.wait() != 0
    assert job.failure().startswith(headline), job.failure()
    if "_exit" in end:
        assert "then rank 0 (algo-1): ConnectionError: rank 1 has gone" in job.failure()
