"""Two ranks that do not make the same calls are found, with both lines, while they run."""

import json
from pathlib import Path

import pytest

from smp_estimator.rehearsal import RehearsalFailed, rehearse
from smp_estimator.rehearsal.rehearse import _failure_text
from smp_records.rehearsal import Failure
from smp_tools.rehearsal import calls
from smp_tools.rehearsal.calls import Agreement, CallLog, file_of_calls
from smp_tools.rehearsal.message_log import MessageLog

SCRIPT = Path(__file__).with_name("gpt_script.py")
PIPELINE = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}


def written(folder, rank, *made):
    """A rank's file: ``(what, line, step, ranks)`` of each call."""
    rows = [
        {"number": number, "what": what, "line": line, "step": step, "ranks": list(ranks)}
        for number, (what, line, step, ranks) in enumerate(made)
    ]
    file_of_calls(folder, rank).write_text("".join(json.dumps(row) + "\n" for row in rows))


BOTH = (0, 7)
STEP = ("the step train_step", "/train.py:30", 0, BOTH)


def test_the_first_call_that_differs_is_named_with_both_lines(tmp_path):
    written(tmp_path, 0, STEP, ("smp.barrier", "/train.py:12", 0, BOTH), ("optimizer.step", "/train.py:31", 0, BOTH))
    written(tmp_path, 7, STEP, ("optimizer.step", "/train.py:31", 0, BOTH))
    found = Agreement(tmp_path, 2).difference(is_over=False)
    said = "rank 0 calls smp.barrier (train.py:12) while rank 7 calls optimizer.step (train.py:31)"
    assert str(found).startswith(said)
    assert "outside of an `if` on the rank" in str(found)


def test_a_call_that_only_one_rank_makes_is_found_when_all_is_over(tmp_path):
    written(tmp_path, 0, STEP)
    written(tmp_path, 7, STEP, ("all_reduce of 4 bytes", "/train.py:40", 1, BOTH))
    agreement = Agreement(tmp_path, 2)
    assert agreement.difference(is_over=False) is None
    found = agreement.difference(is_over=True)
    assert "rank 7 calls all_reduce of 4 bytes (train.py:40) while rank 0 makes no such call" in str(found)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(("smp.barrier", "/train.py:12", 0, (0, 3)), id="in a group of others"),
        pytest.param(("smp.barrier", "/train.py:12", 2, BOTH), id="in a later step"),
        pytest.param(STEP[:1] + ("/other.py:1",) + STEP[2:], id="on another line"),
    ],
)
def test_what_is_no_difference(other, tmp_path):
    line_alone = other[0] == STEP[0]
    written(tmp_path, 0, *((other,) if line_alone else (STEP, other)))
    written(tmp_path, 7, STEP)
    assert Agreement(tmp_path, 2).difference(is_over=True) is None


def test_calls_are_read_as_they_are_written(tmp_path):
    written(tmp_path, 0, STEP)
    agreement = Agreement(tmp_path, 2)
    written(tmp_path, 7)
    assert agreement.difference(is_over=False) is None
    with file_of_calls(tmp_path, 7).open("a") as file:
        file.write('{"number": 0, "what": "smp.bar')
    assert agreement.difference(is_over=False) is None
    with file_of_calls(tmp_path, 7).open("a") as file:
        file.write('rier", "line": "/train.py:1", "step": -1, "ranks": [0, 7]}\n')
    assert "smp.barrier (train.py:1)" in str(agreement.difference(is_over=False))


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "script_line", lambda: ("/train.py", 5))
    return CallLog([0, 7], file_of_calls(tmp_path, 0))


def what(folder):
    rows = [json.loads(line) for line in file_of_calls(folder, 0).read_text().splitlines()]
    return [(row["number"], row["what"], row["ranks"]) for row in rows]


def test_what_belongs_to_a_public_call_is_written_once_for_each_group(log, tmp_path):
    log.public_call = lambda: "optimizer.step"
    for _ in range(2):
        log.another()
        for ranks in (range(8), range(8), range(4)):
            log.of_library(ranks)
        log.of_script("all_reduce", 4, range(8))  # by which the library does it
    assert what(tmp_path) == [(0, "optimizer.step", [0, 7]), (1, "optimizer.step", [0, 7])]


def test_what_a_script_asks_of_torch_is_written_each_time_with_its_size(log, tmp_path):
    log.of_script("all_reduce", 4, range(8))
    log.of_script("all_reduce", 4, range(8))
    log.of_script("send", 4, range(8))
    log.of_script("all_reduce", 4, [0, 1])  # no rank that is rehearsed hears of it
    assert what(tmp_path) == [(0, "all_reduce of 4 bytes", [0, 7]), (1, "all_reduce of 4 bytes", [0, 7])]


def test_what_was_said_is_heard_in_its_order_by_those_who_come_later(tmp_path):
    said = MessageLog()
    for number in range(2):
        said.note(0, "smp.allgather", 3, range(8), number)
    said.note(0, "smp.allgather", 3, range(8), lambda: None)  # cannot travel
    said.leave(0, tmp_path)
    later = MessageLog([0, 4], tmp_path)
    assert [later.next(0, "smp.allgather", 3, range(8)) for _ in range(3)] == [(True, 0), (True, 1), (False, None)]
    assert later.next(0, "smp.barrier", 3, range(8)) == (False, None)


def test_a_failure_of_a_last_rank_says_that_the_first_came_through():
    text = _failure_text(Failure(stage=1, rank=7, error="KeyError: 'a'", line="t.py:3", is_last=True), is_piped=True)
    assert text.startswith("the script fails on rank 7, the last of stage 1 at t.py:3: KeyError: 'a'")
    assert "--only-first-ranks" in text


#: What only some ranks do, the line that does it, and the call of the others.
WRONG = {
    "barrier": r"smp.barrier \(gpt_script.py:\d+\) while rank \d+ calls the step train_step",
    "sum": r"all_reduce of 4 bytes \(gpt_script.py:\d+\) while rank \d+ calls the step train_step",
    "save": r"smp.save_checkpoint \(gpt_script.py:\d+\) while rank \d+ calls the step train_step",
}


@pytest.mark.job
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "parameters"),
    [
        pytest.param("barrier", {"ddp": True}, id="barrier of replicas"),
        pytest.param("barrier", PIPELINE, id="barrier of a pipeline", marks=pytest.mark.full),
        pytest.param("sum", PIPELINE, id="sum", marks=pytest.mark.full),
        pytest.param("save", PIPELINE, id="save", marks=pytest.mark.full),
    ],
)
def test_a_call_that_depends_on_the_rank_is_found_before_any_launch(wrong, parameters):
    words = ["--layers", "2", "--hidden", "64", "--wrong", wrong]
    with pytest.raises(RehearsalFailed, match=WRONG[wrong]):
        rehearse(SCRIPT, words, instance_count=2, parameters=parameters)


@pytest.mark.full
@pytest.mark.job
@pytest.mark.timeout(120)
def test_what_one_rank_alone_may_do_is_no_difference():
    found = rehearse(SCRIPT, ["--layers", "2", "--hidden", "64"], instance_count=2, parameters=PIPELINE)
    assert [kind.stands_for for kind in found.rehearsal.kinds] == [8, 8]
