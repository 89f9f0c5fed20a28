"""Optimizer state sharding (ZeRO 2): gradients are reduced to their owner, which updates and hands out the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_runtime.comm.buckets import Bucket, Reducing, Travel, make_buckets
from smp_runtime.sharding.flat_shards import FlatShards
from smp_runtime.sharding.flat_unit import WholeUnit

if TYPE_CHECKING:
    from smp_config import Group
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.precision import Precision


class ShardedState(FlatShards[WholeUnit]):
    """Shares out optimizer state and master weights over replicas; parameters stay whole on every rank.

    Is the transport of the gradient reducer: buckets are reduce-scattered, so this rank gets the averaged gradients
    of its own shard only. After the update, the shards of parameters are gathered again.

    Args:
        sharing: the kind of the group of replicas.
        parameters: those with ``requires_grad``, in the same order on every rank.
        precision: in which gradients are summed, and whether float32 copies are updated.
        masters: values of these float32 copies, by parameter.

    Attributes:
        buckets: the division of the gradients, the same as that of the units.
    """

    carries_tail = False
    divides = True
    lands_in_gradients = False

    def __init__(
        self,
        ranks: Ranks,
        sharing: Group,
        parameters: Sequence[nn.Parameter],
        precision: Precision,
        *,
        masters: Mapping[nn.Parameter, torch.Tensor],
        unit_bytes: int,
    ) -> None:
        size, position = ranks.size(sharing), ranks.rank_in(sharing)
        # Backward fills the units roughly in the reverse order, so their gradients can travel while it goes on.
        order = list(reversed(range(len(parameters))))
        self.buckets: list[Bucket] = make_buckets(parameters, order, unit_bytes, reduce_dtype=precision.reduce)
        units = [WholeUnit([parameters[index] for index in b.indices], size, position) for b in self.buckets]
        super().__init__(ranks, sharing, parameters, units, precision, range(size))
        for bucket, unit in zip(self.buckets, units, strict=True):
            # Gradients travel in buffers of the same layout, so that shards of both match.
            bucket.elements = unit.data.numel()
            self._share_out(unit)
        for parameter, shard in self.optimizer_shards.items():
            if shard is not None and parameter in masters:
                shard.take(masters[parameter])
        self._shard_gradients: list[torch.Tensor | None] = [None] * len(units)

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Reduce-scatter one unit's gradients."""
        unit = self.units[position]
        buffer[unit.filled : unit.data.numel()].zero_()
        shard = torch.empty(unit.shard_elements, dtype=buffer.dtype, device=buffer.device)
        return Reducing(self._ranks.collectives.reduce_scatter(shard, buffer, self._group), shard)

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Keep the gradients of this rank's shard until the update."""
        former = self._shard_gradients[position]
        # Several reductions before one update add up, as gradients do.
        reduced = self._shard_gradients[position] = result if former is None else former.add_(result)
        self._hand_out(self.units[position], reduced, [used[index] for index in self.buckets[position].indices])

    def deliver_whole(self, position: int, average: torch.Tensor, used: Sequence[bool]) -> None:
        """Keep this rank's shard of averaged gradients that every rank has whole."""
        self.deliver(position, self.units[position].part_of(average).clone(), used)

    def clear_gradients(self) -> None:
        """Forget what was delivered."""
        super().clear_gradients()
        self._shard_gradients = [None] * len(self.units)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """After an update, hand out this rank's shards and take the others'."""
        works = [self._ranks.collectives.all_gather(unit.data, unit.shard, self._group) for unit in self.units]
        for work in works:
            work.wait()
