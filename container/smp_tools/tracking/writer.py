"""The thread that hands points to trackers, so that no step waits for a disk, a server or a device."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from smp_tools.tracking.points import LaterPoint, MetricPoint

logger = logging.getLogger("smp")

#: Seconds between two times at which trackers write their points.
_FLUSH_SECONDS = 1.0
#: Points that wait at most, for a tracker that does not come after.
_MOST_WAITING = 100_000
#: Seconds for the last points when the job ends, and when it has failed.
_LAST_SECONDS, _LAST_SECONDS_FAILED = 30.0, 2.0


class Logger(Protocol):
    """A tracker; it is made, called and closed by one thread at a time.

    Attributes:
        name: as in ``SMP_LOGGERS``.
    """

    name: str

    def write(self, points: Sequence[MetricPoint]) -> None:
        """Take points, in the order in which they were made."""

    def flush(self) -> None:
        """Make all points that were taken visible to readers."""

    def close(self, *, failed: bool) -> None:
        """Close the logger when the job ends."""


class Writer:
    """A queue of points from the training, with a thread that passes them to trackers.

    A tracker that raises an error is reported once, and gets no more points: a display must not end a job.

    Args:
        regular: called about once a second; its values make a point of their own at the newest step.
    """

    def __init__(self, loggers: Sequence[Logger], regular: Callable[[], Mapping[str, float]] = dict) -> None:
        self._loggers = list(loggers)
        self._regular = regular
        # Bounded: a service that does not answer must not fill the memory.
        self._waiting: queue.Queue[LaterPoint | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._failed = False
        self._step = 0
        # Trackers use the network and the disk, for which no step waits.
        self._thread = threading.Thread(target=self._work, name="smp-tracking", daemon=True)
        self._thread.start()

    def put(self, point: LaterPoint) -> None:
        """Hand over a point; never waits."""
        try:
            self._waiting.put_nowait(point)
        except queue.Full:
            self._lost += 1

    def close(self, *, failed: bool) -> None:
        """Write the remaining points, within a deadline.

        Args:
            failed: an error ends the job, and its processes soon.
        """
        self._failed = failed
        seconds = _LAST_SECONDS_FAILED if failed else _LAST_SECONDS
        deadline = time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            self._lost += 1
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "trackers (%s) have not taken the last points within %.0f s; some may be missing",
                self._names(),
                seconds,
            )
        if self._lost:
            logger.warning("trackers (%s) did not come after: %d points are missing", self._names(), self._lost)

    def _names(self) -> str:
        return ", ".join(each.name for each in self._loggers)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        flushed, ends = time.monotonic(), False
        while not ends:
            points, ends = self._arrived(flushed + _FLUSH_SECONDS - time.monotonic())
            is_due = ends or time.monotonic() - flushed >= _FLUSH_SECONDS
            if is_due:
                if points or self._step:
                    points += self._regular_point()
                self._each(points, flush=True)
                flushed = time.monotonic()
            elif points:
                self._each(points, flush=False)
        for each in list(self._loggers):
            self._safely(each, functools.partial(each.close, failed=self._failed))

    def _arrived(self, seconds: float) -> tuple[list[MetricPoint], bool]:
        """Return the points that have arrived, and whether the job ends.

        It waits up to ``seconds`` for the first point.
        """
        points: list[MetricPoint] = []
        try:
            later = self._waiting.get(timeout=max(0.0, seconds))
            while later is not None:
                points.append(later.arrived())
                self._step = points[-1].step
                later = self._waiting.get_nowait()
        except queue.Empty:
            return points, False
        except Exception as error:  # of the device
            logger.warning("a point of the trackers is lost: %s: %s", type(error).__name__, error)
            return points, False
        return points, True

    def _regular_point(self) -> list[MetricPoint]:
        try:
            values = dict(self._regular())
        except Exception as error:  # trackers must not end the training
            logger.warning("trackers get nothing of the ranks' memory any more: %s: %s", type(error).__name__, error)
            self._regular = dict
            return []
        return [MetricPoint(self._step, time.time(), values)] if values else []

    def _each(self, points: Sequence[MetricPoint], *, flush: bool) -> None:
        # A copy of the list, which loses the loggers that fail; these are not asked again.
        for each in list(self._loggers):
            if points:
                self._safely(each, functools.partial(each.write, points))
            if each not in self._loggers:
                continue
            if flush:
                self._safely(each, each.flush)

    def _safely(self, each: Logger, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # of a tracker's own package; likewise
            self._loggers.remove(each)
            logger.warning(
                "%s gets no more points, since it failed: %s: %s; the training goes on, and the log has its lines",
                *(each.name, type(error).__name__, error),
            )
