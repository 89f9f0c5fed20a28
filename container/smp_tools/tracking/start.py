"""The start of tracking: in ``smp.init()`` if the environment requests it, and for values of ``smp.log``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from smp_records import tracking
from smp_runtime.errors import SMPUserError
from smp_runtime.job import session as sessions
from smp_runtime.job.session import at_init
from smp_tools.tracking.loggers.making import make_loggers
from smp_tools.tracking.points import check_values
from smp_tools.tracking.profile import begin_profile
from smp_tools.tracking.rank_times import HostValues, RankTimes
from smp_tools.tracking.run import TrackedRun
from smp_tools.tracking.tracker import UpdateTracker
from smp_tools.tracking.writer import Writer

if TYPE_CHECKING:
    from smp_runtime.job.session import Session


def log(step: int | None = None, **values: object) -> None:
    """Give numbers of the script's own to the trackers of the job, and to its log.

    ``smp.log(accuracy=0.93)``. Loss, learning rate, throughput and the like are there without it. The first rank writes; on others
    it does nothing, so that it may be called on all or only there. Tensors are read when the device has computed them, and
    nothing waits for that.

    Args:
        step: updates before it; by default those until now.
        values: by name, numbers or tensors of one element.

    Raises:
        SMPUserError: a value that is no number, or a step that is none.
        NotInitializedError: before ``smp.init()``.

    Example:
        >>> smp.log(accuracy=0.93)
    """
    session = sessions.current_session()
    if step is not None and not _is_count(step):
        raise SMPUserError(
            f"smp.log got step={step!r}; it counts updates: give a whole number from 0, or leave it out for those until now",
            code="SMP318",
        )
    numbers = check_values(values)
    tracker = session.ranks.kept(UpdateTracker)
    if tracker is not None and numbers:
        tracker.log(numbers, session.progress.step if step is None else step)


def _is_count(value: object) -> bool:
    # A flag is an ``int`` in Python, and counts nothing.
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 0 <= value < 2**53


def _begin(session: Session) -> None:
    environ = os.environ
    names = tracking.loggers_of(environ)
    every, peak = tracking.log_every(environ), tracking.peak_tflops(environ)
    seconds = tracking.seconds_between_records(environ)
    tracking.require_packages(names)  # on every rank: all raise, so none waits for another
    begin_profile(session, environ)
    session.ranks.keep(RankTimes, lambda: RankTimes(session, seconds))
    if session.ranks.rank:
        return
    writer = None
    if names:
        made = make_loggers(names, TrackedRun.of(session.ranks, environ))
        writer = Writer(made, HostValues(environ, session.ranks.rank))
    if writer is not None or session.progress.enabled:
        session.ranks.keep(UpdateTracker, lambda: UpdateTracker(session, writer, every, peak))


at_init.append(_begin)
