"""What a rank's time is counted as, and what is made of two readings."""

from __future__ import annotations

import time

import pytest

from smp_records import rank_record, time_breakdown
from smp_records.records import PaceRecord, format_pace, parse_pace
from smp_records.time_breakdown import TimeBreakdown, record_between


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def counted() -> tuple[TimeBreakdown, Clock]:
    clock = Clock()
    return TimeBreakdown(clock), clock


def test_each_second_counts_once_and_waits_are_taken_out(counted: tuple[TimeBreakdown, Clock]) -> None:
    rank, clock = counted
    before = rank.read()
    for _ in range(2):
        clock.now += 0.5  # data
        rank.begin_step()
        clock.now += 2.0
        rank.add_collective(0.25)
        rank.enter(time_breakdown.REDUCTION)
        clock.now += 1.0
        rank.add_collective(0.75)
        rank.enter(time_breakdown.UPDATE)
        rank.updated()
        clock.now += 0.5
        rank.enter(time_breakdown.SAVE)
        clock.now += 3.0
        rank.add_wait(1.0)
        rank.enter(time_breakdown.BETWEEN)
    found = record_between(before, rank.read(), 7)
    assert (found.rank, found.step, found.steps, found.seconds) == (7, 2, 2, 14.0)
    assert (found.compute, found.collectives, found.waiting, found.saving) == (5.0, 2.0, 2.0, 4.0)
    assert found.data == 0.5  # the first half second was before the first step, which is no data of a step
    assert rank.read().updates == 2


def test_in_a_pipeline_tasks_compute_and_the_rest_of_the_step_is_idle(counted: tuple[TimeBreakdown, Clock]) -> None:
    rank, clock = counted
    before = rank.read()
    rank.begin_step()
    clock.now += 4.0
    rank.add_task(1.0)
    rank.add_task(0.5)
    rank.add_collective(0.25)  # of tensor parallelism, in a task
    rank.add_wait(4.0)  # the main thread's, for the whole step
    rank.enter(time_breakdown.BETWEEN)
    found = record_between(before, rank.read(), 0)
    assert (found.compute, found.collectives, found.waiting, found.data) == (1.25, 0.25, 2.5, 0.0)


@pytest.mark.parametrize("task", [0.0, 0.5])
def test_parts_of_a_rank_that_is_read_while_it_waits_are_no_more_than_the_time(
    counted: tuple[TimeBreakdown, Clock], task: float
) -> None:
    rank, clock = counted
    for kind in (time_breakdown.STEP, time_breakdown.REDUCTION):
        rank.enter(kind)
        clock.now += 3.0
        before = rank.read()  # in the middle of waits that end behind it
        clock.now += 1.0
        rank.add_collective(2.5)
        rank.add_wait(1.5)
        rank.add_task(task)
        rank.enter(time_breakdown.BETWEEN)
        clock.now += 1.0
        found = record_between(before, rank.read(), 0)
        parts = found.compute + found.collectives + found.waiting + found.data + found.saving
        assert (parts, found.collectives) == (found.seconds, 1.0)


def test_others_read_it_while_it_counts(tmp_path) -> None:
    notes = rank_record.Notes(tmp_path / "3", 3)
    notes.begin_step()
    position = notes.collective(notes.text("all_reduce"), notes.ranks((0, 3)), 1, 8, 0)
    notes.begin_wait(position)
    time.sleep(0.01)
    notes.end_wait(position)
    notes.enter(rank_record.BETWEEN)
    with notes.within(rank_record.OPTIMIZER):
        notes.update()
        time.sleep(0.01)
    notes.pace.tell(stage=2, device_bytes=5 << 30)
    notes.enter(rank_record.SAVE)
    seen = rank_record.read_glance(tmp_path / "3")
    assert seen is not None
    assert seen.pace is not None
    own = notes.pace.read()
    assert (seen.pace.steps, seen.pace.stage, seen.pace.device_bytes, seen.pace.updates) == (1, 2, 5 << 30, 1)
    assert seen.pace.collectives == own.collectives
    assert own.collectives[time_breakdown.STEP] >= 0.01
    assert own.seconds[time_breakdown.UPDATE] >= 0.01
    later = rank_record.read_glance(tmp_path / "3")
    assert later is not None
    assert later.pace is not None
    assert (
        later.pace.seconds[time_breakdown.SAVE] > seen.pace.seconds[time_breakdown.SAVE]
    )  # it goes on, and nobody has written


def test_a_script_without_steps_counts_updates_and_loads_data_behind_them(tmp_path) -> None:
    notes = rank_record.Notes(tmp_path / "0", 0)
    for _ in range(3):
        notes.enter(rank_record.FORWARD)
        notes.enter(rank_record.BACKWARD)
        with notes.within(rank_record.OPTIMIZER):
            notes.update()
        time.sleep(0.005)
    found = notes.pace.read()
    assert (found.steps, found.updates) == (3, 3)
    assert found.seconds[time_breakdown.BETWEEN] >= 0.015


def test_a_line_of_the_log_has_all_of_it() -> None:
    record = PaceRecord(
        rank=3,
        stage=1,
        host="algo-2",
        step=9,
        steps=2,
        seconds=1,
        compute=0.5,
        collectives=0.1,
        waiting=0.2,
        data=0,
        saving=0,
    )
    assert parse_pace("[algo-2] " + format_pace(record)) == record
    for text in ("smp-pace {}", "smp-pace {", format_pace(record).replace("0.5", "-0.5"), format_pace(record)[9:]):
        assert parse_pace(text) is None
