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


def _conductor(lock: Any, device: str, ended: threading.Event) -> TaskScheduler:
    def finished(task: Task) -> None:
        ended.set()

    conductor = TaskScheduler(lock, 0, POLICIES["interleaved"], torch.device(device))
    conductor.report_to(
        is_admitted=lambda task: True,
        diverged=lambda why: None,
        failed=lambda error, label: ended.set(),
        finished=finished,
        idle=lambda: None,
        leaves_weights=lambda task: None,
    )
    return conductor


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
        conductor = _conductor(lock, "cuda:0", ended)

        def work(task: Task) -> None:
            conductor.wait(task, ("value",), lambda event: made.is_set())
            done.append("second segment")

        with lock:
            conductor.reset(None, records=records)
            conductor.add(Task(TaskKind.FORWARD, 0, (), "module", work), (), lambda event: True)
            conductor.poke()
        while not conductor.waiting_tasks() or conductor.is_running:
            assert not ended.wait(0.01)
        made.set()
        with lock:
            conductor.arrived("value")
            conductor.poke()
        assert ended.wait(PATIENCE)
        conductor.close()
    settled = ["the GPU has done it"] if records else []
    assert done == [*settled, "second segment", *settled]
    assert [segment.action.part for segment in conductor.record] == ([0, 1] if records else [])


def test_a_wait_that_planned_steps_do_not_have_leaves_the_segment_whole():
    lock, ended, made = threading.RLock(), threading.Event(), threading.Event()
    conductor = _conductor(lock, "cpu", ended)

    def work(task: Task) -> None:
        conductor.give(task, ("asked",))
        conductor.wait(task, (("value",),), lambda event: made.is_set(), goes_on=True)
        conductor.give(task, ("made",))

    with lock:
        conductor.reset(None)
        conductor.add(Task(TaskKind.FORWARD, 0, (), "module", work), (("argument",),), lambda event: True)
        conductor.poke()
    while not conductor.waiting_tasks() or conductor.is_running:
        assert not ended.wait(0.01)
    made.set()
    with lock:
        conductor.arrived(("value",))
        conductor.poke()
    assert ended.wait(PATIENCE)
    conductor.close()
    (segment,) = conductor.record
    assert segment.action.part == 0
    assert segment.needs == (("argument",),)
    (_, asked), (_, gave) = segment.gives
    assert 0 <= asked <= gave <= segment.seconds
