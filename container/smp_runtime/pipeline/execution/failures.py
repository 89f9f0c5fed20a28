"""Errors that end a step on all stages: what the stage where they happened tells, and what the others raise."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.error_codes import code_of
from smp_records.records import FailureRecord
from smp_runtime.errors import SMPError, SMPRuntimeError
from smp_runtime.pipeline.transport.messages import Fail
from smp_runtime.pipeline.transport.transport import StageFailed

if TYPE_CHECKING:
    import torch

    from smp_runtime.pipeline.execution.task_scheduler import TaskScheduler

#: Place of an error in the script's own code.
STEP_FUNCTION = "the step function"


#: Rooms of this library whose code runs between the script's lines; an error of a module of ours (``smp.nn``) is another matter.
_RUNTIME = Path(__file__).parents[2]
_OWN_FOLDERS = tuple(
    str(_RUNTIME / room) for room in ("activations", "job", "model", "pipeline", "sharding", "step", "tensors")
)


class StageError(SMPRuntimeError):
    """An error on another stage of the pipeline, with its rank, module and traceback.

    Attributes:
        accused: ranks whose connection was lost.
    """

    accused: tuple[int, ...] = ()


def message_of(error: BaseException, place: str, stage: int, rank: int) -> Fail:
    """What the other stages are told.

    Args:
        place: path of a module, :data:`STEP_FUNCTION`, or in parentheses what this library was doing.
    """
    where = place if place == STEP_FUNCTION else f"module {place!r}"
    if place.startswith("("):
        where = place[1:-1]
    failure = getattr(error, "failure", None)
    if not isinstance(failure, FailureRecord):
        host = os.environ.get("SMP_HOST") or os.environ.get("SM_CURRENT_HOST", "")
        failure = FailureRecord(
            rank=rank,
            host=host,
            error_type=type(error).__name__,
            message=_plain(str(error)),
            traceback=f"In {where}:\n" * where.startswith("module ") + _plain(traceback_of(error)),
            when=time.time(),
            accused=tuple(getattr(error, "accused", ())),
            code=code_of(error) or "",
        )
    return Fail(stage, rank, where, failure)


def error_of(fail: Fail, cause: BaseException | None = None) -> StageError:
    """What a stage raises for an error in a module, its own or another stage's."""
    failure = fail.failure
    error = StageError(
        f"pipeline stage {fail.stage} (rank {fail.rank}), {fail.place}: {failure.error_type}: {failure.message}\n\n"
        f"Traceback of rank {failure.rank}:\n{failure.traceback}"
    )
    error.failure = failure
    error.__cause__ = cause
    return error


def traceback_of(error: BaseException) -> str:
    """The traceback as text, without the frames between the script, its modules and PyTorch that are ours."""
    told = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [told]
    seen: set[int] = set()
    while chain:
        part = chain.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        chain += (part.__cause__, part.__context__)
        kept = _foreign([frame.filename for frame in part.stack])
        part.stack = traceback.StackSummary.from_list([part.stack[index] for index in kept])
    return "".join(told.format())


def without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The same traceback without our frames, as :func:`traceback_of` leaves them out."""
    steps: list[types.TracebackType] = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    made: types.TracebackType | None = None
    for index in reversed(_foreign([step.tb_frame.f_code.co_filename for step in steps])):
        step = steps[index]
        made = types.TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def _plain(text: str) -> str:
    """Without what cannot be written as UTF-8, such as halves of characters in a file's name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _foreign(files: Sequence[str]) -> list[int]:
    """Positions of the frames that are not ours, and of ours below all others: an error that we raise says where."""
    ours = [file.startswith(_OWN_FOLDERS) for file in files]
    below = len(ours) - ours[::-1].index(False) if False in ours else 0
    return [index for index, own in enumerate(ours) if not own or index >= below]


class FirstStepFailures:
    """Errors of a model's first step, which one rank traces while the others wait for its decision.

    Args:
        stage: of the rank that traces.
        rank: its global rank.
    """

    def __init__(self, stage: int, rank: int) -> None:
        self._stage = stage
        self._rank = rank

    def told(self, error: Exception, module: str) -> Fail:
        """What the other ranks are told of an error in ``module``, or, if that is empty, in the step function."""
        where = f"module {module!r}" if module else STEP_FUNCTION
        return message_of(error, f"({where} in the tracing step)", self._stage, self._rank)

    def own(self, error: Exception, told: Fail, module: str) -> Exception:
        """What the rank raises that traces: the script's own error stays what it is, as in later steps."""
        if module:
            return error_of(told, error.with_traceback(without_own_frames(error.__traceback__)))
        return error.with_traceback(without_own_frames(error.__traceback__))

    def heard(self, told: Fail) -> Exception:
        """What the others raise."""
        return error_of(told)

    def attribute(self, error: SMPError, told: Fail) -> SMPError:
        """``error`` with what was told as its origin, for the job's failure."""
        error.failure = told.failure
        return error


class Alarm:
    """The first error of a step: keeps it, stops this rank's tasks, and tells the other stages.

    Errors come from workers, receivers, senders and the script's thread; the first that takes the pipeline's lock counts,
    and the script's thread, which alone raises it, is woken under the same lock, so that it cannot miss it.

    Args:
        changed: wakes the script's own thread; its lock guards everything here.
        is_open: whether a step runs; errors between steps have nobody to tell.

    Attributes:
        error: what the step is to raise on this rank, or None.
        lost: why no further step can run, or None.
        left: stages that have left in good order.
    """

    def __init__(
        self,
        stage: int,
        ranks: Sequence[int],
        scheduler: TaskScheduler,
        changed: threading.Condition,
        is_open: Callable[[], bool],
        send: Callable[[int, object, Sequence[torch.Tensor]], None],
    ) -> None:
        self._stage = stage
        self._ranks = ranks
        self._conductor = scheduler
        self._changed = changed
        self._is_open = is_open
        self._send = send
        self.error: BaseException | None = None
        self.lost: StageError | None = None
        self.left: set[int] = set()

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

    def broken(self, error: BaseException, doing: str) -> Fail:
        """Messages cannot be sent or received any more because of an error on this rank, in a step or between two.

        Returns:
            What the other stages are to be told, which messages of a step would not bring them.
        """
        fail = message_of(error, f"({doing})", self._stage, self._ranks[self._stage])
        with self._changed:
            self._end(error_of(fail, error))
        return fail

    def lost_stage(self, stage: int, error: BaseException) -> None:
        """The connection to a stage broke; no further step can run."""
        if isinstance(error, StageFailed) and isinstance(error.words, Fail):
            seen = error_of(error.words)
        else:
            seen = StageError(f"pipeline stage {self._stage} (rank {self._ranks[self._stage]}): {error}")
            seen.__cause__ = error
            seen.accused = getattr(error, "accused", ())
        with self._changed:
            self._end(seen)

    def left_stage(self, stage: int) -> None:
        """A stage has ended in good order. After the last step that is as it should be, so it ends no step by itself."""
        with self._changed:
            self.left.add(stage)
            self._changed.notify_all()

    def check_left(self, stages: Collection[int]) -> None:
        """The step cannot go on without ``stages``.

        Raises:
            StageError: one of them has left.
        """
        if self.left and (gone := self.left.intersection(stages)):
            stage = min(gone)
            error = StageError(
                f"rank {self._ranks[stage]} (pipeline stage {stage}) has ended its script or called smp.shutdown(), but rank "
                f"{self._ranks[self._stage]} (stage {self._stage}) is in a step that needs it; all ranks must run the same number "
                "of steps: look for a loop, an exit or a data loader whose length depends on the rank"
            )
            error.accused = (self._ranks[stage],)
            raise error

    def reset(self) -> None:
        """A step begins.

        Raises:
            StageError: a stage is gone.
        """
        if self.lost is not None:
            error = StageError(f"no step can run any more: {self.lost}")
            error.failure = self.lost.failure
            raise error from self.lost
        self.error = None

    def _end(self, error: StageError) -> None:
        self.lost = self.lost or error  # what comes after the first is mostly its consequence
        if self.error is None and self._is_open():
            self._set(error)

    def _set(self, error: BaseException) -> None:
        self.error = error
        self._conductor.abort()
        self._changed.notify_all()
