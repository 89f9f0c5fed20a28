"""The microbatches of a step on the root stage: which may begin, which have begun their backward pass, which are done."""

from __future__ import annotations

from typing import Any

from smp_runtime.pipeline.execution.task import Task


class Microbatches:
    """Guarded by the pipeline's lock.

    Args:
        active: most microbatches in flight.
        waits_for_forwards: no microbatch begins its backward pass before all of its wave (of ``active`` microbatches)
            have ended their forward passes, and no wave begins before the one before it is finished.

    Attributes:
        active: most microbatches in flight in this step.
        tasks: the step function's task for each microbatch.
        results: what it returned.
        finished: those that are done everywhere.
    """

    def __init__(self, active: int, waits_for_forwards: bool) -> None:
        self.active = active
        self._waits_for_forwards = waits_for_forwards
        self.clear()

    def clear(self) -> None:
        """The step is over."""
        self.tasks: dict[int, Task] = {}
        self.results: dict[int, Any] = {}
        self.finished: set[int] = set()
        self._through: set[int] = set()  # with the forward pass

    @property
    def are_finished(self) -> bool:
        """Whether all are done."""
        return len(self.finished) == len(self.tasks)

    def is_admitted(self, task: Task) -> bool:
        """Whether one more microbatch may begin."""
        begun = [number for number, other in self.tasks.items() if other.has_thread]
        wave = self._wave(task.microbatch)
        if self._waits_for_forwards and any(self._wave(n) != wave and n not in self.finished for n in begun):
            return False
        return sum(number not in self.finished for number in begun) < self.active

    def reached_backward(self, microbatch: int) -> tuple[str, int] | None:
        """A microbatch has ended its forward pass; returns the gate that it must wait at, if any."""
        self._through.add(microbatch)
        return ("gate", self._wave(microbatch)) if self._waits_for_forwards else None

    def open_gates(self) -> list[tuple[str, int]]:
        """The waves whose microbatches have all ended their forward passes."""
        behind = {self._wave(number) for number in self.tasks if number not in self._through}
        return [("gate", wave) for wave in {self._wave(number) for number in self.tasks} - behind]

    def _wave(self, microbatch: int) -> int:
        return microbatch // self.active
