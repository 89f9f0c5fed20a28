"""The watch over several hosts: each answers its leader over the connection that follows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from smp_launch.machine.locked_folders import LeaderStatus, StatusDir
from smp_launch.watch.hang_timeout import HangTimeout
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.other_hosts import GLANCE, RECORDS, WHERE, OtherHost, answer
from smp_launch.watch.position import Standing
from smp_launch.watch.watch import HangWatch
from smp_records import rank_record

FOLLOW = (
    "import sys; from pathlib import Path; from smp_launch.remote.login import follow; "
    "from smp_launch.machine.locked_folders import StatusDir; follow(StatusDir(Path(sys.argv[1])))"
)
RANK = "import os; from smp_records import rank_record as w; n = w.begin(os.environ, %d); n.begin_step();"
#: In a file of this library's, as a wait is.
WAITS = "n.open_wait('all_reduce', (0, 1)); import time; exec(compile('def wait(): time.sleep(1000)', w.__file__, 'exec')); wait()"
SLEEPS = "import time; time.sleep(1000)"


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start_rank(processes, folder, rank, code):
    environ = {**os.environ, rank_record.FOLDER_VARIABLE: str(folder)}
    processes.append(subprocess.Popen([sys.executable, "-c", RANK % rank + code], env=environ))
    while (found := rank_record.read(folder / str(rank))) is None or found.step < 1:
        time.sleep(0.01)
    return processes[-1]


@pytest.fixture
def host(processes, tmp_path):
    """A host that follows its leader, with rank 1; gives its process, the leader's view of it, and the rank."""
    (tmp_path / "leader").mkdir()
    (tmp_path / RECORDS).mkdir()
    rank = start_rank(processes, tmp_path / RECORDS, 1, SLEEPS)
    command = [sys.executable, "-c", FOLLOW, str(tmp_path / "leader")]
    following = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    processes.append(following)
    assert following.stdout.readline() == b"ready\n"
    return following, OtherHost(following.stdin, following.stdout, {1}), rank


def test_a_hang_on_another_host_is_found_by_the_leader(host, processes, tmp_path):
    following, other, rank = host
    (tmp_path / "own").mkdir()
    start_rank(processes, tmp_path / "own", 0, WAITS)
    patience = HangTimeout(1.0)
    for step in (1, 2, 3):
        patience.saw(step, float(step))
    watch = HangWatch([LocalRanks(tmp_path / "own"), other], patience)
    deadline = time.monotonic() + 30
    while (hang := watch.look()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert hang.verdict.rank == 1
    assert hang.positions[1].standing is Standing.SCRIPT
    assert hang.positions[1].where.pid == rank.pid
    assert 1.0 <= hang.positions[1].seconds < 30
    assert hang.positions[1].threads
    os.kill(rank.pid, signal.SIGSTOP)
    assert watch.positions()[1].standing is Standing.STOPPED
    # What the leader says last is how it ended, as before.
    following.stdin.write(b'{"exit_code": 3, "headline": "x"}\n')
    following.stdin.close()
    assert following.wait(30) == 0
    assert StatusDir(tmp_path / "leader").wait_for_end() == LeaderStatus(3, "x")


def test_a_host_that_is_gone_or_says_nothing_sensible_holds_nobody_up(host):
    following, other, _ = host
    following.kill()
    following.wait()
    began = time.monotonic()
    assert other.glances() == {}
    other.ask()
    assert other.positions() == {}
    assert time.monotonic() - began < 30


def test_words_that_are_no_request_are_not_answered(tmp_path):
    assert answer("", tmp_path) is None
    assert answer('{"exit_code": 0, "headline": ""}', tmp_path) is None
    assert answer(GLANCE, tmp_path / "absent")
    assert answer(WHERE, tmp_path)


def test_answers_come_in_pieces_and_behind_other_words(tmp_path):
    notes = rank_record.Notes(tmp_path / "7", 7)
    notes.begin_step()
    rank_record.Notes(tmp_path / "3", 3).begin_step()  # of an earlier start, when this host had another rank
    (asked, requests), (answers, said) = os.pipe(), os.pipe()
    with os.fdopen(requests, "wb") as requests, os.fdopen(answers, "rb") as answers:
        other = OtherHost(requests, answers, range(6, 8))
        words = f"welcome\n{answer(GLANCE, tmp_path)}\n".encode()
        for piece in (words[:20], words[20:25]):
            os.write(said, piece)
            assert other.glances() == {}
        os.write(said, words[25:])
        (glance,) = other.glances().items()
        assert (glance[0], glance[1].step) == (7, 1)
        os.close(said)
        assert other.positions() == {}
    os.close(asked)
