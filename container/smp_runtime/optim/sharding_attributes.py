"""What scripts read off an optimizer under sharded data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


class ShardingAttributes:
    """Attributes of an optimizer under sharded data parallelism; without it they do not exist."""

    _ranks: Ranks
    _model: Any
    _originals: list[list[nn.Parameter]]
    _optimizer_shards: list[OptimizerShard]

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The model's trained parameters, by parameter group."""
        self._require_shards("fp16_groups")
        return [list(parameters) for parameters in self._originals]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """By parameter group, a flat copy of what this rank updates of it, in float32."""
        self._require_shards("fp32_partitioned_groups_flat")
        optimizer_shards = {shard.parameter: shard.optimized.detach() for shard in self._optimizer_shards}
        parts = [
            [optimizer_shards[p].reshape(-1).float() for p in group if p in optimizer_shards]
            for group in self._originals
        ]
        return [torch.cat(found) if found else torch.empty(0, device=self._ranks.device) for found in parts]

    @property
    def ds_param_shard_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that share one copy of the parameters."""
        self._require_shards("ds_param_shard_group")
        return self._ranks.groups.group(Group.SHARD)

    def _require_shards(self, name: str) -> None:
        if self._model is None or self._model.shards is None:
            raise AttributeError(f"{name} exists under sharded data parallelism only")
