"""Optimizer state sharding (ZeRO 2): gradients are reduced to their owner, which updates and hands out the parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from smp_config import Group
from smp_config.limits import effective_bucket_bytes
from smp_runtime.comm.buckets import Bucket, Reducing, Travel, make_buckets
from smp_runtime.microbatch_state.compiled_blocks import is_compiled
from smp_runtime.parameters.pending_gather import PendingGathers, wait_before_calls
from smp_runtime.sharding.flat_shards import FlatShards
from smp_runtime.sharding.flat_unit import WholeUnit
from smp_runtime.tensors.parameter_attributes import get_data

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.precision import Precision


class _SummedFurther:
    """A bucket that is summed over one group, and after its arrival over another, in the same order on all ranks."""

    def __init__(self, first: Travel, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self._first = first
        self._collectives = collectives
        self._group = group

    def finish(self) -> torch.Tensor:
        """Wait; returns the flat result."""
        result = self._first.finish()
        self._collectives.all_reduce(result, self._group).wait()
        return result


class ShardedState(FlatShards[WholeUnit]):
    """Optimizer state and master weights sharded over replicas; parameters stay whole on every rank.

    It is the transport of the gradient reducer. Buckets are reduce-scattered, so this rank gets the averaged gradients of
    its own shard only. After the update, the shards of parameters are gathered again, while the script continues.

    Args:
        sharing: the kind of the group of replicas.
        parameters: those with ``requires_grad``, in the same order on every rank.
        precision: the precision in which gradients are summed, and whether float32 copies are updated.
        masters: values of these float32 copies, by parameter.
        most_bytes: largest unit, except for a single larger parameter.
        own_batch: parameters with gradients of this rank's own batch while its tensor parallel group has others: they
            are summed over that group too. Their sizes and their order are the same on all ranks of that group.

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
        masters: Mapping[nn.Parameter, torch.Tensor],
        most_bytes: int,
        own_batch: Collection[nn.Parameter] = (),
    ) -> None:
        size, position = ranks.size(sharing), ranks.rank_in(sharing)
        # Backward fills the units roughly in the reverse order, so their gradients can travel while it goes on.
        order = list(reversed(range(len(parameters))))
        own = {id(parameter) for parameter in own_batch}
        self.buckets: list[Bucket] = []
        for kind in (False, True):  # no unit has both
            indices = [index for index in order if (id(parameters[index]) in own) is kind]
            size_in_bytes = sum(parameters[i].numel() * parameters[i].element_size() for i in indices)
            most = effective_bucket_bytes(size_in_bytes, most_bytes)
            self.buckets += make_buckets(parameters, indices, most, reduce_dtype=precision.reduce)
        self.buckets.sort(key=lambda bucket: -bucket.indices[0])
        self._summed_further = [id(parameters[bucket.indices[0]]) in own for bucket in self.buckets]
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
        self._arrives_late = False

    def launch(self, bucket: Bucket, buffer: torch.Tensor, position: int, is_last: bool) -> Travel:
        """Reduce-scatter one unit's gradients."""
        unit = self.units[position]
        buffer[unit.filled : unit.data.numel()].zero_()
        shard = torch.empty(unit.shard_elements, dtype=buffer.dtype, device=buffer.device)
        inside = Reducing(self._ranks.collectives.reduce_scatter(shard, buffer, self._group), shard)
        if not self._summed_further[position]:
            return inside
        return _SummedFurther(inside, self._ranks.collectives, self._ranks.process_group(Group.TP))

    def deliver(self, position: int, result: torch.Tensor, used: Sequence[bool]) -> None:
        """Keep the gradients of this rank's shard until the update."""
        former = self._shard_gradients[position]
        # Several reductions before one update add up, as gradients do.
        reduced = self._shard_gradients[position] = result if former is None else former.add_(result)
        self._hand_out(self.units[position], reduced, [used[index] for index in self.buckets[position].indices])

    def deliver_whole(self, position: int, average: torch.Tensor, used: Sequence[bool]) -> None:
        """Keep this rank's shard of averaged gradients that every rank has whole."""
        self.deliver(position, self.units[position].part_of(average).clone(), used)

    def clear_gradients(self, *, to_zero: bool = False) -> None:
        """Forget the delivered gradients; see :meth:`.FlatShards.clear_gradients`."""
        super().clear_gradients(to_zero=to_zero)
        self._shard_gradients = [None] * len(self.units)

    def _zeros_of(self, unit: WholeUnit) -> torch.Tensor:
        position = self.units.index(unit)
        dtype = self.buckets[position].dtype
        zeros = self._shard_gradients[position] = torch.zeros(unit.shard_elements, dtype=dtype, device=unit.device)
        return zeros

    def follow_calls(self, module: nn.Module) -> None:
        """Let the others' shards arrive while ``module``, the owner of these parameters, is running.

        Each part waits for its own parameters. Code compiled by TorchScript reads its parameters without any hook, so
        nothing changes for a module that contains such code.
        """
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            return
        self._arrives_late = True
        ours = set(self._where)
        wait_before_calls(module, ours, is_compiled)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Start to gather all parameters after an update; the first read of a parameter waits for its values."""
        arrivals = self._ranks.keep(PendingGathers, PendingGathers)
        for unit in reversed(self.units):  # what forward needs first goes first
            # With a version counter of its own: a transport's write must not look like one of the script to the shards.
            work = self._ranks.collectives.all_gather(get_data(unit.data), unit.shard, self._group)
            arrivals.expect(work, unit.parameters, unit.data)
        if not self._arrives_late:
            arrivals.settle()
