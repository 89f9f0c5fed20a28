"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.state_dict_saver``."""

from smp_version2.checkpoint.state_dict_saver import (
    DEFAULT_ASYNC_REQUEST_QUEUE,
    AsyncCallsQueue,
    PyTorchDistSaveShardedStrategy,
    async_save,
    maybe_finalize_async_calls,
    save,
)

__all__ = [
    "DEFAULT_ASYNC_REQUEST_QUEUE",
    "AsyncCallsQueue",
    "PyTorchDistSaveShardedStrategy",
    "async_save",
    "maybe_finalize_async_calls",
    "save",
]
