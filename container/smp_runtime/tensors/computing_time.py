"""The clock by which computation is measured: recorded segments of a pipeline, module times of a trace, timelines.

Waits and deadlines go by the system's clocks; they are real wherever the computation is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: The last clock is read. A rehearsal, which computes nothing, adds a clock of its own here.
clocks: list[Callable[[], float]] = [time.perf_counter]


def now() -> float:
    """Return the time in seconds since an arbitrary moment."""
    return clocks[-1]()
