"""``SMP_AUTO_CHECKPOINT=1``: stop and resume a job without changes to the script.

Only the state that the library knows is saved.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_runtime.checkpoint.save_and_resume import Resumed
from smp_runtime.data.position import SourcePositions
from smp_runtime.errors import SMPUserError
from smp_runtime.job.session import at_init
from smp_runtime.model.distributed_model import DistributedModel
from smp_runtime.optim.distributed_optimizer import DistributedOptimizer
from smp_runtime.preemption.auto_resume import JobState, Progress, begin, default_folder
from smp_runtime.preemption.stop_agreement import script_handles_stops

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")

VARIABLE = "SMP_AUTO_CHECKPOINT"

#: Subfolder of the checkpoints' folder. The script's own checkpoints have other content and must not mix with these.
_FOLDER = "auto"


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the job's environment enables automatic checkpoints.

    Raises:
        ConfigError: the variable has an invalid value.
    """
    value = environ.get(VARIABLE, "0") or "0"
    if value not in ("0", "1"):
        raise ConfigError(
            f"{VARIABLE} is {value!r}; set it to 1, or to 0 for a job that its script stops and resumes", code="SMP315"
        )
    return value == "1"


class Automatic:
    """The automatic checkpoints of a job; they begin with the first step of a training.

    By then the script has wrapped its model and optimizer.
    """

    outlives_regrouping = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left_to = ""
        self._is_told = True
        self._is_decided = False

    def leave_to(self, whom: str, *, is_told: bool = True) -> None:
        """Turn this off, because something else stops and resumes the job.

        Every rank calls it, before the first step.

        Args:
            whom: in a sentence, such as ``Trainer saves by itself``.
            is_told: whether to warn the user; False if the replacement does what the user asked for.
        """
        self._left_to, self._is_told = whom, is_told

    def on_step(self) -> None:
        """Start automatic checkpoints when the first training step begins; every rank calls it."""
        session = self._session
        if self._is_decided or not session.optimizers:  # before training, such as a first evaluation
            return
        self._is_decided = True
        if session.ranks.kept(Progress) is not None:
            return  # the script has called smp.auto_resume
        if whom := self._left_to or self._of_the_script():
            if session.ranks.rank == 0 and self._is_told:
                logger.warning(
                    "%s=1 has no effect in this job, since %s: its state is saved and resumed as the script says",
                    VARIABLE,
                    whom,
                )
            return
        models = [model for model in session.models if isinstance(model, DistributedModel)]
        optimizers = [each for each in session.optimizers if isinstance(each, DistributedOptimizer)]
        if (len(models), len(optimizers)) != (1, 1):
            raise SMPUserError(
                f"{VARIABLE}=1 saves one wrapped model and one wrapped optimizer, but the script has {len(models)} and "
                f"{len(optimizers)}: unset it, and save them with smp.save_checkpoint(model=…, optimizer=…)",
                code="SMP315",
            )
        progress = begin(session, JobState(models[0], optimizers[0], default_folder() / _FOLDER, {}, strict=False))
        if progress.resumed and session.ranks.rank == 0:
            logger.warning(
                "%s=1: model, optimizer and random numbers go on after step %d; what else the script has begins anew, such as its "
                "count of steps, schedulers and its place in the data: with smp.auto_resume these go on, too",
                VARIABLE,
                progress.step,
            )

    def _of_the_script(self) -> str:
        """Return how the script on any rank stops and resumes on its own; empty if it does not. All ranks call it."""
        ranks = self._session.ranks
        mine = ""
        if script_handles_stops():
            mine = "it handles SIGTERM itself"
        elif ranks.kept(Resumed):
            mine = "it resumes by itself"
        elif SourcePositions.of(ranks).state():  # this step has a batch of it already
            mine = (
                "what it reads with smp.data goes on by smp.auto_resume alone, which is called before the first batch"
            )
        said = ranks.control.allgather(mine, list(range(ranks.control.size)))
        return next((words for words in said if words), "")


def _begin(session: Session) -> None:
    if is_wanted(os.environ):
        session.before_step.append(session.ranks.keep(Automatic, lambda: Automatic(session)).on_step)


at_init.append(_begin)
