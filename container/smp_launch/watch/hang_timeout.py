"""How long a job may stand still before it hangs: some of its own steps, or what its user has set."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from smp_config.limits import LEAST_HANG_SECONDS, hang_seconds, timeout_seconds

#: Where the user has set nothing: steps.
_STEPS = 10.0

#: The step with which a job is in its stride.
_IN_STRIDE = 3

#: Steps whose durations count.
_REMEMBERED = 101


class HangTimeout:
    """Learns how long a job's steps take, and says how long nothing may happen.

    Args:
        given: what the user has set, which holds as it is; None to go by the steps.
        most: seconds at most: the time-out of every wait.
    """

    def __init__(self, given: float | None = None, most: float = float("inf")) -> None:
        self._given = given
        self._most = most
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._at: tuple[int, float] | None = None
        self._furthest = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HangTimeout:
        """As a job's variables have it; ConfigError for values that are no numbers."""
        return cls(hang_seconds(environ), timeout_seconds(environ))

    @property
    def watches(self) -> bool:
        """Whether there is anything to watch for."""
        return self._given != 0

    def saw(self, step: int, when: float) -> None:
        r"""The job is in its ``step``\\ -th step at ``when``."""
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
        """Whether the job is in its stride: its first steps build and compile."""
        return self._furthest >= _IN_STRIDE

    @property
    def seconds(self) -> float:
        """Without any progress, after which a rank that cannot go on by itself hangs the job."""
        if self._given is not None:
            return self._given
        median = statistics.median(self._steps) if self._steps else 0.0
        return min(max(LEAST_HANG_SECONDS, _STEPS * median), self._most)

    @property
    def is_given(self) -> bool:
        """Whether the user has set it."""
        return self._given is not None

    @property
    def longer(self) -> float:
        """The same where it may only be slow: it computes or moves data, or the job is not in its stride."""
        if self._given is None:
            return self._most
        return self._given if self.has_stepped else max(self._given, LEAST_HANG_SECONDS)
