"""The start of recording and guarding numbers.

It happens in ``smp.init()`` if the environment requests it, or in ``smp.record_numerics``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from smp_records.numerics import (
    DEFAULT_EVERY,
    GUARDS_VARIABLE,
    MOST_EVERY,
    VARIABLE,
    Guards,
    Trial,
    every_steps,
)
from smp_runtime.errors import SMPUserError
from smp_runtime.job.invariants import Invariants
from smp_runtime.job.session import at_init
from smp_runtime.model.distributed_model import when_wrapped
from smp_tools.numerics.guard import UpdateGuard
from smp_tools.numerics.invariants import JobInvariants
from smp_tools.numerics.recorder import NumericsRecorder
from smp_tools.numerics.trial import TrialRun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel

#: Folder in the job's output data if ``SMP_RECORD_NUMERICS`` is 1.
_FOLDER = "numerics"


def record_numerics(session: Session, folder: str | os.PathLike[str] = "", every: int = DEFAULT_EVERY) -> None:
    """Record numbers that distinguish this training from another.

    The numbers are norms, largest values and projections of the tensors of a step. Every rank must call this once, before the
    first step. Each rank writes a file, and sends nothing. ``smp-estimator diff`` compares two folders, of any degrees. The call
    does nothing if ``SMP_RECORD_NUMERICS`` has already started the recording.

    Args:
        folder: all ranks may have the same one; by default ``numerics`` in the job's output data, else in the working folder.
        every: updates from one recorded step to the next, 1 or more.

    Raises:
        SMPUserError: (a ``ValueError``) another number, or a folder that nothing can be written into.

    Example:
        >>> smp.record_numerics("numerics", every=10)  # then: smp-estimator diff numerics OTHER
    """
    if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= MOST_EVERY:
        raise SMPUserError(
            f"smp.record_numerics got every={every!r}; it is the number of updates from one recorded step to the next: give a "
            f"whole number from 1 to {MOST_EVERY:,}",
            code="SMP317",
        )
    place = Path(folder) if os.fspath(folder) else default_folder(os.environ)
    if session.ranks.kept(NumericsRecorder) is None:
        _follow_models(
            session, session.ranks.keep(NumericsRecorder, lambda: NumericsRecorder(session, place, every, os.environ))
        )


def default_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which ranks record if no folder is given."""
    return Path(environ.get("SM_OUTPUT_DATA_DIR", ".")) / _FOLDER


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """Return the folder in which the environment requests recording, or None."""
    text = environ.get(VARIABLE, "")
    if text in ("", "0"):
        return None
    return default_folder(environ) if text == "1" else Path(text)


def _begin(session: Session) -> None:
    environ = os.environ
    folder, every = folder_of(environ), session.ranks.cfg.record_numerics
    if folder is not None:
        record_numerics(session, folder, every_steps(environ))
    elif every and VARIABLE not in environ:
        record_numerics(session, every=every)
    guards = Guards.of(environ.get(GUARDS_VARIABLE, ""))
    if guards != Guards():
        place = folder or default_folder(environ)
        _follow_models(session, session.ranks.keep(UpdateGuard, lambda: UpdateGuard(session, guards, place)))
    if (trial := Trial.from_environment(environ)) is not None:
        TrialRun(session, trial)
    # The guards come first, because they report more. Ranks that stand for absent ones have no values to compare.
    if session.ranks.cfg.check_invariants and not session.ranks.control.speaks_for_all:
        session.ranks.keep(Invariants, lambda: JobInvariants(session))


def _follow_models(session: Session, watching: NumericsRecorder | UpdateGuard) -> None:
    """Watch models that are wrapped from now on from their first call, also in a training without steps."""

    def follow(_: DistributedModel) -> None:
        watching.watch_models()

    when_wrapped.append(follow)
    session.at_close.append(lambda: when_wrapped.remove(follow))


at_init.append(_begin)
