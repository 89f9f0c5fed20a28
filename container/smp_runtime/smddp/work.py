"""The work object of an all-gather under way, for waits from Python and from PyTorch's C++ code."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from smp_runtime.errors import SMPOperationError

#: Seconds between two looks at a stream by a wait that has a limit.
_LOOK = 0.001


class _GatherWork(Work):
    """The common part of both kinds of work."""

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Return the error with which the collective ended, if any."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return the value of the completed future."""
        return self.get_future().value()

    def synchronize(self) -> None:
        self.wait()


class MessageWork(_GatherWork):
    """A work object that the thread that hands messages on completes.

    That thread never runs callbacks, since these may wait for it.

    Args:
        report: returns the value to complete the future with.
    """

    def __init__(self, report: Callable[[], Any]) -> None:
        super().__init__()
        self._report = report
        self._over = threading.Event()
        self._error: str | None = None
        self._future: torch.futures.Future[Any] | None = None
        # The future may be asked for while another thread ends the collective.
        self._lock = threading.Lock()

    def finish(self, error: str | None = None) -> None:
        """Mark the collective as ended, with or without an error; called once."""
        # Together: a later call of get_future() finds the end set, and completes the future itself.
        with self._lock:
            self._error = error
            self._over.set()
            future = self._future
        if future is None:
            return
        # The future may have callbacks already.
        try:
            threading.Thread(target=self._settle, args=(future,), name="smddp-callbacks", daemon=True).start()
        except RuntimeError:  # the interpreter ends and starts no more threads
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end.

        Args:
            timeout: most time to wait. If it is None, zero or less, the wait lasts until each of its messages has
                come within the group's timeout.

        Raises:
            RuntimeError: the collective failed, also because another rank was lost or did not come in time; or the
                timeout has passed, and the collective goes on.
        """
        limit = _seconds(timeout)
        if not self._over.wait(limit):
            raise SMPOperationError(_late(limit), code="SMP316")
        if self._future is not None:
            # Completed in a moment, and before it runs callbacks.
            with contextlib.suppress(Exception):
                self._future.wait()
        if self._error is not None:
            raise SMPOperationError(self._error, code="SMP316")
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended and its future is completed."""
        if not self._over.is_set():
            return False
        return self._future is None or self._future.done()

    def exception(self) -> Any:
        """Return the error of the collective; None if it did not fail, or not yet."""
        has_failed = self._over.is_set() and self._error is not None
        return SMPOperationError(self._error, code="SMP316") if has_failed else None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is completed at the end.

        Callbacks that it has by then run on a thread of their own.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            over = self._over.is_set()
        if over:
            self._settle(future)
        return future

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._report())
        else:
            future.set_exception(SMPOperationError(self._error, code="SMP316"))


class StreamWork(_GatherWork):
    """A work object queued on a stream: on CUDA, waiting for it blocks the caller's stream and not the CPU.

    Args:
        future: completed already, like a CUDA future that knows the pending work of its stream.
        event: recorded when the stream has finished it; None if nothing is left to do.
    """

    def __init__(self, future: torch.futures.Future[Any], event: torch.cuda.Event | None = None) -> None:
        super().__init__()
        self._future = future
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the end.

        Args:
            timeout: if it is above zero, the CPU waits too, at most this long.

        Raises:
            RuntimeError: the timeout has passed, and the collective goes on.
        """
        self._future.wait()
        limit = _seconds(timeout)
        if limit is not None:
            deadline = time.monotonic() + limit
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise SMPOperationError(_late(limit), code="SMP316")
                # CUDA's wait for an event has no timeout.
                time.sleep(_LOOK)
        return True

    def is_completed(self) -> bool:
        """Return whether the stream has finished it."""
        if not self._future.done():
            return False
        return self._event is None or self._event.query()

    def exception(self) -> Any:
        """Return None: a failure on the stream shows where its results are read."""
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the CUDA future that it was made with."""
        return self._future


def _seconds(timeout: timedelta | None) -> float | None:
    """Return the limit in seconds; None if the caller set none, in one of PyTorch's ways."""
    if timeout is None or timeout <= timedelta(0):
        return None
    return timeout.total_seconds()


def _late(limit: float | None) -> str:
    return (
        f"Operation timed out! The all-gather has not ended {limit} seconds after wait() was called with that timeout; "
        "another rank may be late: wait again, or with a longer one"
    )
