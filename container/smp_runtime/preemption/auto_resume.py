"""``smp.auto_resume``: what a job's state is, taken from the newest checkpoint and saved when the job is asked to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from smp_config.errors import kind_of
from smp_config.recovery import wants_memory
from smp_records.rank_record import SAVE, current_record
from smp_runtime.checkpoint.files.atomic_file import user_content_bytes
from smp_runtime.checkpoint.files.manifest import PARTIAL, checkpoints_in, newest_name
from smp_runtime.checkpoint.files.opened_files import local_path
from smp_runtime.checkpoint.live_state import ScriptPosition
from smp_runtime.checkpoint.memory.copying import Copier
from smp_runtime.checkpoint.memory.newest import newest_state
from smp_runtime.checkpoint.save_and_resume import resume_from_checkpoint
from smp_runtime.checkpoint.save_partial import Saver
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.preemption.stop_agreement import StopAgreement, script_handles_stops

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

#: Folder of the checkpoints; a job sets the variable, other launchers do not.
_FOLDER_VARIABLE, _FOLDER = "SMP_CHECKPOINT_DIR", "checkpoints"

#: Keys in the user content of a checkpoint saved here: finished steps, states by name, and the script's content.
_STEP, _STATES, _OWN = "smp_step", "smp_states", "content"


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state of plain containers, numbers and tensors: a scheduler, a loss scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Load a state."""


@dataclass(frozen=True)
class JobState:
    """The state of a job, and where and when it is saved.

    Attributes:
        others: by name.
        own: a dictionary, or a function that returns the script's own content.
        every: steps between two checkpoints; None saves only when the job is stopped.
        kept: number of checkpoints to keep.
    """

    model: DistributedModel
    optimizer: DistributedOptimizer
    folder: Path
    others: Mapping[str, Stateful]
    own: Any = None
    every: int | None = None
    kept: int | None = 2
    in_background: bool = False
    strict: bool = True


class Progress:
    """The progress of a job, which :func:`auto_resume` returns.

    It stands for the number of finished steps in ``range(progress, steps)``.

    Attributes:
        step: finished steps, including those of former jobs. These are iterations of the loop over :meth:`steps`,
            or else calls of ``optimizer.step()``.
        user_content: the script's content in the checkpoint that was resumed; None without one.
        resumed: whether there was one.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, state: JobState, agreement: StopAgreement) -> None:
        self.step = 0
        self.user_content: Any = None
        self.resumed = False
        self._session = session
        self._state = state
        self._agreement = agreement
        self._in_loop = False
        self._has_updated = False  # since the last boundary; before an update gradients may be under way
        self._stopped_by: str | None = None
        self._moment: ScriptPosition | None = None  # of a boundary that is to be saved when the next step begins

    def __index__(self) -> int:
        return self.step

    __int__ = __index__

    def __repr__(self) -> str:
        return f"Progress(step={self.step}, resumed={self.resumed})"

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to ``total`` − 1; a new job starts at 0.

        Checkpoints are saved between two iterations, so they include everything that the body of the loop has done,
        also after ``optimizer.step()``. A job that is asked to stop ends there, too.
        """
        self._in_loop = True
        try:
            while self.step < total:
                yield self.step
                self.step += 1
                if self._has_updated:
                    self._has_updated = False
                    if self._stopped_by or (self._is_due() and self.step < total):
                        self._save_and_stop(None)
                    self._copy(None)
        finally:
            self._in_loop = False

    # -- called by the session -------------------------------------------------------------------------------------

    def on_update(self, optimizer: object) -> None:
        """Check for a stop after an update of the optimizer, and record state that the rest of the iteration may change."""
        if optimizer is not self._state.optimizer:
            return
        self._has_updated = True
        # No step in between: the script calls the model without one.
        if self._moment is not None:
            self._end_turn(self._moment)
        self._stopped_by = self._stopped_by or self._agreement.finished_step()
        if self._in_loop:
            return
        self.step += 1
        is_saved = self._stopped_by or self._is_due() or wants_memory(os.environ)
        if is_saved:
            self._moment = ScriptPosition.now(self._session)

    def on_step(self) -> None:
        """Finish the previous iteration when a step begins.

        By now the script has done its work after ``optimizer.step()``, such as a scheduler's step.
        """
        if self._moment is not None and not self._in_loop:
            self._end_turn(self._moment)

    # -- saving and resuming ---------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        every = self._state.every
        if not every:
            return False
        return self.step % every == 0

    def _end_turn(self, moment: ScriptPosition) -> None:
        """Finish an iteration of a loop that does not use :meth:`steps`: save, stop or copy the state of ``moment``."""
        self._moment = None
        if self._stopped_by or self._is_due():
            self._save_and_stop(moment)
        self._copy(moment)

    def _copy(self, moment: ScriptPosition | None) -> None:
        """Copy the state to shared memory, if the job wants that; see ``memory_checkpoint``."""
        copier = Copier.of(self._session)
        if copier is not None and self._state.model.partitioned:
            with current_record().within(SAVE):
                copier.step(self._state.model, self._state.optimizer, self._content, moment)

    def _save_and_stop(self, moment: ScriptPosition | None) -> None:
        """Save; with a request to stop, end the process with exit code 0."""
        state, reason = self._state, self._stopped_by
        folder = state.folder / f"step{self.step}{PARTIAL}"
        with self._session.ranks.control.doing("smp.auto_resume"), current_record().within(SAVE):
            Saver.of(self._session).save(
                folder,
                f"step{self.step}",
                state.model,
                state.optimizer,
                self._content,
                keep=state.kept,
                in_background=state.in_background and reason is None,
                moment=moment,
            )
        if reason is not None:
            if self._session.ranks.rank == 0:
                logger.warning(
                    "stopped by %s after step %d, saved as %s; a job with this folder goes on from there",
                    reason,
                    self.step,
                    folder,
                )
            raise SystemExit(0)

    def _content(self) -> bytes:
        """Return the content that rank 0 adds to a checkpoint."""
        own = self._state.own() if callable(self._state.own) else self._state.own
        states = {name: other.state_dict() for name, other in self._state.others.items()}
        return user_content_bytes({_STEP: self.step, _STATES: states, _OWN: own}, trusted=False)

    def resume(self) -> None:
        """Resume from the newest checkpoint, or from the state in memory after a restart in place, if there is any.

        Every rank calls it.

        Raises:
            CheckpointError: it is damaged, of another model, or lacks a requested state.
        """
        in_memory = newest_state(self._session) is not None
        if not _has_any(self._session, self._state.folder) and not in_memory:
            return
        content = resume_from_checkpoint(self._session, str(self._state.folder))
        self.resumed = True
        if isinstance(content, dict) and content.keys() == {_STEP, _STATES, _OWN}:
            self.step, self.user_content = content[_STEP], content[_OWN]
            saved = content[_STATES]
        else:
            self.step, self.user_content, saved = self._session.progress.step, content, {}
            self._refuse(
                "it was not saved by smp.auto_resume, and has no number of steps of its own and no state but the model's"
            )
        missing = sorted(self._state.others.keys() - saved.keys())
        unused = sorted(saved.keys() - self._state.others.keys())
        if missing or unused:
            self._refuse(
                f"it has no state of {', '.join(missing) or 'others'} and one of {', '.join(unused) or 'no other'}"
            )
        for name in saved.keys() & self._state.others.keys():
            self._state.others[name].load_state_dict(saved[name])
        if isinstance(self._state.own, dict) and isinstance(self.user_content, Mapping):
            self._state.own.update(self.user_content)
        if self._session.ranks.rank == 0:
            logger.info("resumed after step %d from %s", self.step, self._state.folder)

    def _refuse(self, why: str) -> None:
        """Raise CheckpointError because the checkpoint has other states than the script asks for.

        If ``strict`` is False, only log a warning.
        """
        said = f"the checkpoint in {self._state.folder} does not fit: {why}"
        if self._state.strict:
            raise CheckpointError(
                f"{said}; give auto_resume the same names as when it was saved, an empty folder=, or strict=False, with which what "
                "is missing begins anew"
            )
        if self._session.ranks.rank == 0:
            logger.warning("%s; what is missing begins anew", said)


def auto_resume(
    session: Session,
    model: DistributedModel,
    optimizer: DistributedOptimizer,
    *,
    folder: str | os.PathLike[str] | None = None,
    every: int | None = None,
    user_content: dict[str, Any] | Callable[[], Any] | None = None,
    num_kept_partial_checkpoints: int | None = 2,
    async_save: bool = False,
    strict: bool = True,
    **states: Stateful,
) -> Progress:
    """Go on where a former job has stopped, and stop so that the next one can; every rank calls it once, before its loop.

    Loads the newest checkpoint in ``folder``, saved with any degrees and number of processes, if there is one: model, optimizer,
    random numbers, ``states`` and ``user_content``. From then on SIGTERM to any rank makes all finish the same step, save, and end
    with exit code 0.

    Between two turns of ``for step in progress.steps(total)`` everything is as the body has left it. In a loop of another kind
    the checkpoint is saved when the next ``@smp.step`` begins, with the random numbers as they were after ``optimizer.step()``.

    Args:
        model: what ``smp.DistributedModel`` returned.
        optimizer: what ``smp.DistributedOptimizer`` returned.
        folder: of checkpoints; default: ``SMP_CHECKPOINT_DIR``, else ``checkpoints``.
        every: save each so many steps, but not after the last; None saves only when the job is stopped.
        user_content: plain containers, numbers, strings and tensors that belong to the state. A dictionary is updated with what
            was saved, a function gives them when they are saved; rank 0's are saved.
        num_kept_partial_checkpoints: older ones are removed beyond this number; None keeps all.
        async_save: write checkpoints of ``every`` while training goes on.
        strict: False lets a checkpoint without some of ``states`` pass, which begin anew.
        states: by name, what else goes on: schedulers, ``GradScaler``, anything with ``state_dict`` and ``load_state_dict``.

    Returns:
        How far the job is: ``range(progress, total)`` and ``progress.steps(total)`` are the steps that are left.

    Raises:
        SMPUserError: not the wrapped model and optimizer, or a state that is none.
        CheckpointError: a checkpoint that is damaged, of another model, or without ``states``; see ``strict``.

    Example:
        >>> progress = smp.auto_resume(model, optimizer, folder="resumable", every=100)
        >>> for step in progress.steps(3):
        ...     optimizer.zero_grad()
        ...     loss = train_step(model, inputs, targets)
        ...     optimizer.step()
    """
    if not isinstance(model, DistributedModel) or not isinstance(optimizer, DistributedOptimizer):
        raise SMPUserError(
            f"smp.auto_resume got {kind_of(model)} and {kind_of(optimizer)}; pass what smp.DistributedModel and "
            "smp.DistributedOptimizer returned",
            code="SMP315",
        )
    if session.models != [model] or session.optimizers != [optimizer]:
        raise SMPUserError(
            f"smp.auto_resume saves one wrapped model and one wrapped optimizer, but {len(session.models)} and "
            f"{len(session.optimizers)} are alive: save them with smp.save_checkpoint(model=…, optimizer=…), and remember "
            "SIGTERM in a handler of the script's own (docs/preemption.md)",
            code="SMP315",
        )
    for name, other in states.items():
        if not isinstance(other, Stateful):
            raise SMPUserError(
                f"{name}= of smp.auto_resume is {kind_of(other)} without state_dict and load_state_dict; pass plain "
                "values in user_content=",
                code="SMP315",
            )
    if every is not None and every < 1:
        raise SMPUserError(
            f"every is {every} steps; save each 1 or more, or None for a checkpoint when the job is stopped",
            code="SMP315",
        )
    if session.ranks.kept(Progress) is not None:
        raise SMPUserError(
            "smp.auto_resume was called a second time in this job, or after the first step of one with SMP_AUTO_CHECKPOINT=1, "
            "which has begun without it; call it once, before the loop",
            code="SMP315",
        )
    state = JobState(
        model,
        optimizer,
        local_path(default_folder() if folder is None else folder, "folder of smp.auto_resume"),
        states,
        user_content,
        every,
        num_kept_partial_checkpoints,
        async_save,
        strict,
    )
    return begin(session, state)


def begin(session: Session, state: JobState) -> Progress:
    """Resume, and listen to requests to stop; every rank calls it, once per job."""
    agreement = StopAgreement(session.ranks.control)
    session.at_leave.append(agreement.close)
    if not agreement.listen():
        logger.log(
            logging.WARNING if script_handles_stops() else logging.INFO,
            "rank %d: the script handles SIGTERM itself, or does not run in the main thread: this rank stops when another is asked "
            "to, and not by its own SIGTERM",
            session.ranks.rank,
        )
    # All ranks listen before any goes on: resuming brings them together.
    progress = session.ranks.keep(Progress, lambda: Progress(session, state, agreement))
    progress.resume()
    session.after_update.append(progress.on_update)
    session.before_step.append(progress.on_step)
    return progress


def default_folder() -> Path:
    """Return the folder of a job's checkpoints."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or _FOLDER)


def _has_any(session: Session, folder: Path) -> bool:
    """Return whether any rank sees a checkpoint, so that one must be resumed; all ranks call it."""
    found = newest_name(folder) is not None or bool(checkpoints_in(folder))
    return any(session.ranks.control.allgather(found, list(range(session.ranks.control.size))))
