"""The baton by itself."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

from smp_runtime.pipeline.execution.task import Task
from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler
from smp_runtime.pipeline.schedule.actions import TaskKind
from smp_runtime.pipeline.schedule.policies import POLICIES

PATIENCE = 30.0


def _scheduler(lock: Any, device: str, ended: threading.Event) -> TaskScheduler:
    def finished(task: Task) -> None:
        ended.set()

    scheduler = TaskScheduler(lock, 0, POLICIES["interleaved"], torch.device(device))
    scheduler.report_to(
        is_admitted=lambda task: True,
        diverged=lambda why: None,
        failed=lambda error, label: ended.set(),
        finished=finished,
        idle=lambda: None,
        leaves_weights=lambda task: None,
        pauses=lambda task: None,
    )
    return scheduler


@pytest.mark.parametrize("records", [True, False])
def test_what_a_recorded_segment_lasts_counts_the_work_of_the_gpu(records):
    """A plan made from the time that launching takes would not fit."""
    lock, ended, made = threading.RLock(), threading.Event(), threading.Event()
    done: list[str] = []
    stream = mock.Mock()
    stream.synchronize.side_effect = lambda: done.append("the GPU has done it")
    with (
        mock.patch.object(torch.cuda, "set_device", return_value=None),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
    ):
        scheduler = _scheduler(lock, "cuda:0", ended)

        def work(task: Task) -> None:
            scheduler.wait(task, ("value",), lambda event: made.is_set())
            done.append("second segment")

        with lock:
            scheduler.reset(None, records=records)
            scheduler.add(Task(TaskKind.FORWARD, 0, (), "module", work), (), lambda event: True)
            scheduler.poke()
        while not scheduler.waiting_tasks() or scheduler.is_running:
            assert not ended.wait(0.01)
        made.set()
        with lock:
            scheduler.arrived("value")
            scheduler.poke()
        assert ended.wait(PATIENCE)
        scheduler.close()
    settled = ["the GPU has done it"] if records else []
    assert done == [*settled, "second segment", *settled]
    assert [segment.action.part for segment in scheduler.record] == ([0, 1] if records else [])


def test_a_wait_that_planned_steps_do_not_have_leaves_the_segment_whole():
    lock, ended, made = threading.RLock(), threading.Event(), threading.Event()
    scheduler = _scheduler(lock, "cpu", ended)

    def work(task: Task) -> None:
        scheduler.give(task, ("asked",))
        scheduler.wait(task, (("value",),), lambda event: made.is_set(), goes_on=True)
        scheduler.give(task, ("made",))

    with lock:
        scheduler.reset(None)
        scheduler.add(Task(TaskKind.FORWARD, 0, (), "module", work), (("argument",),), lambda event: True)
        scheduler.poke()
    while not scheduler.waiting_tasks() or scheduler.is_running:
        assert not ended.wait(0.01)
    made.set()
    with lock:
        scheduler.arrived(("value",))
        scheduler.poke()
    assert ended.wait(PATIENCE)
    scheduler.close()
    (segment,) = scheduler.record
    assert segment.action.part == 0
    assert segment.needs == (("argument",),)
    (_, asked), (_, gave) = segment.gives
    assert 0 <= asked <= gave <= segment.seconds
