"""What a rank notes of itself, and how it is read from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from smp_config.formats.rank_lists import ranks_of, ranks_text
from smp_launch.watch import stacks
from smp_launch.watch.position import RankPosition, Standing
from smp_launch.watch.report import describe
from smp_launch.watch.verdict import find
from smp_records import rank_record
from smp_records.rank_record import COLLECTIVE, PUBLIC, Notes, ScriptLine, read
from smp_records.script_lines import is_ours, is_script_s, is_standard, script_line


@pytest.fixture
def notes(tmp_path):
    return Notes(tmp_path / "3", 3)


def test_a_record_has_what_the_rank_has_done(notes, tmp_path):
    notes.begin_step()
    notes.call("the step train_step")
    notes.enter("backward", 1)
    members, dtype = notes.ranks((0, 1, 2, 3)), notes.text("float32")
    position = notes.collective(notes.text("all_reduce"), members, 7, 1024, dtype)
    notes.begin_wait(position)
    slot = notes.open_wait("smp.barrier", (2,))
    found = read(tmp_path / "3")
    assert (found.rank, found.pid, found.main_thread) == (3, os.getpid(), threading.main_thread().ident)
    assert (found.step, found.phase, found.microbatch, found.left) == (1, "backward", 1, "")
    public, collective = found.calls
    assert (public.kind, public.name, public.number) == (PUBLIC, "the step train_step", 1)
    assert (collective.kind, collective.content, collective.number) == (COLLECTIVE, "all_reduce of 1024 float32", 7)
    assert collective.members == (0, 1, 2, 3)
    wait, other = found.waits
    assert (wait.what, wait.whom, wait.number) == ("all_reduce", (0, 1, 2, 3), 7)
    assert (other.what, other.whom, other.number) == ("smp.barrier", (2,), 0)
    assert {public.line.file, other.line.file} == {__file__}
    assert other.line.number == public.line.number + 5
    assert 0 <= time.monotonic() - found.when < 60
    notes.end_wait(position)
    notes.close_wait(slot)
    notes.leave("ended")
    after = read(tmp_path / "3")
    assert (after.waits, after.left) == ((), "ended")
    assert after.when > found.when


def test_only_the_last_calls_are_kept_and_no_text_is_too_long(notes, tmp_path):
    for number in range(1000):
        late = notes.collective(notes.text("x" * 500 + str(number)), notes.ranks((number,)), number, 1, 0)
        notes.begin_wait(late - 200)  # its place is another call's now
    calls = read(tmp_path / "3").calls
    assert [call.number for call in calls] == list(range(1000 - len(calls), 1000))
    assert len(calls) > 50
    assert all(len(call.name) < 300 for call in calls)
    assert read(tmp_path / "3").waits == ()


def test_phases_return_and_are_told(notes, tmp_path):
    told = []
    notes.on_phase = lambda phase, step: told.append((phase, step))
    notes.begin_step()
    with notes.within("optimizer"):
        assert read(tmp_path / "3").phase == "optimizer"
    assert read(tmp_path / "3").phase == "forward"
    assert told == [("forward", 1), ("optimizer", 1)]
    with notes.long_phase("evaluation", 100.0):
        found = read(tmp_path / "3")
        assert found.long == "evaluation"
        assert 0 < found.long_until - time.monotonic() <= 100
    assert read(tmp_path / "3").long_until == 0


def test_steps_without_step_functions_are_counted_by_updates(notes):
    notes.update()
    notes.update()
    assert notes.step == 2
    notes.begin_step()
    notes.update()
    assert notes.step == 3


def test_threads_do_not_mix_their_notes(notes, tmp_path):
    def work(mine):
        for number in range(1, 400):
            slot = notes.open_wait("wait", (mine,))
            position = notes.collective(notes.text(f"call {mine}"), notes.ranks((mine,)), number, mine, 0)
            notes.begin_wait(position)
            notes.end_wait(position)
            notes.close_wait(slot)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(tmp_path / "3")
    assert found.waits == ()
    assert all((call.name, call.members) == (f"call {call.size}", (call.size,)) for call in found.calls)
    assert len({call.position for call in found.calls}) == len(found.calls)


@pytest.mark.parametrize(
    "ranks",
    [(), (5,), (0, 1), (0, 1, 2, 3), (0, 2, 4, 6), (0, 1, 2, 8, 10, 12, 31), (7, 3, 1), tuple(range(0, 4096, 8))],
)
def test_ranks_in_few_letters(ranks):
    assert ranks_of(ranks_text(ranks)) == ranks
    assert len(ranks_text(range(4096))) < 10


def test_what_is_no_record_is_not_read(tmp_path):
    assert read(tmp_path / "0") is None
    for content in (b"", b"smp-at-2", b"\0" * rank_record._BYTES):
        (tmp_path / "0").write_bytes(content)
        assert read(tmp_path / "0") is None
    assert rank_record.read_all(tmp_path) == {}
    assert rank_record.read_all(tmp_path / "absent") == {}


def test_lines_of_the_script():
    assert script_line()[0] == __file__
    assert is_standard(threading.__file__)
    assert is_standard("<string>")
    assert is_ours(rank_record.__file__)
    assert not is_script_s(pytest.__file__)
    assert is_script_s("/opt/ml/code/train.py")


def test_a_rank_tells_its_stacks_whatever_it_does(tmp_path):
    """Its interpreter is busy in C code, which lets no other Python code run; its main thread is told as such."""
    code = textwrap.dedent("""
        import os, re
        from smp_records import rank_record
        rank_record.begin(os.environ, 5)
        def stuck():
            re.match(r"(a|a|b?)*c", "a" * 64)
        stuck()
    """)
    (tmp_path / "script.py").write_text(code)
    environ = {**os.environ, rank_record.FOLDER_VARIABLE: str(tmp_path)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environ)
    try:
        deadline = time.monotonic() + 30
        while (found := read(tmp_path / "5")) is None or not _is_stuck(
            threads := stacks.ask(tmp_path, {5: process.pid}, [5])
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (main,) = (thread for thread in threads[5] if thread.ident == found.main_thread)
        assert [frame.function for frame in main.frames][-2:] == ["stuck", "<module>"]
    finally:
        process.kill()
        process.wait()


def _is_stuck(threads):
    return any(frame.function == "stuck" for thread in threads.get(5, ()) for frame in thread.frames)


def test_without_a_watch_nothing_is_kept_and_a_folder_that_is_gone_is_no_failure(tmp_path):
    silent = Notes()
    silent.begin_step()
    silent.call("x")
    silent.close_wait(silent.open_wait("x", (0,)))
    with silent.within("save"), silent.waiting("x", (1,)):
        pass
    assert not silent.are_kept
    assert not rank_record.begin({}, 0).are_kept
    assert not rank_record.begin({rank_record.FOLDER_VARIABLE: str(tmp_path / "absent")}, 0).are_kept


@pytest.mark.skipif(rank_record.STACKS_SIGNAL is None, reason="no real-time signals here")
def test_the_signal_for_stacks_does_not_end_a_rank_whose_interpreter_is_ending(tmp_path):
    script = """
        import faulthandler, os
        from smp_records import rank_record

        rank_record.begin({rank_record.FOLDER_VARIABLE: os.environ["FOLDER"]}, 0)
        os.kill(os.getpid(), rank_record.STACKS_SIGNAL)
        faulthandler.unregister(rank_record.STACKS_SIGNAL)  # as the interpreter does when it ends
        os.kill(os.getpid(), rank_record.STACKS_SIGNAL)
        print("lives")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "FOLDER": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
    assert "Current thread" in (tmp_path / f"0{rank_record.STACKS_SUFFIX}").read_text()


def test_a_rank_without_a_line_of_the_script_is_at_no_place(notes, tmp_path):
    record = read(tmp_path / "3")
    outside, placed = (
        RankPosition(record, Standing.SCRIPT, 61.0, line) for line in (ScriptLine("", 0), ScriptLine("train.py", 7))
    )
    assert describe(outside).endswith(", outside the script's own lines")
    assert find({3: outside}, 61.0).text.startswith("has been outside the script's own lines for 61 s")
    assert describe(placed).endswith(", at train.py:7")
    assert find({3: placed}, 61.0).text.startswith("has been at train.py:7 for 61 s")
