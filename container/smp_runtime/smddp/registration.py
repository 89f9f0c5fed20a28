"""How ``torch.distributed`` comes to know the backend ``smddp``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from smp_config.smddp import BACKEND

if TYPE_CHECKING:
    from smp_runtime.smddp.process_group import SmddpProcessGroup


def register() -> None:
    """Make ``init_process_group("smddp")`` and ``new_group(backend="smddp")`` work; a second call changes nothing.

    Also the entry point that PyTorch calls by itself in jobs of the data parallel library, so nothing heavy is
    imported before a group is made.
    """
    if dist.is_available() and BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> SmddpProcessGroup:
    from smp_runtime.smddp.process_group import SmddpProcessGroup

    return SmddpProcessGroup.create(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id), backend_options
    )
