"""Gradients of sharded units: summed inside the sharding group per backward pass, across groups once per update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_runtime.comm.flag_all_reduce import FlagAllReduce
from smp_runtime.sharding.gather_scheduler import GatherTrace, refuse_unequal, sharing_positions
from smp_runtime.tensors.parameter_attributes import get_gradient, set_gradient

if TYPE_CHECKING:
    import torch.distributed as dist

    from smp_runtime.comm.collectives import Collectives, Work
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.sharding.flat_unit import ShardedUnit

#: Below this many elements, units share a collective: latency outweighs what an earlier start wins.
_SMALLEST = 2**18


class ReduceScatterInput:
    """The gradients of some units that are sent together.

    The buffer is ``[shards, columns]``: each rank gets one row.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        dtype: torch.dtype,
        rows: Sequence[int],
        collectives: Collectives,
        group: dist.ProcessGroup,
    ) -> None:
        self.units = list(units)
        self.columns = sum(unit.shard_elements for unit in units)
        first = units[0]
        # Gradients are written, not added, so only the places of missing gradients have to be cleared.
        flat = collectives.empty(first.shards * self.columns, dtype, first.device, group)
        self.buffer = flat.view(first.shards, self.columns)
        self._rows = list(rows)
        self._begins = {}
        column = 0
        for unit in units:
            self._begins[id(unit)] = column
            column += unit.shard_elements
        self.arrived: dict[int, set[int]] = {id(unit): set() for unit in units}
        self._in_order = self._rows == sorted(self._rows) and len(self.units) == 1

    @torch.no_grad()
    def add(self, unit: ShardedUnit, index: int, gradient: torch.Tensor, scale: float) -> None:
        """Add one parameter's gradient, times ``scale``."""
        flat = gradient.reshape(-1)
        again = index in self.arrived[id(unit)]
        self.arrived[id(unit)].add(index)
        taken = 0
        for target in self._places(unit, unit.offsets[index], flat.numel()):
            _put(target, flat[taken : taken + target.numel()], scale, again=again)
            taken += target.numel()

    @torch.no_grad()
    def complete(self) -> None:
        """Fill the gaps with zeros: gradients that have not arrived, and the padding at the end of a unit."""
        for unit in self.units:
            arrived = self.arrived[id(unit)]
            gaps = [(unit.filled, unit.shards * unit.shard_elements - unit.filled)]
            gaps += [
                (offset, shape.numel())
                for index, (offset, shape) in enumerate(zip(unit.offsets, unit.shapes, strict=True))
                if index not in arrived
            ]
            for begin, elements in gaps:
                for target in self._places(unit, begin, elements):
                    target.zero_()

    def _places(self, unit: ShardedUnit, begin: int, elements: int) -> Iterator[torch.Tensor]:
        """Yield the places in the buffer of some elements of a unit, piece by piece."""
        if self._in_order:
            yield self.buffer.view(-1)[begin : begin + elements]
            return
        first, length, end = self._begins[id(unit)], unit.shard_elements, begin + elements
        while begin < end:
            shard, column = divmod(begin, length)
            count = min(length - column, end - begin)
            yield self.buffer[self._rows[shard], first + column : first + column + count]
            begin += count


@dataclass
class PendingReduceScatter:
    """A pending reduce-scatter of gradients.

    Attributes:
        filling: the gradients that were sent.
        works: its collectives, one after the other.
        parts: of this rank's row, by collective.
        is_sum: whether the row is received into the storage of these units' sums, which were empty before.
    """

    filling: ReduceScatterInput
    works: list[Work]
    parts: list[torch.Tensor]
    is_sum: bool

    def finish(self) -> torch.Tensor:
        """Wait; returns this rank's row."""
        for work in self.works:
            work.wait()
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


class ShardedGradients:
    """Collects, reduces and keeps the gradients of this rank's shards.

    Args:
        units: the trained ones.
        shard_of: by position in the sharding group, the number of that rank's shard.
        bucket_elements: most elements that one collective carries, and of gradients that are not summed yet; a unit
            that is larger itself is complete before it is sent in parts.
        dtype: in which gradients are summed; None means each in its parameter's type.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        ranks: Ranks,
        gathers: GatherTrace,
        shard_of: Sequence[int],
        bucket_elements: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._units = list(units)
        self._ranks = ranks
        self._inside = ranks.process_group(Group.SHARD)
        self._scale = 1.0 / ranks.size(Group.RDP)
        self._gathers = gathers
        self._rows = [list(shard_of).index(number) for number in range(len(shard_of))]
        self._bucket_elements = bucket_elements
        self._dtype = dtype
        self._sharing = sharing_positions(ranks)
        self._groups: list[list[ShardedUnit]] = []
        self._group_of: dict[int, int] = {}
        self._begin_of: dict[int, int] = {}
        self._lengths: dict[torch.dtype, int] = {}
        self._divide(list(reversed(self._units)))
        self._order_is_fixed = False
        self._filling: dict[int, ReduceScatterInput] = {}
        self._travelling: PendingReduceScatter | None = None
        #: Units that backward has reached, and passed, until their groups are sent.
        self._reached: set[int] = set()
        self._passed: set[int] = set()
        self._is_amid = False
        #: Sums of this window, and sums ready for the update; by type, shards of all units in the order of the groups.
        #: A sum that is not noted in ``_summed`` is uninitialized memory.
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        self._ready: dict[torch.dtype, torch.Tensor] = {}
        self._summed: set[int] = set()
        self._first_number: dict[int, int] = {}
        count = 0
        for unit in self._units:
            self._first_number[id(unit)] = count
            count += len(unit.parameters)
        self._used = torch.zeros(count, dtype=torch.bool, device="cpu")
        self._used_anywhere = torch.zeros(count, dtype=torch.bool, device="cpu")
        self.touched = False

    # -- while backward runs ---------------------------------------------------------------------------------------

    # All ranks of a sharding group must send in the same order, though they may use different parameters.
    # If a collective comes before a gather on one rank and after it on another, both can block.
    # So the order follows from the modules that backward reaches and passes, never from the gradients that arrive.

    @torch.no_grad()
    def arrived(self, unit: ShardedUnit, index: int, parameter: torch.Tensor) -> bool:
        """Take the gradient that backward has added to a parameter; returns whether there was one."""
        gradient = get_gradient(parameter)
        if gradient is None:
            return False
        set_gradient(parameter, None)
        self._fix_order()
        self.touched = self._is_amid = True
        self._used[self._first_number[id(unit)] + index] = True
        filling = self._filling_of(self._group_of[id(unit)])
        filling.add(unit, index, gradient.to_dense() if gradient.is_sparse else gradient, self._scale)
        return True

    def reach(self, unit: ShardedUnit) -> None:
        """Record that backward has reached a call that uses the unit."""
        if id(unit) not in self._group_of:  # frozen
            return
        self._fix_order()
        self._is_amid = True
        self._reached.add(id(unit))
        self._passed.discard(id(unit))

    def leave(self, unit: ShardedUnit) -> None:
        """Record that backward has passed all calls that use the unit; send its group's gradients if complete."""
        if id(unit) not in self._reached:
            return
        self._passed.add(id(unit))
        number = self._group_of[id(unit)]
        if all(id(other) in self._passed for other in self._groups[number] if other.called):
            self._launch(number)

    def end(self, units: Sequence[ShardedUnit]) -> None:
        """End a backward pass that reached these units: send the gradients of their groups."""
        for number in sorted({self._group_of[id(unit)] for unit in units if id(unit) in self._reached}):
            self._launch(number)
        self._reached.difference_update(id(unit) for unit in units)

    def _filling_of(self, number: int) -> ReduceScatterInput:
        if number not in self._filling:
            group = self._groups[number]
            elements = sum(other.filled for other in group)
            if self._travelling is not None:
                # A bucket in flight takes memory twice: for what is sent and for what is received.
                under_way = 2 * sum(other.filled for other in self._travelling.filling.units)
                if elements + under_way > self._bucket_elements:
                    self._finish()
            kind = self._dtype or group[0].dtype
            self._filling[number] = ReduceScatterInput(group, kind, self._rows, self._ranks.collectives, self._inside)
        return self._filling[number]

    @torch.no_grad()
    def _launch(self, number: int) -> None:
        """Send a group's gradients; zeros if none came on this rank."""
        self._finish()
        filling = self._filling_of(number)
        del self._filling[number]
        passed = self._passed.intersection(id(unit) for unit in filling.units)
        self._reached -= passed
        self._passed -= passed
        filling.complete()
        shards, columns = filling.buffer.shape
        width = max(1, self._bucket_elements // shards)
        if columns <= width:
            is_first = not any(id(unit) in self._summed for unit in filling.units)
            part = self._row_of(filling) if is_first else filling.buffer.new_empty(columns)
            work = self._ranks.collectives.reduce_scatter(part, filling.buffer.view(-1), self._inside)
            self._travelling = PendingReduceScatter(filling, [work], [part], is_first)
            return
        parts = []
        for begin in range(0, columns, width):
            chunk = filling.buffer[:, begin : begin + width].contiguous()
            parts.append(chunk.new_empty(chunk.shape[1]))
            # A bucket at a time, so that no more than one waits.
            self._ranks.collectives.reduce_scatter(parts[-1], chunk.view(-1), self._inside).wait()
        self._travelling = PendingReduceScatter(filling, [], parts, is_sum=False)

    def _finish(self) -> None:
        if self._travelling is None:
            return
        travelling, self._travelling = self._travelling, None
        row = travelling.finish()
        if travelling.is_sum:
            self._summed.update(id(unit) for unit in travelling.filling.units)
            return
        begin = 0
        for unit in travelling.filling.units:
            part = row[begin : begin + unit.shard_elements]
            begin += unit.shard_elements
            target = self._part(self._sum_of(unit), unit)
            if id(unit) in self._summed:
                target.add_(part)
            else:
                self._summed.add(id(unit))
                target.copy_(part)

    def _sum_of(self, unit: ShardedUnit) -> torch.Tensor:
        kind = self._dtype or unit.dtype
        if kind not in self._sums:
            self._sums[kind] = torch.empty(self._lengths[kind], dtype=kind, device=unit.device)
        return self._sums[kind]

    def _row_of(self, filling: ReduceScatterInput) -> torch.Tensor:
        """Return the view of the sums for all units that are sent together."""
        first = filling.units[0]
        begin = self._begin_of[id(first)]
        return self._sum_of(first)[begin : begin + filling.columns]

    def _part(self, flat: torch.Tensor, unit: ShardedUnit) -> torch.Tensor:
        begin = self._begin_of[id(unit)]
        return flat[begin : begin + unit.shard_elements]

    # -- at the end of a window ------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_window(self, *, reduces: bool) -> None:
        """End a window.

        Args:
            reduces: send the remaining gradients, and average over the sharding groups, for the update.
        """
        self._is_amid = False
        self._finish()
        if not reduces or not self._units:
            return
        for number in self._exchange():
            self._launch(number)
        self._finish()
        for unit in self._units:
            if id(unit) not in self._summed and (self._dtype or unit.dtype) in self._sums:
                self._part(self._sum_of(unit), unit).zero_()
        for kind, flat in self._sums.items():
            if self._ranks.size(Group.REPLICA) > 1:
                for part in flat.split(self._bucket_elements):
                    self._ranks.collectives.all_reduce(part, self._ranks.process_group(Group.REPLICA)).wait()
            if kind in self._ready:
                self._ready[kind].add_(flat)
            else:
                self._ready[kind] = flat
        self._sums = {}
        self._summed = set()

    def _exchange(self) -> list[int]:
        """Agree on which parameters were used; return the groups for which any rank has gradients left.

        Raises:
            SMPUserError: on all ranks: those of a sharding group have not gathered the same units in the same order.
        """
        used, groups, replicas = len(self._used), len(self._groups), sum(map(len, self._sharing))
        news = torch.zeros(used + groups + replicas, device="cpu")
        news[:used] = self._used
        news[used : used + groups] = torch.tensor(
            [float(number in self._filling) for number in range(groups)], device="cpu"
        )
        news[used + groups + self._ranks.rank_in(Group.RDP)] = float(self._gathers.digest)
        self._gathers.forget()
        group, device = self._ranks.process_group(Group.RDP), self._units[0].device
        news = FlagAllReduce(news, device, self._ranks.collectives, group, self._ranks.size(Group.RDP)).finish()
        self._used_anywhere = news[:used] > 0
        self._used.zero_()
        if not self._ranks.control.speaks_for_all:  # else this process stands for all ranks, and gathers cannot differ
            refuse_unequal(self._sharing, [int(digest) for digest in news[used + groups :]])
        return [number for number in range(groups) if news[used + number] > 0]

    def begin_window(self) -> None:
        """Forget gradients of an abandoned window; those left over from a finished one wait for the update."""
        if self._is_amid:
            self._filling = {}
        self._is_amid = False
        self._reached.clear()
        self._passed.clear()
        self._finish()
        self.touched = False

    def clear(self) -> None:
        """Forget all gradients."""
        self._finish()  # into sums that are forgotten too
        self._filling = {}
        self._ready = {}
        self._sums = {}
        self._summed = set()
        self._used.zero_()
        self._used_anywhere.zero_()

    def zeros_of(self, unit: ShardedUnit) -> torch.Tensor:
        """Return a unit's part of the gradients ready for the update; create it as zeros if there is none."""
        kind = self._dtype or unit.dtype
        # Reduced gradients must keep their place, even before the first forward pass has shown the order of the units.
        self._order_is_fixed = True
        if kind not in self._ready:
            self._ready[kind] = torch.zeros(self._lengths[kind], dtype=kind, device=unit.device)
        return self._part(self._ready[kind], unit)

    def ready(self) -> Iterator[tuple[ShardedUnit, torch.Tensor, list[bool]]]:
        """Yield each unit with its shard of the averaged gradients, and which parameters have been used.

        These are the parameters that any rank used since the last reduction.
        """
        for unit in self._units:
            flat = self._ready.get(self._dtype or unit.dtype)
            if flat is None:
                continue
            first = self._first_number[id(unit)]
            last = first + len(unit.parameters)
            yield unit, self._part(flat, unit), self._used_anywhere[first:last].tolist()

    # -- order -----------------------------------------------------------------------------------------------------

    def _fix_order(self) -> None:
        """Order units by their last use in forward, latest first, since their gradients are complete first.

        Forward uses the same units on all ranks, so the order is the same too.
        """
        if not self._order_is_fixed:
            self._order_is_fixed = True
            numbers = {id(unit): number for number, unit in enumerate(self._units)}
            self._divide(sorted(self._units, key=lambda u: (u.called, numbers[id(u)]), reverse=True))

    def _divide(self, order: Sequence[ShardedUnit]) -> None:
        """Let small neighbours share a collective."""
        largest = max((unit.filled for unit in order), default=0)
        # One can be filled while another is on its way.
        most = min(self._bucket_elements // 2, max(_SMALLEST, largest))
        groups: list[list[ShardedUnit]] = []
        for unit in order:
            last = groups[-1] if groups else []
            is_alike = bool(last) and last[0].dtype == unit.dtype
            if is_alike and sum(other.filled for other in last) + unit.filled <= most:
                last.append(unit)
            else:
                groups.append([unit])
        self._groups = groups
        self._group_of = {}
        self._lengths = {}
        for number, group in enumerate(groups):
            for unit in group:
                self._group_of[id(unit)] = number
                kind = self._dtype or unit.dtype
                self._begin_of[id(unit)] = self._lengths.get(kind, 0)
                self._lengths[kind] = self._begin_of[id(unit)] + unit.shard_elements


def _put(target: torch.Tensor, source: torch.Tensor, scale: float, *, again: bool) -> None:
    if again:
        target.add_(source.to(target.dtype), alpha=scale)
    elif source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:  # widen before scaling, or the product is rounded in the narrow type
        target.copy_(source).mul_(scale)
