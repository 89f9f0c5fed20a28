"""What a rank's timeline is told of its tasks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from smp_runtime.pipeline.observe.recorder import Recorder, recorder_of_job
from smp_runtime.pipeline.schedule.actions import TaskKind

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.pipeline.execution.task import Task


class TaskTimeline:
    """Turns the segments of a rank's tasks into the blocks of its timeline.

    A segment of a task that another stage asked for is a block of its kind. One of the step function may belong to
    several: it is forward until the script begins the backward pass, backward during it, the function's own afterwards.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Of the step function's tasks, by microbatch: what they compute now, and where their running segments were cut.
        self._kinds: dict[int, TaskKind] = {}
        self._cuts: dict[int, float] = {}

    def begin_step(self, number: int) -> None:
        """A step begins."""
        self._kinds.clear()
        self._cuts.clear()
        self._recorder.begin_step(number)

    def end_step(self, failed: bool = False) -> None:
        """The step has ended, or failed."""
        self._recorder.end_step(failed)

    def close(self) -> None:
        """The session ends."""
        self._recorder.close()

    def segment_ended(self, task: Task, start: float, stop: float) -> None:
        """A task has computed from ``start`` to ``stop``, in seconds of ``time.perf_counter()``."""
        if task.kind is not TaskKind.STEP:
            self._add(task.kind, task.microbatch, task.label, start, stop)
            return
        kind = self._kinds.get(task.microbatch, TaskKind.FORWARD)
        self._add(kind, task.microbatch, "", self._cuts.pop(task.microbatch, start), stop)

    def turn(self, task: Task, kind: TaskKind, at_start: bool = False) -> None:
        """The rest of the step function's running segment is of another kind; called by the task that runs.

        Args:
            at_start: the segment has only just begun, so that no part of it is of the kind before.
        """
        if task.kind is not TaskKind.STEP:
            return
        number = task.microbatch
        before = self._kinds.get(number, TaskKind.FORWARD)
        self._kinds[number] = kind
        if not at_start and before is not kind:
            now = time.perf_counter()
            self._add(before, number, "", self._cuts.get(number, task.began), now)
            self._cuts[number] = now

    def _add(self, kind: TaskKind, microbatch: int, path: str, start: float, stop: float) -> None:
        label = path or ("step function" if kind is TaskKind.STEP else "(model)")
        self._recorder.add(f"{kind}{microbatch} {label}", kind.value, microbatch, path, start, stop)


def timeline_of_job(stage: int, control: ControlPlane, *, replica: int) -> TaskTimeline | None:
    """The timeline that the environment asks for, if it does; every rank of the job calls it, see :func:`recorder_of_job`."""
    recorder = recorder_of_job(stage, control, replica=replica)
    return None if recorder is None else TaskTimeline(recorder)
