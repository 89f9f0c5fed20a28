"""Who is blamed, and when: out of positions of ranks, and of records in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp_config import ConfigError
from smp_config.limits import HANG_VARIABLE, hang_seconds
from smp_launch.failures.failure import FailureCollector
from smp_launch.watch import stacks
from smp_launch.watch import watch as watches
from smp_launch.watch.hang_timeout import HangTimeout
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.position import RankPosition, Standing, position_of
from smp_launch.watch.report import cause_of_hang, last_seen, text_of, write_report
from smp_launch.watch.stacks import Frame, Thread, ask, parse
from smp_launch.watch.states import State, is_active, state_of
from smp_launch.watch.verdict import find
from smp_launch.watch.watch import HangWatch
from smp_records import rank_record
from smp_records.positions import Glance
from smp_records.rank_record import COLLECTIVE, PUBLIC, JoinedCall, RankRecord, ScriptLine, Waiting

HERE = os.path.abspath(__file__)
EVERYONE = (0, 1, 2, 3)


def public(number, name, line):
    return JoinedCall(number, 0.0, PUBLIC, name, ScriptLine("train.py", line), number=number)


def collective(number, line, name="all_reduce", size=8, members=EVERYONE):
    return JoinedCall(number, 0.0, COLLECTIVE, name, ScriptLine("train.py", line), members, number, size, "float32")


def position(rank, standing=Standing.WAITING, line=10, calls=(), wait=None, step=4, **more):
    where = RankRecord(
        100 + rank, rank, 1, 0.0, step, -1, "forward", "", "", 0.0, tuple(calls), (wait,) if wait else ()
    )
    call = wait.what if wait else "smp.barrier"
    return RankPosition(
        where, standing, more.pop("seconds", 61.0), ScriptLine("train.py", line), call=call, wait=wait, **more
    )


def waiting(number, line, whom=EVERYONE, what="all_reduce"):
    return Waiting(0.0, what, whom, ScriptLine("train.py", line), number)


def of(*positions):
    return find({p.rank: p for p in positions}, 61.0)


def test_a_stopped_rank_is_the_cause_of_all():
    found = of(
        position(0, wait=waiting(7, 10)),
        position(1, Standing.SCRIPT, line=20),
        position(2, Standing.STOPPED, line=30, doing="is stopped"),
    )
    assert found.rank == 2
    assert "train.py:30" in found.text
    assert "kill -CONT 102" in found.text
    assert "rank 0 waits in all_reduce at train.py:10" in found.text
    assert found.is_certain


def test_of_ranks_in_the_script_one_that_others_wait_for():
    found = of(
        position(0, wait=waiting(7, 10, whom=(0, 2))),
        position(1, Standing.SCRIPT, line=20, seconds=90),
        position(2, Standing.SCRIPT, line=30, doing="gets nothing from its data loader"),
    )
    assert found.rank == 2
    assert "train.py:30" in found.text
    assert "data loader" in found.text
    assert found.is_certain


def test_one_that_computes_may_only_be_slow():
    slow = of(position(0, wait=waiting(7, 10)), position(1, Standing.SCRIPT, is_active=True))
    assert (slow.rank, slow.is_certain) == (1, False)
    compiles = of(position(0, wait=waiting(7, 10)), position(1, Standing.SCRIPT, is_compiling=True))
    assert not compiles.is_certain
    both = of(
        position(0, wait=waiting(7, 10)),
        position(1, Standing.SCRIPT, is_active=True, seconds=99),
        position(2, Standing.SCRIPT, line=33),
    )
    assert (both.rank, both.is_certain) == (2, True)


def test_of_two_in_the_script_the_one_that_is_behind():
    """On a GPU the other waits for it where it reads a value."""
    ahead = position(0, Standing.SCRIPT, line=10, seconds=90, calls=[collective(7, 10)])
    behind = position(1, Standing.SCRIPT, line=20, is_active=True, calls=[collective(6, 10)])
    assert of(ahead, behind).rank == 1


def test_uneven_steps_say_who_ran_how_many():
    found = of(position(0, wait=waiting(9, 10), step=10), position(1, Standing.LEFT, step=8))
    assert found.rank == 1
    assert "ended its script after 8 steps" in found.text
    assert "rank 0 waits for it in all_reduce, at train.py:10, in step 10" in found.text
    assert "join" in found.text


def test_other_shapes_in_the_same_collective():
    positions = [position(r, calls=[collective(7, 10)], wait=waiting(7, 10)) for r in (0, 1, 3)]
    odd = position(2, line=12, calls=[collective(7, 12, size=9)], wait=waiting(7, 12))
    found = of(*positions, odd)
    assert found.rank == 2
    assert "all_reduce of 9 float32 at train.py:12" in found.text
    assert "rank 0 all_reduce of 8 float32 at train.py:10" in found.text


def test_a_rank_that_waits_elsewhere_has_left_out_a_call():
    positions = [position(r, calls=[collective(6, 9), collective(7, 10)], wait=waiting(7, 10)) for r in (0, 1)]
    late = position(
        2, line=44, calls=[collective(6, 9)], wait=Waiting(0.0, "smp.barrier", (0,), ScriptLine("train.py", 44))
    )
    found = of(*positions, late)
    assert found.rank == 2
    assert "train.py:44" in found.text
    assert "train.py:10" in found.text


def test_a_stage_that_waits_for_one_that_left_out_a_step_is_not_blamed():
    """Its replica waits for it in a collective; it waits for the next stage, which has gone on to another call."""
    steps = [public(1, "the step a", 5), public(2, "the step a", 5)]
    first = position(
        0,
        calls=[*steps, collective(6, 5, members=(0, 2))],
        wait=Waiting(0.0, "the step a", (1,), ScriptLine("train.py", 5)),
    )
    replica = position(2, calls=[*steps, collective(7, 5, members=(0, 2))], wait=waiting(7, 5, (0, 2)))
    left_out = position(
        1,
        calls=[steps[0], public(2, "smp.barrier", 9), collective(6, 5, members=(1, 3))],
        wait=Waiting(0.0, "smp.barrier", (0,), ScriptLine("train.py", 9)),
    )
    other = position(3, calls=[*steps, collective(7, 5, members=(1, 3))], wait=waiting(7, 5, (1, 3)))
    found = of(first, left_out, replica, other)
    assert found.rank == 1
    assert "smp.barrier at train.py:9, where rank 0 called the step a at train.py:5" in found.text


@pytest.mark.parametrize("skips", [0, 1])
def test_of_two_ranks_the_one_that_skips_a_call_is_told_by_what_follows(skips):
    """The other's next call is the one that this rank has made already."""
    whole = [public(1, "the step a", 5), public(2, "smp.save_checkpoint", 6), public(3, "the step a", 5)]
    short = [public(1, "the step a", 5), public(2, "the step a", 5)]
    calls = {skips: short, 1 - skips: whole}
    found = of(*(position(rank, calls=calls[rank]) for rank in (0, 1)))
    assert found.rank == skips
    assert "smp.save_checkpoint at train.py:6" in found.text


def test_of_many_ranks_the_one_that_differs():
    most = [public(1, "the step a", 5), public(2, "smp.barrier", 6)]
    found = of(
        *(position(r, calls=most) for r in (0, 1, 3)), position(2, calls=[most[0], public(2, "smp.allgather", 8)])
    )
    assert found.rank == 2
    assert "smp.allgather" in found.text


def test_all_in_the_same_call_may_be_the_network():
    found = of(*(position(r, calls=[collective(7, 10)], wait=waiting(7, 10)) for r in EVERYONE))
    assert "connection between them" in found.text


# -- where a rank stands ---------------------------------------------------------------------------------------------


def record(waits=(), main=1, **more):
    values = {
        "pid": 1,
        "rank": 0,
        "main_thread": main,
        "when": 0.0,
        "step": 1,
        "microbatch": -1,
        "phase": "forward",
        "left": "",
        "long": "",
    }
    return RankRecord(**{**values, "long_until": 0.0, "calls": (), "waits": tuple(waits), **more})


def stack(*frames, ident=1):
    return Thread(ident, tuple(Frame(file, line, name) for file, line, name in frames))


SCRIPT = ("/opt/ml/code/train.py", 12, "main")
LOADER = ("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 3, "__next__")
REDUCE = ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3, "all_reduce")
LINEAR = ("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 3, "forward")
OURS = (rank_record.__file__, 3, "enter")
PIPELINE = (
    os.path.join(os.path.dirname(os.path.dirname(rank_record.__file__)), "smp_runtime/pipeline/execution/task.py"),
    3,
    "run",
)
LOCK = (__import__("queue").__file__, 3, "get")


def standing(*threads, waits=(), state="S", **more):
    found = position_of(record(waits, **more), State(state), threads, 5.0, is_active=False)
    return found.standing, found.line.number, found.doing or found.call


@pytest.mark.parametrize(
    ("frames", "waits", "expected"),
    [
        ([SCRIPT], [], (Standing.SCRIPT, 12, "does not go on")),
        ([LINEAR, SCRIPT], [], (Standing.SCRIPT, 12, "does not go on")),
        ([LOCK, SCRIPT], [], (Standing.SCRIPT, 12, "waits for another thread or process of its own")),
        ([LOCK, LOADER, SCRIPT], [], (Standing.SCRIPT, 12, "gets nothing from its data loader")),
        ([REDUCE, SCRIPT], [], (Standing.WAITING, 12, "torch.distributed.all_reduce")),
        ([LOCK, OURS, SCRIPT], [waiting(3, 12)], (Standing.WAITING, 12, "all_reduce")),
        ([OURS, SCRIPT], [], (Standing.SCRIPT, 12, "is in this library's enter")),
        ([SCRIPT], [waiting(3, 12)], (Standing.SCRIPT, 12, "does not go on")),
        ([(REDUCE[0], 1, "<module>"), SCRIPT], [], (Standing.SCRIPT, 12, "does not go on")),
    ],
)
def test_the_innermost_frames_say_where_a_rank_stands(frames, waits, expected):
    assert standing(stack(*frames), waits=waits) == expected


def test_a_pipeline_s_thread_in_the_script_counts_though_the_main_thread_waits():
    main = stack(OURS, ("/opt/ml/code/train.py", 99, "main"))
    task = stack(("/opt/ml/code/model.py", 7, "forward"), PIPELINE, ident=2)
    idle = stack(LOCK, PIPELINE, ident=3)
    assert standing(main, idle, task, waits=[waiting(0, 99)])[:2] == (Standing.SCRIPT, 7)
    assert standing(main, idle, waits=[waiting(0, 99)])[:2] == (Standing.WAITING, 99)


def test_what_cannot_tell_its_stacks_is_judged_by_its_record():
    assert standing(waits=[waiting(3, 12)]) == (Standing.WAITING, 12, "all_reduce")
    assert standing()[0] is Standing.SCRIPT
    assert standing(state="T")[0] is Standing.STOPPED
    assert standing(left="ended")[0] is Standing.LEFT
    assert standing(state="")[0] is Standing.LEFT


def test_of_several_dumps_the_last_one_counts():
    first = 'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in f\n'
    second = 'Thread 0x02 (most recent call first):\n  File "b.py", line 2 in g\n\n' + first.replace("line 1", "line 3")
    assert parse(first + second) == (stack(("b.py", 2, "g"), ident=2), stack(("a.py", 3, "f"), ident=1))


def test_stacks_that_are_written_slowly_are_read_to_their_end(tmp_path):
    """A rank on a busy machine is interrupted between two lines; its main thread comes last."""
    path = tmp_path / f"7{rank_record.STACKS_SUFFIX}"
    path.write_text("")
    dump = (
        'Thread 0x02 (most recent call first):\n  File "b.py", line 2 in _bootstrap\n\n',
        ('Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in <module>\n'),
    )
    script = f"""
import signal, time
def write(*_):
    for part in {dump!r}:
        with open({str(path)!r}, "a") as file:
            file.write(part)
        time.sleep(0.2)
signal.signal({int(rank_record.STACKS_SIGNAL)}, write)
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = ask(tmp_path, {7: process.pid}, [7])
        process.kill()
    assert found == {7: (stack(("b.py", 2, "_bootstrap"), ident=2), stack(("a.py", 1, "<module>"), ident=1))}


# -- patience --------------------------------------------------------------------------------------------------------


def test_patience_grows_with_the_steps_and_not_with_the_first():
    patience = HangTimeout(most=500.0)
    assert (patience.seconds, patience.longer, patience.has_stepped) == (60.0, 500.0, False)
    patience.saw(1, 0.0)
    patience.saw(2, 300.0)
    assert (patience.seconds, patience.has_stepped) == (60.0, False)
    patience.saw(3, 310.0)
    patience.saw(5, 330.0)
    assert (patience.seconds, patience.has_stepped) == (100.0, True)
    for step in range(6, 30):
        patience.saw(step, 400.0 * step)
    assert patience.seconds == 500.0


def test_what_the_user_has_set_holds_as_it_is():
    assert hang_seconds({}) is None
    patience = HangTimeout.from_environment({HANG_VARIABLE: "7.5"})
    # But what only builds or compiles may take a minute, until the job is in its stride.
    assert (patience.seconds, patience.longer, patience.watches) == (7.5, 60.0, True)
    assert (in_stride(7.5).seconds, in_stride(7.5).longer) == (7.5, 7.5)
    assert not HangTimeout.from_environment({HANG_VARIABLE: "0"}).watches
    for text in ("-1", "nan", "inf", "soon"):
        with pytest.raises(ConfigError, match=r"SMP_HANG_SECONDS is .* counts the seconds"):
            hang_seconds({HANG_VARIABLE: text})


# -- the watch itself, over processes that sleep -----------------------------------------------------------------------


#: In a file of this library's, as a wait is.
WAITS = (
    "slot = n.open_wait('all_reduce', (0, 1)); import time; "
    "exec(compile('def wait(): time.sleep(1000)', w.__file__, 'exec')); wait()"
)


def in_stride(seconds, most=float("inf")):
    """Patience with a job that has done some steps."""
    patience = HangTimeout(seconds, most)
    for step in (1, 2, 3):
        patience.saw(step, float(step))
    return patience


def look_until(watch, seconds=15.0):
    deadline = time.monotonic() + seconds
    while (found := watch.look()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_the_watch_finds_a_stopped_process_and_writes_a_report(sleeper, tmp_path):
    sleeper(0, WAITS)
    stopped = sleeper(1)
    watch = HangWatch([LocalRanks(tmp_path)], in_stride(0.5))
    os.kill(stopped.pid, signal.SIGSTOP)
    hang = look_until(watch)
    assert hang.verdict.rank == 1
    assert "is stopped" in hang.verdict.text
    woken = LocalRanks(tmp_path, wakes=True).positions()[1]
    assert (woken.standing, bool(woken.threads)) == (Standing.STOPPED, True)
    assert state_of(stopped.pid).is_stopped
    cause = cause_of_hang(hang, lambda rank: f"algo-{rank}")
    assert cause.headline.startswith("rank 1 (algo-1): hang: is stopped")
    assert "rank 0: step 2, forward" in cause.detail
    assert write_report(tmp_path / "out", hang).read_text() == text_of(hang)
    assert write_report(tmp_path / "0", hang) is None  # a file stands there


def test_a_stopped_rank_s_main_thread_is_asked(sleeper, tmp_path, monkeypatch):
    """Of what is asked of the process, any of its threads could tell, while the main thread goes on from where it has stopped."""
    rank = sleeper(0)
    os.kill(rank.pid, signal.SIGSTOP)
    while not state_of(rank.pid).is_stopped:
        time.sleep(0.01)
    monkeypatch.setattr(stacks, "_PATIENCE", 0.1)
    assert ask(tmp_path, {0: rank.pid}, [0]) == {}
    told = dict(line.split(":\t") for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines())
    bit = 1 << (rank_record.STACKS_SIGNAL - 1)
    assert (int(told["SigPnd"], 16) & bit, int(told["ShdPnd"], 16) & bit) == (bit, 0)


def test_the_watch_waits_while_somebody_goes_on_whom_others_wait_for(sleeper, tmp_path):
    sleeper(0, WAITS)
    goes_on = sleeper(1, "import time\nwhile True: n.move(); time.sleep(0.02)")
    watch = HangWatch([LocalRanks(tmp_path)], in_stride(0.5))
    assert look_until(watch, 2.0) is None
    os.kill(goes_on.pid, signal.SIGSTOP)
    assert look_until(watch).verdict.rank == 1


def test_a_long_phase_that_was_declared_is_waited_for(sleeper, tmp_path):
    sleeper(0, WAITS)
    sleeper(1, "import time\nwith w.long_phase('evaluation', 3.0): time.sleep(1000)")
    watch, began = HangWatch([LocalRanks(tmp_path)], in_stride(0.3)), time.monotonic()
    assert look_until(watch).verdict.rank == 1
    assert time.monotonic() - began > 2.0


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="the system does not count who waits for a processor"
)
def test_of_many_that_share_a_processor_each_computes():
    """As on a machine with more ranks than cores: none of them has as much as it would take of an idle one."""
    code = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(flush=True)\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(6)]
    try:
        for process in spinning:
            process.stdout.readline()
        before, began = [state_of(process.pid) for process in spinning], time.monotonic()
        time.sleep(0.6)
        seconds = time.monotonic() - began
        assert all(is_active(a, state_of(p.pid), seconds) for a, p in zip(before, spinning, strict=True))
    finally:
        for process in spinning:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_rank_that_computes_is_waited_for_unless_patience_was_set(sleeper, tmp_path):
    """Its child does, as an upload would; a rank that nobody waits for may do so for ever."""
    computes = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    sleeper(1, computes)
    watch = HangWatch([LocalRanks(tmp_path)], in_stride(0.5))
    assert look_until(watch).verdict.is_certain is False
    alone = HangWatch([LocalRanks(tmp_path)], in_stride(None, most=0.5))
    assert look_until(alone, 3.0) is None
    sleeper(0, WAITS)
    assert look_until(alone).verdict.rank == 1


class ToldRanks:
    """Ranks that compute in their script, with the seconds since the last sign of life of each."""

    def __init__(self, quiet):
        self._quiet = quiet

    def glances(self):
        now = time.monotonic()
        return {rank: Glance(-1, now - seconds, 2, has_left=False) for rank, seconds in self._quiet.items()}

    def ask(self):
        pass

    def positions(self):
        return {rank: position(rank, Standing.SCRIPT, seconds=seconds) for rank, seconds in self._quiet.items()}


def test_a_rank_that_nobody_waits_for_may_take_its_time():
    assert HangWatch([ToldRanks({0: 0.0, 1: 2000.0})], in_stride(1000.0)).look() is None
    both = HangWatch([ToldRanks({0: 1500.0, 1: 2000.0})], in_stride(1000.0)).look()
    assert both.seconds == 2000.0


def test_a_rank_that_has_left_while_another_waits_for_it(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(watches, "_LEFT_SECONDS", 0.5)
    sleeper(0, WAITS)
    sleeper(1, "n.leave('ended'); import time; time.sleep(1000)")
    hang = look_until(HangWatch([LocalRanks(tmp_path)], in_stride(1000.0)))
    assert hang.verdict.rank == 1
    assert "ended its script after 2 steps" in hang.verdict.text


# -- ranks that have ended without a word -------------------------------------------------------------------------------


def test_a_rank_that_was_killed_is_told_with_its_last_line_and_one_that_crashed_with_its_stack(tmp_path, sleeper):
    script = tmp_path / "train.py"
    script.write_text(
        "def step():\n    n.call('the step a')\n    os.abort() if crashes else time.sleep(1000)\nstep()\n"
    )
    run = f"import os, time; exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))"
    killed, crashed = sleeper(0, f"crashes = False; {run}"), sleeper(1, f"crashes = True; {run}")
    crashed.wait()
    while not rank_record.read(tmp_path / "0").calls:
        time.sleep(0.01)
    killed.kill()
    seen = last_seen(tmp_path)
    assert seen[0] == "in forward of step 2, last seen at train.py:2 (n.call('the step a'))"
    assert seen[1] == "in forward of step 2, at train.py:3 (os.abort() if crashes else time.sleep(1000))"
    collector = FailureCollector(lambda rank: f"algo-{rank}", last_seen=seen, mpirun=False)
    said = collector.first_cause(-signal.SIGABRT, first_ended=1).headline
    assert said.startswith(f"rank 1 (algo-1): was killed by signal 6 (SIGABRT) {seen[1]}: native code gave up")
    assert last_seen(tmp_path / "absent") == {}


def test_waits_in_different_calls_are_a_deadlock_from_the_first_step_on():
    """Neither rank can come to the other's call, so that the time for first steps is not waited for."""
    save = position(
        0,
        line=29,
        wait=waiting(0, 29, (1,), "smp.save_checkpoint"),
        calls=[public(1, "step", 26), public(2, "save", 29)],
    )
    step = position(
        1, line=26, wait=waiting(0, 26, (0,), "the pipeline"), calls=[public(1, "step", 26), public(2, "step", 26)]
    )
    found = of(save, step)
    assert (found.rank, found.is_deadlock) == (1, True)
    same = [
        position(rank, wait=waiting(0, 26, (1 - rank,), "the pipeline"), calls=save.where.calls[: 2 - rank])
        for rank in (0, 1)
    ]
    assert not of(*same).is_deadlock
    watch = HangWatch([], HangTimeout(None, 1800.0))
    positions = {0: save, 1: step}
    assert watch._is_due(watches.Hang(found, 61.0, positions), time.monotonic())
    assert not watch._is_due(watches.Hang(of(*same), 61.0, dict(enumerate(same))), time.monotonic())
    assert cause_of_hang(watches.Hang(found, 61.0, positions), str).headline.endswith("[SMP501]")
