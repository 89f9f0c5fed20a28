"""What the recipe has made of a model's part on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.model.local_part import LocalPart
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.sharding.sharded_parameters import ShardedParameters
    from smp_runtime.sharding.sharded_state import ShardedState


@dataclass
class Placed:
    """What the recipe has made of this rank's part; nothing before the model is partitioned.

    Attributes:
        optimizer_shards: what the optimizer updates instead of the parameters; None when it updates the parameters.
        sharded_state: how optimizer state is shared out over the replicas, or None.
        shards: the same with parameters and gradients too, under sharded data parallelism.
        frozen: parameters that are not trained, and that nothing averages.
        is_away: whether ``model.cpu()`` has moved the weights from the device that trains.
    """

    optimizer_shards: dict[nn.Parameter, OptimizerShard | None] | None = None
    sharded_state: ShardedState | ShardedParameters | None = None
    shards: ShardedParameters | None = None
    frozen: list[nn.Parameter] = field(default_factory=list)
    is_away: bool = False

    def refresh(self) -> None:
        """Master weights follow what was written into the model."""
        for shard in (self.optimizer_shards or {}).values():
            if shard is not None:
                shard.refresh()

    def updated(self, part: LocalPart) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer of this rank updates, under the parameters' names; with sharded state the parts it owns."""
        for record in part.registry:
            if not part.has_tensor(record.name):
                continue
            if self.optimizer_shards is None or record.parameter not in self.optimizer_shards:
                yield record.name, record.parameter
            elif (shard := self.optimizer_shards[record.parameter]) is not None:
                yield record.name, shard.optimized
