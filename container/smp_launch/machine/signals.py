"""Requests to stop a job, as events to select on: SIGTERM, SIGINT, SIGHUP, and the parent's death."""

from __future__ import annotations

import os
import signal
from types import TracebackType

from smp_launch.machine.processes import kill_descendants

#: With value 1, standard input is a pipe that ends when the parent dies.
LIFELINE_VARIABLE = "SMP_LAUNCH_LIFELINE"

#: Signals that ask the job to stop.
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequests:
    """Collects signals while used as a context manager, from the main thread.

    ``fileno()`` becomes readable when a signal came, also SIGCHLD, so that one ``select`` sees everything that
    can happen to a job.

    Args:
        lifeline: whether standard input is a pipe that ends when the parent dies.
        patience: seconds after the first signal until everything below this process is killed and it exits, whatever
            it is doing. If a reader of its output hangs, it may block this process, and nothing else would end the job.
    """

    def __init__(self, lifeline: bool = False, patience: float | None = None) -> None:
        self.lifeline = 0 if lifeline else None
        self._patience = patience
        self._read, self._write = os.pipe()
        # The system's handler writes here inside whatever runs: a full pipe must not block that.
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for number in (*_STOPPING, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup: the job lives on when its terminal is closed
            self._before[number] = signal.signal(number, self._noted)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _give_up)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Before the pipe is closed: a signal would be written into the next file with this number.
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return a descriptor for selectors. It is readable when a signal came."""
        return self._read

    def read(self) -> list[str]:
        """Return the names of the stop signals that came since the last call."""
        try:
            data = os.read(self._read, 4096)
        except BlockingIOError:
            return []  # none has come
        return [signal.Signals(number).name for number in data if number in _STOPPING]

    def job_has_ended(self) -> None:
        """Ignore all later requests to stop, so that they do not change how this process ends.

        This holds even while the interpreter shuts down.
        """
        for number in _STOPPING:
            self._before[number] = signal.SIG_IGN

    def lifeline_ended(self) -> bool:
        """Return whether the parent is gone. Call it when the lifeline is readable."""
        if self.lifeline is None:
            return False
        try:
            return not os.read(self.lifeline, 4096)
        except OSError:
            return True

    def _noted(self, number: int, frame: object) -> None:
        """Start the timer at the first signal. The wake-up pipe carries the signal."""
        if number in _STOPPING and self._patience is not None:
            signal.setitimer(signal.ITIMER_REAL, self._patience)
            self._patience = None


def _give_up(number: int, frame: object) -> None:
    kill_descendants()
    # Not sys.exit(), which would write to the reader that hangs.
    os._exit(128 + signal.SIGKILL)
