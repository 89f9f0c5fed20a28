"""``smp.init`` and its counterparts, with all that waits for a job to begin or a model to be wrapped."""

from smp_runtime.checkpoint import adapters as _adapters  # noqa: F401
from smp_runtime.checkpoint import export as _export  # noqa: F401
from smp_runtime.generation import generate as _generate  # noqa: F401
from smp_runtime.job.session import init, is_initialized, is_tracing, shutdown
from smp_runtime.numerics import start as _numerics  # noqa: F401
from smp_runtime.preemption import automatic as _automatic  # noqa: F401
from smp_runtime.reshape import requests as _requests  # noqa: F401
from smp_runtime.tracking import start as _tracking  # noqa: F401

__all__ = ["init", "is_initialized", "is_tracing", "shutdown"]
