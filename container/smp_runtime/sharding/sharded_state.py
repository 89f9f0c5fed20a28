"""Optimizer state sharding: gradients are reduced to their owner, which updates and hands out the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smp_config import Group
from smp_runtime.comm.bucket_transport import Travel
from smp_runtime.comm.buckets import Bucket
from smp_runtime.comm.collectives import Collectives, Work
from smp_runtime.comm.control import ControlPlane
from smp_runtime.parameters.optimizer_shards import NUMBER_ATTRIBUTE, OptimizerShard
from smp_runtime.sharding.flat_unit import FlatUnit, Fragment, make_units


class _Scattered:
    def __init__(self, work: Work, shard: torch.Tensor) -> None:
        self._work = work
        self._shard = shard

    def land(self) -> torch.Tensor:
        self._work.wait()
        return self._shard


class ShardedState:
    """Shares out optimizer state and master weights over ``ranks``; parameters stay whole on every rank.

    Is the transport of the gradient reducer: buckets are reduce-scattered, so this rank gets the averaged gradients
    of its own shard only. After the update, the shards of parameters are gathered again.

    Args:
        parameters: those with ``requires_grad``, in the same order on every rank.
        group: the ranks that hold replicas of these parameters.
        ranks: their global numbers, ascending.
        rank: this rank's position among them.
        collectives: for tensors.
        control: for small objects when the full state is gathered.
        unit_bytes: size of a flat unit.
        masters: float32 weights by parameter, for half precision training.
        reduce_dtype: in which gradients are summed; None means in their own type.
        sharing: the kind of the group.
    """

    carries_tail = False
    divides = True
    lands_in_gradients = False

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        rank: int,
        collectives: Collectives,
        control: ControlPlane,
        *,
        unit_bytes: int,
        masters: Mapping[nn.Parameter, torch.Tensor],
        reduce_dtype: torch.dtype | None = None,
        sharing: Group = Group.DP,
    ) -> None:
        self.sharing = sharing
        self._group = group
        self._ranks = list(ranks)
        self._rank = rank
        self._collectives = collectives
        self._control = control
        self.units = make_units(
            parameters, unit_bytes=unit_bytes, shards=len(ranks), rank=rank, reduce_dtype=reduce_dtype
        )
        self._shard_gradients: list[torch.Tensor | None] = [None] * len(self.units)
        self._used: list[bool] = [False] * len(parameters)
        self.optimizer_shards: dict[nn.Parameter, OptimizerShard | None] = dict.fromkeys(parameters)
        self._where: dict[nn.Parameter, tuple[int, int]] = {}
        for position, unit in enumerate(self.units):
            for index, parameter in enumerate(unit.parameters):
                self._where[parameter] = (position, index)
            for fragment in unit.fragments(rank):
                shard = self._optimizer_shard(position, unit, fragment, masters)
                self.optimizer_shards[shard.parameter] = shard

    @property
    def buckets(self) -> list[Bucket]:
        """The division of the gradients, the same as that of the units."""
        return [unit.bucket for unit in self.units]

    # -- transport of gradients ------------------------------------------------------------------------------------

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Reduce-scatter one unit's gradients."""
        unit = self.units[position]
        buffer[unit.filled : unit.data.numel()].zero_()
        shard = torch.empty(unit.shard_elements, dtype=buffer.dtype, device=buffer.device)
        return _Scattered(self._collectives.reduce_scatter(shard, buffer, self._group), shard)

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Keep the gradients of this rank's shard until the update."""
        former = self._shard_gradients[position]
        # Several reductions before one update add up, as gradients do.
        self._shard_gradients[position] = result if former is None else former.add_(result)
        for index in self.units[position].bucket.indices:
            self._used[index] = self._used[index] or used[index]

    def clear_gradients(self) -> None:
        """Forget what was delivered."""
        self._shard_gradients = [None] * len(self.units)
        self._used = [False] * len(self._used)

    def _optimizer_shard(
        self, position: int, unit: FlatUnit, fragment: Fragment, masters: Mapping[nn.Parameter, torch.Tensor]
    ) -> OptimizerShard:
        parameter = unit.parameters[fragment.index]
        length = fragment.stop - fragment.start
        whole = length == parameter.numel()
        shape = parameter.shape if whole else torch.Size([length])
        global_index = unit.bucket.indices[fragment.index]
        stored = unit.shard[fragment.offset : fragment.offset + length].view(shape)
        if parameter in masters:
            optimized = nn.Parameter(masters[parameter].reshape(-1)[fragment.start : fragment.stop].clone().view(shape))
        else:
            optimized = nn.Parameter(stored)

        setattr(optimized, NUMBER_ATTRIBUTE, global_index)

        def gradient() -> torch.Tensor | None:
            shard = self._shard_gradients[position]
            if shard is None or not self._used[global_index]:
                return None
            return shard[fragment.offset : fragment.offset + length].view(shape)

        return OptimizerShard(parameter, fragment.start, fragment.stop, optimized, stored, gradient)

    # -- the update ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Hand out this rank's updated shards and take the others'."""
        works = [self._collectives.all_gather(unit.data, unit.shard, self._group) for unit in self.units]
        for work in works:
            work.wait()

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum a vector over all ranks of the group, in place; for norms of parameters that lie on several ranks."""
        self._collectives.all_reduce(vector, self._group).wait()
        return vector

    # -- the full state --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Whole tensors from optimizer shards; every rank of the group calls it.

        Args:
            values: by parameter, a tensor of the shape of this rank's shard; parameters without one are left out.
            keep: False on a rank that only takes part; it gets nothing.

        Returns:
            By parameter, the tensor of the parameter's shape on the CPU, for every parameter that any rank has a value for.
        """
        mine = {self._where[parameter] for parameter in values}
        known = set().union(*self._control.allgather(mine, self._ranks))
        whole: dict[nn.Parameter, torch.Tensor] = {}
        for position, unit in enumerate(self.units):
            wanted = [index for index in range(len(unit.parameters)) if (position, index) in known]
            if not wanted:
                continue
            sample = next((v for p, v in values.items() if self._where[p][0] == position), None)
            dtype = next(
                d for d in self._control.allgather(sample.dtype if sample is not None else None, self._ranks) if d
            )
            flat = torch.zeros(unit.data.numel(), dtype=dtype, device=unit.data.device)
            shard = unit.shard_of(flat, self._rank)
            for fragment in unit.fragments(self._rank):
                parameter = unit.parameters[fragment.index]
                if parameter in values:
                    part = shard[fragment.offset : fragment.offset + fragment.stop - fragment.start]
                    part.copy_(values[parameter].reshape(-1))
            self._collectives.all_gather(flat, shard.clone(), self._group).wait()
            for index in wanted if keep else ():
                parameter, offset = unit.parameters[index], unit.bucket.offsets[index]
                part = flat[offset : offset + parameter.numel()].view(parameter.shape)
                whole[parameter] = part.to("cpu", copy=True)
        return whole

    def gather_names(self, names: set[str]) -> list[set[str]]:
        """Every rank's names; every rank of the group calls it."""
        return self._control.allgather(names, self._ranks)

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """One object per parameter, from whichever rank has one; every rank of the group calls it."""
        # On the CPU: a device number means another device on another rank.
        by_place = {
            self._where[parameter]: value.cpu() if isinstance(value, torch.Tensor) else value
            for parameter, value in values.items()
        }
        merged: dict[tuple[int, int], Any] = {}
        for theirs in self._control.allgather(by_place, self._ranks):
            for place, value in theirs.items():
                merged.setdefault(place, value)
        return {parameter: merged[place] for parameter, place in self._where.items() if place in merged}
