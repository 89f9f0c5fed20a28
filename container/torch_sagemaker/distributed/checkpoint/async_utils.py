"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.async_utils``."""

from smp_version2.checkpoint.async_utils import DEFAULT_ASYNC_REQUEST_QUEUE, AsyncCallsQueue

__all__ = [
    "DEFAULT_ASYNC_REQUEST_QUEUE",
    "AsyncCallsQueue",
]
