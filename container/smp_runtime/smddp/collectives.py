"""The collectives seam over SMDDP: its all-gather where that goes in phases, and the plain one everywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_config.smddp import BACKEND
from smp_runtime.comm.collectives import Collectives, TorchCollectives, Work
from smp_runtime.smddp.process_group import SmddpProcessGroup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class SmddpCollectives(TorchCollectives):
    """What the strategies call in a job whose backend is ``smddp``."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Work:
        """In phases where that is possible and has a use."""
        phases = isinstance(group, SmddpProcessGroup) and group.tries_phases(shard.nbytes, full.device.type)
        return group.all_gather_single(full, shard) if phases else super().all_gather(full, shard, group)


def collectives_of(backend: str) -> Collectives:
    """The implementation for groups of a backend."""
    return SmddpCollectives() if backend == BACKEND else TorchCollectives()
