"""``smp.init`` and its counterparts, with all that waits for a job to begin."""

from smp_runtime.job.session import init, is_initialized, is_tracing, shutdown
from smp_runtime.preemption import automatic as _automatic  # noqa: F401
from smp_runtime.reshape import requests as _requests  # noqa: F401
from smp_tools.numerics import start as _numerics  # noqa: F401
from smp_tools.tracking import start as _tracking  # noqa: F401

__all__ = ["init", "is_initialized", "is_tracing", "shutdown"]
