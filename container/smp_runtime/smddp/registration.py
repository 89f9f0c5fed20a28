"""Registration of the backend ``smddp`` with ``torch.distributed``."""

from __future__ import annotations

import atexit
import functools
import time
from typing import TYPE_CHECKING, Any

from smp_config.smddp import BACKEND

if TYPE_CHECKING:
    from smp_runtime.smddp.process_group import SmddpProcessGroup


def register() -> None:
    """Make ``init_process_group("smddp")`` and ``new_group(backend="smddp")`` work; a second call changes nothing.

    This is also the entry point that PyTorch calls while it is imported, in jobs of the data parallel library.
    So nothing heavy is imported before a group is made, and PyTorch only here: a script may import the backend
    before PyTorch.
    """
    import torch.distributed as dist

    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


#: Seconds at the end of a process for gloo's threads.
_LETTING_GO_SECONDS = 0.05


@functools.cache
def _wait_at_exit() -> None:
    """Register a short sleep at exit, in which gloo's threads release the tensors of the last collectives.

    They take Python's lock for it. A thread that asks for the lock after the interpreter has ended aborts the
    process.
    """
    atexit.register(time.sleep, _LETTING_GO_SECONDS)


def _create(options: Any, backend_options: Any) -> SmddpProcessGroup:
    from smp_runtime.smddp.process_group import SmddpProcessGroup

    _wait_at_exit()
    return SmddpProcessGroup.create(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id), backend_options
    )
