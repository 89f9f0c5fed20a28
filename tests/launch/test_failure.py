"""The first cause of a failure, out of what ranks, also of one another, and both versions of mpirun say."""

from __future__ import annotations

import sys
import time
import traceback
import uuid

import pytest

from smp_launch.failures import fatal_errors
from smp_launch.failures.failure import Cause, FailureCollector, write_failure
from smp_launch.machine.output import OutputLine
from smp_records.records import FAILURE_CHARACTERS, FailureRecord, format_failure

RULE = "-" * 74

KILLED_5 = f"""{RULE}
prterun noticed that process rank 1 with PID 4804 on node vm exited on
signal 9 (Killed).
{RULE}"""

KILLED_4 = f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
{RULE}"""

CODE_5 = f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-4810@1,1]
   Exit code:    3
{RULE}"""

CODE_4 = f"""{RULE}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[32759,1],1]
  Exit code:    3
{RULE}"""

REFUSED = f"""{RULE}
An unrecognized option was included on the mpirun command line:

  Option: --bind-to-none
{RULE}"""


def hear(*texts, records=()):
    """A collector that heard mpirun's ``texts``, then ``records``; and what it showed."""
    collector = FailureCollector(lambda rank: f"algo-{rank + 1}")
    shown = [line for text in texts for word in text.split("\n") for line in collector.take(OutputLine(word))]
    for record in records:
        shown += collector.take(OutputLine(format_failure(record), record.rank))
    return collector, shown + collector.finish()


def record(rank, when, error="ValueError", message="boom"):
    return FailureRecord(
        rank=rank, host=f"algo-{rank + 1}", error_type=error, message=message, traceback=f"trace {rank}", when=when
    )


@pytest.mark.parametrize("text", [KILLED_5, KILLED_4])
def test_killed_by_a_signal(text):
    collector, shown = hear(text)
    cause = collector.first_cause(137)
    assert cause.headline.startswith(
        "rank 1 (algo-2): was killed by signal 9 (SIGKILL): often the machine ran out of memory"
    )
    assert shown == []


@pytest.mark.parametrize("text", [CODE_5, CODE_4])
def test_ended_with_a_code(text):
    collector, shown = hear(text)
    assert collector.first_cause(3).headline.startswith("rank 1 (algo-2): ended with exit code 3")
    assert shown == []
    assert collector.failing


def test_the_earliest_record_is_the_cause():
    collector, shown = hear(CODE_5, records=[record(0, 20.0, message="later"), record(1, 10.0)])
    assert collector.first_cause(1) == Cause("rank 1 (algo-2): ValueError: boom", "trace 1", "ValueError", 1)
    assert shown == []


def test_a_kill_comes_before_the_errors_that_it_causes():
    collector, _ = hear(KILLED_5, records=[record(0, 1.0, "ConnectionError", "peer is gone")])
    cause = collector.first_cause(137)
    assert cause.headline.startswith("rank 1 (algo-2): was killed by signal 9")
    assert "then rank 0 (algo-1): ConnectionError: peer is gone" in cause.detail


@pytest.mark.parametrize("number", [6, 15])
def test_an_abort_or_termination_after_another_rank_s_error_is_its_consequence(number):
    collector, _ = hear(KILLED_5.replace("signal 9", f"signal {number}"), records=[record(0, 1.0)])
    assert collector.first_cause(128 + number).headline == "rank 0 (algo-1): ValueError: boom"


def test_mpirun_s_own_refusal_is_shown_and_told():
    collector, shown = hear(REFUSED)
    assert shown == REFUSED.split("\n")
    headline = collector.first_cause(66).headline
    assert headline.startswith("mpirun ended with code 66: An unrecognized option")
    assert "--bind-to-none" in headline


def test_when_mpirun_says_nothing_the_first_rank_that_ended_is_told():
    collector, _ = hear()
    assert collector.first_cause(5, first_ended=2).headline.startswith("rank 2 (algo-3): ended with exit code 5")
    assert "killed by signal 11 (SIGSEGV)" in collector.first_cause(139, first_ended=2).headline
    assert collector.first_cause(5).headline == "mpirun ended with code 5; its messages are in the log"


def test_a_stop_is_told_as_a_stop():
    collector, _ = hear(KILLED_5.replace("signal 9 (Killed)", "signal 15 (Terminated)"))
    headline = collector.first_cause(143, stopped_by="SIGTERM").headline
    assert "the job was stopped by SIGTERM" in headline
    assert "handler for SIGTERM" in headline


def test_the_ranks_own_rules_and_lines_pass():
    collector = FailureCollector(str)
    assert collector.take(OutputLine(RULE, 0)) == [RULE]
    assert collector.take(OutputLine("text", 0)) == ["text"]
    assert collector.take(OutputLine("mpirun: Forwarding signal 12 to job")) == []


def test_an_open_block_is_shown_in_the_end():
    _, shown = hear(f"{RULE}\nhalf a message")
    assert shown == [RULE, "half a message"]


def test_reports_replace_cut_lines(tmp_path):
    whole = record(1, 10.0).model_copy(update={"traceback": "t" * 9000})
    collector, _ = hear(records=[whole])
    assert len(collector.records[0].traceback) < 4000
    (tmp_path / "1.json").write_text(whole.model_dump_json())
    (tmp_path / "2.json").write_text("{")
    collector.read_reports(tmp_path)
    assert collector.records == [whole]


def test_the_headline_is_one_line_and_leaves_room():
    collector, _ = hear(records=[record(0, 1.0, message="one\ntwo " + "x" * 2000)])
    headline = collector.first_cause(1).headline
    assert headline.startswith("rank 0 (algo-1): ValueError: one two xxx")
    assert "\n" not in headline
    assert len(headline) < FAILURE_CHARACTERS


def test_the_file_is_written_whole_and_once(tmp_path):
    path = tmp_path / "output" / "failure"
    assert write_failure(path, Cause("first", "detail"))
    assert not write_failure(path, Cause("second"))
    assert path.read_text() == "first\n\ndetail\n"
    assert [p.name for p in path.parent.iterdir()] == ["failure"]


def test_without_mpirun_every_line_is_the_script_s_own():
    lines = ["epoch 1", RULE, "epoch 2", "MPI_ABORT was invoked", RULE, "mpirun: Forwarding signal 12 to job"]
    collector = FailureCollector(str, mpirun=False)
    for text in lines:
        assert collector.take(OutputLine(text)) == [text]
    assert not collector.failing


def test_a_rule_without_its_pair_withholds_nothing_for_long():
    collector = FailureCollector(str)
    assert collector.release_at == float("inf")
    assert collector.take(OutputLine(RULE)) == collector.take(OutputLine("word")) == []
    assert time.monotonic() < collector.release_at < time.monotonic() + 2
    assert collector.release() == [RULE, "word"]
    assert collector.release_at == float("inf")
    assert collector.take(OutputLine("more")) == ["more"]
    assert "word" in collector.first_cause(1).headline


def test_a_rule_without_its_pair_withholds_few_lines():
    collector = FailureCollector(str)
    shown = [text for word in [RULE, *map(str, range(500))] for text in collector.take(OutputLine(word))]
    assert shown == [RULE, *map(str, range(500))]


def test_a_rule_without_its_pair_does_not_hide_the_next_message():
    collector, shown = hear(f"{RULE}\n{KILLED_5}\nepoch 2")
    assert shown == [RULE, "epoch 2"]
    assert collector.first_cause(137).headline.startswith("rank 1 (algo-2): was killed by signal 9")


def _raised(value):
    """An error with a traceback, as a script's."""
    try:
        raise KeyError(value)
    except KeyError as error:
        return error


def test_a_tensor_that_is_taken_for_a_step_output_is_explained():
    class Tensor:
        pass

    for name, words in (("reduce_mean", "has reduce_mean()"), ("reduse_mean", "no attribute 'reduse_mean'")):
        with pytest.raises(AttributeError) as raised:
            getattr(Tensor(), name)
        fatal_errors.explain(raised.value)
        assert str(raised.value).startswith(f"'Tensor' object has no attribute {name!r}")
        assert str(raised.value).endswith(words)


@pytest.mark.parametrize(
    ("channels", "has"), [("[]", "it has none"), ('["test","valid"]', "its channels are test, valid")]
)
def test_a_channel_that_the_job_lacks_is_named(monkeypatch, channels, has):
    monkeypatch.setenv("SM_CHANNELS", channels)
    error = _raised("SM_CHANNEL_TRAIN")
    fatal_errors.explain(error)
    assert f"the job has no channel 'train' ({has}); give it one: fit(" in str(error)
    for other in ("SM_CHANNELS", 3):
        error = _raised(other)
        fatal_errors.explain(error)
        assert error.args == (other,)


def test_equal_errors_of_several_ranks_are_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    value = uuid.uuid4().hex  # errors that were told are known as long as the process lives
    for rank in range(3):
        fatal_errors.show(_raised(value), rank)
    fatal_errors.show(_raised("another"), 3)
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last)") == 2
    assert said.count(f"KeyError: '{value}'") == 1
    assert [line for line in said.splitlines() if "the same" in line] == [
        "rank 1: the same KeyError",
        "rank 2: the same KeyError",
    ]
    assert "KeyError: 'another'" in said


def test_an_error_that_stands_for_another_rank_s_is_not_printed_again(capsys, monkeypatch):
    """What a hook of PyTorch or of the script says besides is printed all the same."""

    def hook(kind, error, trace):
        for line in traceback.format_exception(kind, error, trace):
            print("".join(f"[rank1]: {part}" for part in line.splitlines(keepends=True)), end="", file=sys.stderr)
        print("and more", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    origin = _raised(uuid.uuid4().hex)
    record = FailureRecord.of(0, "algo-1", origin, "".join(traceback.format_exception(origin)))
    fatal_errors.show(origin, 0)
    capsys.readouterr()
    try:
        raise RuntimeError(f"on rank 0: {record.traceback}") from origin
    except RuntimeError as error:
        error.failure = record
        fatal_errors.show(error, 1)
    assert capsys.readouterr().err.splitlines() == ["rank 1: the same KeyError of rank 0", "and more"]


# -- who is to blame for a connection ----------------------------------------------------------------------------------


def told(rank, accused=(), when=1.0, kind="ConnectionLostError"):
    return FailureRecord(rank=rank, error_type=kind, message=f"told by {rank}", when=when, accused=accused)


def headline(*records):
    return FailureCollector(lambda rank: f"algo-{rank}", records=list(records)).first_cause(1).headline


def test_what_a_rank_tells_of_itself_counts_more_than_what_others_blame_it_for():
    assert headline(told(0, (2,), 1.0), told(2, (), 1.5, "ValueError")) == "rank 2: ValueError: told by 2"


def test_most_ranks_are_right_about_whose_connection_is_lost():
    records = [told(2, (0, 1, 3), 1.0), told(0, (2,), 1.1), told(3, (2,), 1.2)]
    assert headline(*records) == "rank 2: ConnectionLostError: told by 2"
    assert headline(*records[1:]) == "rank 2 (algo-2): ConnectionLostError: as rank 0 tells: told by 0"
    # One that has lost all others is more likely to be cut off itself.
    assert headline(told(1, (3,), 1.0), told(3, (0, 1, 2), 1.1)) == "rank 3: ConnectionLostError: told by 3"
    # Each of two blames the other: the first word.
    assert headline(told(1, (0,), 1.0), told(0, (1,), 1.1)) == "rank 1: ConnectionLostError: told by 1"
