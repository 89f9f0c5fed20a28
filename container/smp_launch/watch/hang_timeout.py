"""The time for which a job may stand still before it hangs: some of its own steps, or the user's value."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from smp_config.limits import LEAST_HANG_SECONDS, hang_seconds, timeout_seconds

#: Default timeout, in steps.
_STEPS = 10.0

#: The step with which a job is in its stride.
_IN_STRIDE = 3

#: Number of newest steps that count.
_REMEMBERED = 101


class HangTimeout:
    """Learns how long a job's steps take, and sets how long nothing may happen.

    Args:
        given: the user's number of seconds, which is used unchanged; None to derive it from the steps.
        most: seconds at most: the timeout of every wait.
    """

    def __init__(self, given: float | None = None, most: float = float("inf")) -> None:
        self._given = given
        self._most = most
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._at: tuple[int, float] | None = None
        self._furthest = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HangTimeout:
        """Return the timeout that a job's variables set.

        Raises:
            ConfigError: a value is no number.
        """
        return cls(hang_seconds(environ), timeout_seconds(environ))

    @property
    def watches(self) -> bool:
        """Return whether there is anything to watch for."""
        return self._given != 0

    def saw(self, step: int, when: float) -> None:
        """Record that the job is in step number ``step`` at time ``when``."""
        self._furthest = max(self._furthest, step)
        if self._at is None or step < self._at[0]:
            self._at = step, when
        elif step > self._at[0]:
            steps, seconds = step - self._at[0], when - self._at[1]
            # The first one builds and compiles.
            if self._at[0] > 1:
                self._steps.extend([seconds / steps] * min(steps, _REMEMBERED))
            self._at = step, when

    @property
    def has_stepped(self) -> bool:
        """Return whether the job is past its first steps, which build and compile."""
        return self._furthest >= _IN_STRIDE

    @property
    def seconds(self) -> float:
        """Return after how many seconds without progress a rank that is stuck hangs the job."""
        if self._given is not None:
            return self._given
        median = statistics.median(self._steps) if self._steps else 0.0
        return min(max(LEAST_HANG_SECONDS, _STEPS * median), self._most)

    @property
    def is_given(self) -> bool:
        """Return whether the user has set the timeout."""
        return self._given is not None

    @property
    def longer(self) -> float:
        """Return the timeout for a rank that may only be slow.

        It computes or moves data, or the job is still in its first steps.
        """
        if self._given is None:
            return self._most
        return self._given if self.has_stepped else max(self._given, LEAST_HANG_SECONDS)
