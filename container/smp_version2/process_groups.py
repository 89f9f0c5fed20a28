"""Ranks of process groups."""

from __future__ import annotations

import torch.distributed as dist


def get_global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a process group, in its order; None stands for all ranks."""
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
