"""Errors that end a step on all stages: what the stage where they happened tells, and what the others raise."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Sequence

import torch

from smp_runtime.errors import SMPRuntimeError
from smp_runtime.pipeline.protocol import Fail
from smp_runtime.pipeline.tasks import Conductor

#: Place of an error in the script's own code.
STEP_FUNCTION = "the step function"


class StageError(SMPRuntimeError):
    """An error on another stage of the pipeline, with its rank, module and traceback."""


def message_of(error: BaseException, place: str, stage: int, rank: int) -> Fail:
    """What the other stages are told."""
    where = place if place == STEP_FUNCTION else f"module {place!r}"
    text = "".join(traceback.format_exception(error))
    return Fail(stage, rank, where, f"{type(error).__name__}: {error}", text)


def error_of(fail: Fail, cause: BaseException | None = None) -> StageError:
    """What a stage raises for an error in a module, its own or another stage's."""
    error = StageError(
        f"pipeline stage {fail.stage} (rank {fail.rank}), {fail.place}: {fail.error}\n\nTraceback of rank {fail.rank}:\n"
        f"{fail.traceback}"
    )
    error.__cause__ = cause
    return error


class Alarm:
    """The first error of a step: keeps it, stops this rank's tasks, and tells the other stages.

    Args:
        stage: this rank's.
        ranks: global ranks of all stages.
        conductor: whose tasks are stopped.
        changed: wakes the script's own thread; its lock guards everything here.
        is_open: whether a step runs; errors between steps have nobody to tell.
        send: a message to a stage.

    Attributes:
        error: what the step is to raise on this rank, or None.
        lost: why a stage cannot be reached any more, or None.
    """

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        conductor: Conductor,
        changed: threading.Condition,
        is_open: Callable[[], bool],
        send: Callable[[int, object, Sequence[torch.Tensor]], None],
    ) -> None:
        self._stage = stage
        self._ranks = ranks
        self._conductor = conductor
        self._changed = changed
        self._is_open = is_open
        self._send = send
        self.error: BaseException | None = None
        self.lost: BaseException | None = None

    def raised(self, error: BaseException, place: str) -> None:
        """Something on this rank raised, in a module or in :data:`STEP_FUNCTION`."""
        with self._changed:
            if self.error is not None or not self._is_open():
                return
            fail = message_of(error, place, self._stage, self._ranks[self._stage])
            # The script's own errors stay what they are on the rank that runs the script.
            self._set(error if place == STEP_FUNCTION else error_of(fail, error))
            for stage in range(len(self._ranks)):
                if stage != self._stage:
                    with contextlib.suppress(SMPRuntimeError):  # one that is gone need not be told
                        self._send(stage, fail, ())

    def heard(self, fail: Fail) -> None:
        """Another stage has told of an error."""
        with self._changed:
            if self.error is None and self._is_open():
                self._set(error_of(fail))

    def lost_stage(self, stage: int, error: BaseException) -> None:
        """The connection to a stage broke; no further step can run."""
        with self._changed:
            self.lost = error
            if self.error is None and self._is_open():
                seen = StageError(f"pipeline stage {self._stage} (rank {self._ranks[self._stage]}): {error}")
                seen.__cause__ = error
                self._set(seen)

    def reset(self) -> None:
        """A step begins.

        Raises:
            StageError: a stage is gone.
        """
        if self.lost is not None:
            raise StageError(f"no step can run any more: {self.lost}") from self.lost
        self.error = None

    def _set(self, error: BaseException) -> None:
        self.error = error
        self._conductor.abort()
        self._changed.notify_all()
