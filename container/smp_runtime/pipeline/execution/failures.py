"""Errors that end a step on all stages: the failed stage's report, and the errors that the others raise."""

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


#: Packages of this library with code that runs between the script's lines.
#: Errors in its modules for scripts (``smp.nn``) are another matter.
_RUNTIME = Path(__file__).parents[2]
_OWN_FOLDERS = tuple(
    str(_RUNTIME / package) for package in ("activations", "job", "model", "pipeline", "sharding", "step", "tensors")
)


class StageError(SMPRuntimeError):
    """An error on another stage of the pipeline, with its rank, module and traceback.

    Attributes:
        accused: ranks to which the connection was lost.
    """

    code = "SMP504"

    accused: tuple[int, ...] = ()


def message_of(error: BaseException, place: str, stage: int, rank: int) -> Fail:
    """Return the message that reports an error to the other stages.

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
    """Return the error that a stage raises for a failure in a module of its own or of another stage."""
    failure = fail.failure
    error = StageError(
        f"pipeline stage {fail.stage} (rank {fail.rank}), {fail.place}: {failure.error_type}: {failure.message}\n\n"
        f"Traceback of rank {failure.rank}:\n{failure.traceback}"
    )
    error.failure = failure
    error.__cause__ = cause
    return error


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, without this library's frames between the script, its modules and PyTorch."""
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
    """Return the traceback without this library's frames, by the same rule as :func:`traceback_of`."""
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
    """Escape characters that cannot be written as UTF-8, such as lone surrogates in a file's name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _foreign(files: Sequence[str]) -> list[int]:
    """Return the positions of the frames to keep.

    These are the frames outside this library, and this library's frames below all others. The latter show where
    this library raised an error.
    """
    foreign = [index for index, file in enumerate(files) if not file.startswith(_OWN_FOLDERS)]
    if not foreign:
        return list(range(len(files)))
    below = range(foreign[-1] + 1, len(files))
    return [*foreign, *below]


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
        """Return the report for the other ranks about an error in ``module``, or in the step function if that is empty."""
        where = f"module {module!r}" if module else STEP_FUNCTION
        return message_of(error, f"({where} in the tracing step)", self._stage, self._rank)

    def own(self, error: Exception, told: Fail, module: str) -> Exception:
        """Return the error that the tracing rank raises; an error of the script itself stays as it is, as in later steps."""
        if module:
            return error_of(told, error.with_traceback(without_own_frames(error.__traceback__)))
        return error.with_traceback(without_own_frames(error.__traceback__))

    def heard(self, told: Fail) -> Exception:
        """Return the error that the other ranks raise."""
        return error_of(told)

    def attribute(self, error: SMPError, told: Fail) -> SMPError:
        """Return ``error`` with the reported failure as its origin, for the job's failure."""
        error.failure = told.failure
        return error


class Alarm:
    """The first error of a step: it is kept, stops this rank's tasks, and is reported to the other stages.

    Errors come from workers, receivers, senders and the script's thread. The first that takes the pipeline's
    lock counts. Only the script's thread raises it. That thread is woken under the same lock, so that it cannot
    miss the error.

    Args:
        changed: wakes the script's own thread; its lock guards everything here.
        is_open: returns whether a step runs; errors between steps are not reported.

    Attributes:
        error: the error that the step raises on this rank, or None.
        lost: the error why no further step can run, or None.
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
        self._scheduler = scheduler
        self._changed = changed
        self._is_open = is_open
        self._send = send
        self.error: BaseException | None = None
        self.lost: StageError | None = None
        self.left: set[int] = set()

    def raised(self, error: BaseException, place: str) -> None:
        """Handle an error that was raised on this rank, in a module or in :data:`STEP_FUNCTION`."""
        # With the lock: if several threads raise at once, the first error counts; the others are often its consequences.
        with self._changed:
            if self.error is not None or not self._is_open():
                return
            fail = message_of(error, place, self._stage, self._ranks[self._stage])
            # On the rank that runs the script, the script's own errors stay unchanged.
            own = error if place == STEP_FUNCTION else error_of(fail, error)
            self._set(own)
            self._report(fail)

    def _report(self, fail: Fail) -> None:
        """Send a report to all other stages."""
        for stage in range(len(self._ranks)):
            if stage == self._stage:
                continue
            # A stage that is gone needs no report.
            with contextlib.suppress(SMPRuntimeError):
                self._send(stage, fail, ())

    def heard(self, fail: Fail) -> None:
        """Handle an error that another stage has reported."""
        with self._changed:
            if self.error is None and self._is_open():
                self._set(error_of(fail))

    def broken(self, error: BaseException, doing: str) -> Fail:
        """Handle an error on this rank that prevents all further messages, in a step or between two steps.

        Returns:
            The report for the other stages. A message of a step could not bring it to them.
        """
        fail = message_of(error, f"({doing})", self._stage, self._ranks[self._stage])
        with self._changed:
            self._end(error_of(fail, error))
        return fail

    def lost_stage(self, stage: int, error: BaseException) -> None:
        """Handle the loss of the connection to a stage; no further step can run."""
        if isinstance(error, StageFailed) and isinstance(error.words, Fail):
            seen = error_of(error.words)
        else:
            seen = StageError(f"pipeline stage {self._stage} (rank {self._ranks[self._stage]}): {error}")
            seen.__cause__ = error
            seen.accused = getattr(error, "accused", ())
        with self._changed:
            self._end(seen)

    def left_stage(self, stage: int) -> None:
        """Record that a stage has ended in good order.

        This is normal after the last step, so it does not end a step.
        """
        with self._changed:
            self.left.add(stage)
            self._changed.notify_all()

    def check_left(self, stages: Collection[int]) -> None:
        """Check that none of ``stages``, which the step needs, has left.

        Raises:
            StageError: one of them has left.
        """
        gone = self.left.intersection(stages)
        if gone:
            stage = min(gone)
            error = StageError(
                f"rank {self._ranks[stage]} (pipeline stage {stage}) has ended its script or called smp.shutdown(), but rank "
                f"{self._ranks[self._stage]} (stage {self._stage}) is in a step that needs it; all ranks must run the same number "
                "of steps: look for a loop, an exit or a data loader whose length depends on the rank"
            )
            error.accused = (self._ranks[stage],)
            raise error

    def reset(self) -> None:
        """Clear the error at the beginning of a step.

        Raises:
            StageError: no step can run any more, for example because a stage is gone.
        """
        if self.lost is not None:
            error = StageError(f"no step can run any more: {self.lost}")
            error.failure = self.lost.failure
            raise error from self.lost
        self.error = None

    def _end(self, error: StageError) -> None:
        self.lost = self.lost or error  # errors after the first one are mostly its consequence
        if self.error is None and self._is_open():
            self._set(error)

    def _set(self, error: BaseException) -> None:
        self.error = error
        self._scheduler.abort()
        self._changed.notify_all()
