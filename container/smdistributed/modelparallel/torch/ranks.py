"""``smp.rank()`` and friends: this process's position, asked of the one session."""

from __future__ import annotations

import torch.distributed as dist

from smp_config import Group
from smp_runtime.job.session import current


def rank() -> int:
    """Global rank of this process."""
    return current().ranks.rank


def size() -> int:
    """Processes over all hosts."""
    return current().ranks.size(Group.WORLD)


def local_rank() -> int:
    """Rank among the processes of this host."""
    return current().ranks.local_rank


def local_size() -> int:
    """Processes on this host."""
    return current().ranks.local_size


def tp_rank() -> int:
    """Rank in the tensor parallel group."""
    return current().ranks.rank_in(Group.TP)


def tp_size() -> int:
    """Ranks that share each distributed layer."""
    return current().ranks.size(Group.TP)


def pp_rank() -> int:
    """Rank in the pipeline parallel group: the stage."""
    return current().ranks.rank_in(Group.PP)


def pp_size() -> int:
    """Stages of one replica."""
    return current().ranks.size(Group.PP)


def rdp_rank() -> int:
    """Rank in the reduced data parallel group."""
    return current().ranks.rank_in(Group.RDP)


def rdp_size() -> int:
    """Ranks with the same pipeline and tensor coordinates."""
    return current().ranks.size(Group.RDP)


def mp_rank() -> int:
    """Rank in the model parallel group."""
    return current().ranks.rank_in(Group.MP)


def mp_size() -> int:
    """Ranks that hold one replica."""
    return current().ranks.size(Group.MP)


def dp_rank() -> int:
    """Rank in the data parallel group."""
    return current().ranks.rank_in(Group.DP)


def dp_size() -> int:
    """Ranks of one stage."""
    return current().ranks.size(Group.DP)


def get_mp_group() -> list[int]:
    """Global ranks of the model parallel group."""
    return current().ranks.members(Group.MP)


def get_dp_group() -> list[int]:
    """Global ranks of the data parallel group."""
    return current().ranks.members(Group.DP)


def get_tp_group() -> list[int]:
    """Global ranks of the tensor parallel group."""
    return current().ranks.members(Group.TP)


def get_pp_group() -> list[int]:
    """Global ranks of the pipeline parallel group."""
    return current().ranks.members(Group.PP)


def get_rdp_group() -> list[int]:
    """Global ranks of the reduced data parallel group."""
    return current().ranks.members(Group.RDP)


def get_world_process_group() -> dist.ProcessGroup:
    """All processes, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.WORLD)


def get_mp_process_group() -> dist.ProcessGroup:
    """The model parallel group, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.MP)


def get_dp_process_group() -> dist.ProcessGroup:
    """The data parallel group, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.DP)


def get_tp_process_group() -> dist.ProcessGroup:
    """The tensor parallel group, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.TP)


def get_pp_process_group() -> dist.ProcessGroup:
    """The pipeline parallel group, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.PP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """The reduced data parallel group, for ``torch.distributed``."""
    return current().ranks.groups.group(Group.RDP)
