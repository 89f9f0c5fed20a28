"""State that the ranks of a group share out among them: of each flat unit, every rank has a shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smp_runtime.parameters.optimizer_shards import OptimizerShard
from smp_runtime.parameters.pending_gather import PendingGathers
from smp_runtime.sharding.flat_unit import FlatUnit
from smp_runtime.sharding.script_gradients import ScriptGradients
from smp_runtime.tensors.parameter_attributes import get_gradient

if TYPE_CHECKING:
    from smp_config import Group
    from smp_runtime.comm.collectives import Collectives
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.precision import Precision

Unit = TypeVar("Unit", bound=FlatUnit)


class FlatShards(Generic[Unit]):
    """Flat units, the parts that this rank's optimizer updates, and ways to gather whole tensors from all ranks' parts.

    The base of two policies: :class:`ShardedState` shards the optimizer's state, :class:`ShardedParameters` the
    parameters and gradients too.

    Args:
        sharing: the kind of the group that shares the units.
        parameters: of this rank, in the same order on every rank; those in no unit are whole everywhere.
        units: disjoint.
        precision: in half precision, the updated tensors are float32 copies.
        shard_of: by position in the group, the number of that rank's shard.

    Attributes:
        optimizer_shards: the updated part of each trained parameter; None if other ranks have all of it.
    """

    def __init__(
        self,
        ranks: Ranks,
        sharing: Group,
        parameters: Iterable[nn.Parameter],
        units: Sequence[Unit],
        precision: Precision,
        shard_of: Sequence[int],
    ) -> None:
        self.sharing = sharing
        self.units = list(units)
        self._ranks = ranks
        self._precision = precision
        self._group = ranks.process_group(sharing)
        self._members = ranks.members(sharing)
        # An all-gather returns the parts in the order of the ranks, not of the shards.
        order = sorted(range(len(shard_of)), key=shard_of.__getitem__)
        self._order = None if order == sorted(order) else order
        self._shard_of = list(shard_of)
        self._where = {p: (unit, index) for unit in self.units for index, p in enumerate(unit.parameters)}
        # Trained ones first: their numbers are those of the vectors that optimizers sum.
        ordered = sorted(parameters, key=lambda p: not p.requires_grad)
        self._numbers = {p: number for number, p in enumerate(ordered)}
        trained = (p for p in ordered if p in self._where and p.requires_grad)
        self.optimizer_shards: dict[nn.Parameter, OptimizerShard | None] = dict.fromkeys(trained)
        self.script_gradients = ScriptGradients(self, ranks)

    def _share_out(self, unit: Unit) -> None:
        """Make this rank update its part of a unit; the values of float32 copies follow later."""
        for parameter, fragment in zip(unit.parameters, unit.fragments, strict=True):
            if fragment is None or not unit.trained:
                continue
            stored = unit.slice_of(unit.shard, fragment)
            has_master = stored.dtype is self._precision.compute  # others, such as those of batch norms, were not cast
            self.optimizer_shards[parameter] = OptimizerShard(
                parameter,
                fragment.start,
                fragment.stop,
                nn.Parameter(torch.zeros_like(stored, dtype=torch.float32) if has_master else stored),
                stored,
                number=self._numbers[parameter],
                is_fragment=True,
            )

    @property
    def places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Return start and stop of this rank's part of every sharded parameter; equal if it has none."""
        found = {}
        for parameter, (unit, index) in self._where.items():
            fragment = unit.fragments[index]
            found[parameter] = (fragment.start, fragment.stop) if fragment else (0, 0)
        return found

    def settle(self) -> None:
        """Wait for transfers under way to this rank, before shards change that others may still be reading."""
        arrivals = self._ranks.kept(PendingGathers)
        if arrivals is not None:
            arrivals.settle()

    def _parameters_to_update(self) -> list[nn.Parameter]:
        """Return the sharded parameters with gradients on this rank for an optimizer that updates now."""
        found = []
        for parameter in self._where:
            shard = self.optimizer_shards.get(parameter)
            if shard and get_gradient(shard.optimized) is not None:
                found.append(parameter)
        return found

    # -- gradients -------------------------------------------------------------------------------------------------

    def _hand_out(self, unit: Unit, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Store reduced gradients where the optimizer reads them.

        Args:
            reduced: those of this rank's shard, ``[shard_elements]``.
            used: for each parameter of the unit, whether any rank used it; others have a gradient only if it is zero.
        """
        used = self.script_gradients.deliver(unit, reduced, used)
        for parameter, fragment, is_used in zip(unit.parameters, unit.fragments, used, strict=True):
            shard = self.optimizer_shards[parameter]
            # This rank updates no part of such a parameter.
            if shard is None or fragment is None:
                continue
            if is_used:
                shard.reduced = unit.slice_of(reduced, fragment)

    def take_back_gradients(self) -> None:
        """Apply the script's changes to ``p.grad`` since the reduction."""
        self.script_gradients.take_back()

    def complete_gradients(self) -> None:
        """Complete the gradients before an update: add the script's changes to ``p.grad``.

        Gradients that the script set to zero, and that no pass added to, count as zeros.
        """
        self.script_gradients.take_back()
        self.hand_out_zeros()

    def clear_gradients(self, *, to_zero: bool = False) -> None:
        """Forget the gradients of this rank's shards.

        Args:
            to_zero: they and those that the last update has used up are zero from now on, as after
                ``zero_grad(set_to_none=False)``: an update counts their parameters. No memory is taken for zeros until then.
        """
        if to_zero:
            self.script_gradients.take_back()
        self.script_gradients.forget(to_zero=to_zero)
        for shard in self.optimizer_shards.values():
            if shard is not None:
                shard.reduced = None

    def hand_out_zeros(self) -> None:
        """Create the gradients that the script has set to zero and that no pass has added to."""
        for unit in self.script_gradients.zeroed():
            self.hand_out_zeros_of(unit)

    def hand_out_zeros_of(self, unit: Any) -> None:
        """Create zero gradients of a unit without reduced ones; later gradients are added to them."""
        self._hand_out(unit, self._zeros_of(unit), [False] * len(unit.parameters))

    def _zeros_of(self, unit: Unit) -> torch.Tensor:
        """Return ``[shard_elements]`` zeros, to which later gradients of the unit are added."""
        raise NotImplementedError

    def counts(self, shard: OptimizerShard) -> bool:
        """Return whether this rank adds a shard to sums over the group, so that every element counts once."""
        return shard.parameter in self._where or self._ranks.rank_in(self.sharing) == 0

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum a vector over the group, in place; with one entry per parameter, those that are whole count once."""
        has_entries_of_parameters = vector.numel() == len(self.optimizer_shards)
        is_first = self._ranks.rank_in(self.sharing) == 0
        if has_entries_of_parameters and not is_first:
            # A parameter that is whole on every rank is counted on the first one.
            for parameter, number in self._numbers.items():
                if parameter.requires_grad and parameter not in self._where:
                    vector[number] = 0
        self._ranks.collectives.all_reduce(vector, self._group).wait()
        return vector

    # -- whole tensors ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Gather whole tensors from all ranks' parts; every rank of the group calls it.

        Args:
            values: by parameter, a tensor of the shape of this rank's shard; parameters without one are left out.
            keep: False on a rank that only takes part; it gets nothing.

        Returns:
            By parameter, the tensor of the parameter's shape on the CPU, for every parameter with a value on any rank.
        """
        mine = {self._numbers[p]: v.dtype for p, v in values.items() if p in self._where}
        known: dict[int, torch.dtype] = {}
        for theirs in self._ranks.control.allgather(mine, self._members):
            known.update(theirs)
        whole = {p: v.detach().to("cpu", copy=True) for p, v in values.items() if keep and p not in self._where}
        for unit in self.units:
            wanted = [index for index, p in enumerate(unit.parameters) if self._numbers[p] in known]
            if not wanted:
                continue
            dtype = known[self._numbers[unit.parameters[wanted[0]]]]
            room = self._room([unit], dtype, unit.device)
            views = self._whole_of(unit, values, room, self._ranks.collectives, self._group)
            if keep:
                whole |= {unit.parameters[index]: views[index].to("cpu", copy=True) for index in wanted}
        return whole

    def place_of(self, parameter: nn.Parameter) -> tuple[FlatUnit, int] | None:
        """Return the unit of a parameter, and its number there; None if it is in none."""
        return self._where.get(parameter)

    def runs_of(self, parameter: nn.Parameter) -> list[tuple[int, int]] | None:
        """Return start and stop of each rank's part of a parameter, in the order of the group; None if all have all of it."""
        place = self._where.get(parameter)
        if place is None:
            return None
        unit, index = place
        runs = []
        for number in self._shard_of:
            fragment = unit.fragment_at(index, number)
            runs.append((fragment.start, fragment.stop) if fragment else (0, 0))
        return runs

    def whole_of_unit(
        self, unit: Unit, values: Mapping[nn.Parameter, torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return whole tensors of a unit's parameters, in memory of their own; every rank of the group calls it.

        Args:
            values: by parameter, a tensor of the shape of this rank's shard; zero where no rank has one.
        """
        room = self._room([unit], dtype, unit.device)
        return self._whole_of(unit, values, room, self._ranks.collectives, self._group)

    def _room(self, units: Iterable[Unit], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory that holds the whole of any of these units, for one unit at a time.

        So its pages are touched for the first time only once.
        """
        most = max((unit.shard_elements for unit in units), default=0)
        return torch.empty(len(self._members) * most, dtype=dtype, device=device)

    def _whole_of(
        self,
        unit: Unit,
        values: Mapping[nn.Parameter, torch.Tensor],
        room: torch.Tensor,
        collectives: Collectives,
        group: dist.ProcessGroup,
    ) -> list[torch.Tensor]:
        """Gather whole tensors of a unit's parameters, as views of ``room`` (or of a copy).

        Elements are zero where no rank has a value.
        """
        rows = room[: len(self._members) * unit.shard_elements].view(len(self._members), -1)
        shard = rows[group.rank()].zero_()
        for parameter, fragment in zip(unit.parameters, unit.fragments, strict=True):
            value = values.get(parameter)
            if fragment is not None and value is not None:
                part = unit.slice_of(shard, fragment)
                part.copy_(value.reshape(part.shape))
        collectives.all_gather(rows.view(-1), shard, group).wait()
        flat = rows if self._order is None else rows[self._order]
        return unit.views_of(flat.view(-1))

    def gather_names(self, names: set[str]) -> list[set[str]]:
        """Return every rank's names; every rank of the group calls it."""
        return self._ranks.control.allgather(names, self._members)

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """Return one object per parameter, from any rank that has one; every rank of the group calls it."""
        # On the CPU: a device number means another device on another rank.
        by_number = {}
        for parameter, value in values.items():
            by_number[self._numbers[parameter]] = value.cpu() if isinstance(value, torch.Tensor) else value
        merged: dict[int, Any] = {}
        for theirs in self._ranks.control.allgather(by_number, self._members):
            for number, value in theirs.items():
                merged.setdefault(number, value)
        return {p: merged[number] for p, number in self._numbers.items() if number in merged}
