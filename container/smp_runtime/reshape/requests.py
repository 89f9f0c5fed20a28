"""Requests from outside to change the degrees of a job, carried out by all ranks after the same update."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_records.rank_record import FOLDER_VARIABLE
from smp_records.reshaping import answer, read_request, takes_requests
from smp_runtime.errors import CheckpointError, SMPUserError
from smp_runtime.job.session import at_init
from smp_runtime.preemption.stop_agreement import StopAgreement
from smp_runtime.reshape.reshape import reshape

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer

logger = logging.getLogger("smp")

#: Seconds between two looks for a request.
_LOOK_SECONDS = 0.2


class ReshapeRequests:
    """A listener for requests; every rank has one.

    Rank 0 looks for files, and all agree on the update after which they act.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        # Ends the thread's pause at once when the job is closed.
        self._over = threading.Event()
        self._agreement = self._agreed_anew()
        if session.ranks.rank == 0:
            # On a thread, so that no step waits for a file system.
            threading.Thread(target=self._look, name="smp-reshape", daemon=True).start()
        session.after_update.append(self.updated)
        session.at_close.append(self.close)

    def _agreed_anew(self) -> StopAgreement:
        return StopAgreement(
            self._session.ranks.control, "asked for other degrees (%s): all ranks finish the same update first"
        )

    def _look(self) -> None:
        """Run rank 0's thread, which passes each request on once."""
        handed_on: StopAgreement | None = None
        while not self._over.wait(_LOOK_SECONDS):
            if self._agreement is handed_on:
                continue
            text = read_request(self._folder)
            if text is not None:
                handed_on = self._agreement
                handed_on.request(text)

    def updated(self, _: TrainedOptimizer) -> None:
        """Carry out a request after an update, if the ranks have agreed on one; every rank calls it."""
        text = self._agreement.finished_step()
        if text is None:
            return
        self._agreement.close()
        said: dict[str, object]
        try:
            done = reshape(self._session, json.loads(text))
            said = {"parameters": done.parameters, "seconds": done.seconds}
        except (ConfigError, SMPUserError, CheckpointError, ValueError) as error:  # the job goes on as it was
            said = {"error": str(error)}
            if self._session.ranks.rank == 0:
                logger.warning("%s", error)
        if self._session.ranks.rank == 0:
            answer(self._folder, said)
        self._agreement = self._agreed_anew()

    def close(self) -> None:
        """Stop listening when the job ends."""
        self._over.set()
        self._agreement.close()


def _begin(session: Session) -> None:
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not takes_requests(os.environ):
        return
    if not all(
        session.ranks.control.allgather(Path(folder).is_dir() and bool(folder), list(range(session.ranks.control.size)))
    ):
        if session.ranks.rank == 0:
            logger.warning("SMP_RESHAPE_REQUESTS=1 has no effect: this project's launcher has not started the job")
        return
    session.ranks.keep(ReshapeRequests, lambda: ReshapeRequests(session, Path(folder)))


at_init.append(_begin)
