"""Gradients of sharded units: summed inside the sharding group per backward pass, across groups once per update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from smp_runtime.comm.collectives import Collectives, Work
from smp_runtime.sharding.units import ShardedUnit

#: Below this many elements, units share a collective: latency outweighs what an earlier start wins.
_SMALLEST = 2**18


class _Filling:
    """The gradients of some units on their way together.

    The buffer is ``[shards, columns]``: what each rank will get is one row.
    """

    def __init__(self, units: Sequence[ShardedUnit], dtype: torch.dtype, rows: Sequence[int]) -> None:
        self.units = list(units)
        self.columns = sum(unit.shard_elements for unit in units)
        first = units[0]
        self.buffer = torch.zeros(first.shards, self.columns, dtype=dtype, device=first.device)
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
        offset = unit.offsets[index]
        if self._in_order:
            _put(self.buffer.view(-1)[offset : offset + flat.numel()], flat, scale, again=again)
            return
        begin, length = self._begins[id(unit)], unit.shard_elements
        taken = 0
        while taken < flat.numel():
            shard, column = divmod(offset + taken, length)
            count = min(length - column, flat.numel() - taken)
            target = self.buffer[self._rows[shard], begin + column : begin + column + count]
            _put(target, flat[taken : taken + count], scale, again=again)
            taken += count


class _Travelling:
    def __init__(self, filling: _Filling, works: list[tuple[Work, torch.Tensor]]) -> None:
        self.filling = filling
        self.works = works

    def land(self) -> torch.Tensor:
        """Wait; returns this rank's row."""
        for work, _ in self.works:
            work.wait()
        parts = [part for _, part in self.works]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ShardedGradients:
    """Collects, reduces and keeps the gradients of this rank's shards.

    Args:
        units: the trained ones.
        inside: the sharding group.
        across: ranks with the same shard in all sharding groups; None if there is one group.
        everyone: all ranks that hold the same parameters; None if it is this one alone.
        replicas: how many ranks the gradients are averaged over.
        shard_of: by position in the sharding group, the number of that rank's shard.
        collectives: the seam.
        bucket_elements: most elements that one collective carries, and of gradients that are not summed yet; a unit
            that is larger itself is complete before it is sent in parts.
        dtype: in which gradients are summed; None means each in its parameter's type.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        inside: dist.ProcessGroup,
        across: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup,
        *,
        replicas: int,
        shard_of: Sequence[int],
        collectives: Collectives,
        bucket_elements: int,
        dtype: torch.dtype | None,
    ) -> None:
        self._units = list(units)
        self._inside = inside
        self._across = across
        self._everyone = everyone
        self._scale = 1.0 / replicas
        self._rows = [list(shard_of).index(number) for number in range(len(shard_of))]
        self._collectives = collectives
        self._bucket_elements = bucket_elements
        self._dtype = dtype
        self._group_of: dict[int, list[ShardedUnit]] = {}
        self._divide(list(reversed(self._units)))
        self._filling: dict[int, _Filling] = {}
        self._travelling: _Travelling | None = None
        self._completed: list[ShardedUnit] = []
        self._order_is_fixed = False
        self._expected: dict[int, set[int]] = {id(unit): set(range(len(unit.parameters))) for unit in self._units}
        self._begin_of: dict[int, int] = {}
        self._lengths: dict[torch.dtype, int] = {}
        for unit in self._units:
            kind = self._dtype or unit.dtype
            self._begin_of[id(unit)] = self._lengths.get(kind, 0)
            self._lengths[kind] = self._begin_of[id(unit)] + unit.shard_elements
        #: Sums of this window, and what is ready for the update; by type, shards of all units one after the other.
        self._sums: dict[torch.dtype, torch.Tensor] = {}
        self._ready: dict[torch.dtype, torch.Tensor] = {}
        self._summed: set[int] = set()
        self._first_number: dict[int, int] = {}
        count = 0
        for unit in self._units:
            self._first_number[id(unit)] = count
            count += len(unit.parameters)
        self._used = torch.zeros(count, dtype=torch.bool)
        self._used_anywhere = torch.zeros(count, dtype=torch.bool)
        self.touched = False

    # -- while backward runs ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def arrived(self, unit: ShardedUnit, index: int, parameter: torch.Tensor) -> bool:
        """Backward has added to a parameter's gradient, which is taken; returns whether the unit has all it expects."""
        if parameter.grad is None:
            return False
        gradient = parameter.grad
        parameter.grad = None
        self.touched = True
        self._used[self._first_number[id(unit)] + index] = True
        filling = self._filling_of(unit)
        filling.add(unit, index, gradient.to_dense() if gradient.is_sparse else gradient, self._scale)
        if not self._expected[id(unit)] <= filling.arrived[id(unit)]:
            return False
        if not self._order_is_fixed and unit not in self._completed:
            self._completed.append(unit)
        if all(self._expected[id(other)] <= filling.arrived[id(other)] for other in filling.units):
            self._launch(filling)
        return True

    def _filling_of(self, unit: ShardedUnit) -> _Filling:
        group = self._group_of[id(unit)]
        key = id(group[0])
        if key not in self._filling:
            elements = sum(other.filled for other in group)
            if self._travelling is not None:
                # On its way a bucket is there twice: as sent, and as it comes in.
                under_way = 2 * sum(other.filled for other in self._travelling.filling.units)
                if elements + under_way > self._bucket_elements:
                    self._land()
            self._filling[key] = _Filling(group, self._dtype or unit.dtype, self._rows)
        return self._filling[key]

    def _launch(self, filling: _Filling) -> None:
        self._land()
        del self._filling[id(filling.units[0])]
        shards, columns = filling.buffer.shape
        width = max(1, self._bucket_elements // shards)
        works = []
        for begin in range(0, columns, width):
            piece = filling.buffer if columns <= width else filling.buffer[:, begin : begin + width].contiguous()
            part = torch.empty(piece.shape[1], dtype=piece.dtype, device=piece.device)
            work = self._collectives.reduce_scatter(part, piece.view(-1), self._inside)
            if columns > width:  # a bucket at a time, so that no more than one waits
                work.wait()
            works.append((work if columns <= width else _Done(), part))
        self._travelling = _Travelling(filling, works)

    def _land(self) -> None:
        if self._travelling is None:
            return
        travelling, self._travelling = self._travelling, None
        row = travelling.land()
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
            self._sums[kind] = torch.zeros(self._lengths[kind], dtype=kind, device=unit.device)
        return self._sums[kind]

    def _part(self, flat: torch.Tensor, unit: ShardedUnit) -> torch.Tensor:
        begin = self._begin_of[id(unit)]
        return flat[begin : begin + unit.shard_elements]

    # -- at the end of a window ------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish_window(self, *, reduces: bool) -> None:
        """Send what is left; with ``reduces`` also average over the sharding groups, ready for the update."""
        for unit in list(reversed(self._units)):
            filling = self._filling.get(id(self._group_of[id(unit)][0]))
            if filling is not None:
                self._launch(filling)
        self._land()
        if self.touched:
            self._learn()
        if not reduces or not self._sums:
            return
        for kind, flat in self._sums.items():
            if self._across is not None:
                for part in flat.split(self._bucket_elements):
                    self._collectives.all_reduce(part, self._across).wait()
            if kind in self._ready:
                self._ready[kind].add_(flat)
            else:
                self._ready[kind] = flat
        self._sums = {}
        self._summed = set()
        flags = self._used.to(device=self._units[0].device, dtype=torch.float32)
        self._collectives.all_reduce(flags, self._everyone).wait()
        self._used_anywhere |= (flags > 0).cpu()
        self._used.zero_()

    def begin_window(self) -> None:
        """Forget what arrived for a window that was abandoned."""
        self._filling = {}
        self._land()
        self.touched = False

    def clear(self) -> None:
        """Forget all gradients."""
        self._ready = {}
        self._sums = {}
        self._summed = set()
        self._used.zero_()
        self._used_anywhere.zero_()

    def of(self, unit: ShardedUnit, index: int) -> torch.Tensor | None:
        """The averaged gradient of this rank's part of a parameter, or None if no rank used it."""
        kind = self._dtype or unit.dtype
        if kind not in self._ready or not self._used_anywhere[self._first_number[id(unit)] + index]:
            return None
        fragment = unit.fragment(index)
        return None if fragment is None else unit.slice_of(self._part(self._ready[kind], unit), fragment)

    @property
    def bytes_held(self) -> int:
        """Bytes of the gradients that this rank keeps until the update."""
        return sum(flat.nbytes for flat in (*self._sums.values(), *self._ready.values()))

    # -- order -----------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Which parameters get gradients, and in which order their units are complete."""
        for unit in self._units:
            first = self._first_number[id(unit)]
            used = {index for index in range(len(unit.parameters)) if bool(self._used[first + index])}
            self._expected[id(unit)] = used or set(range(len(unit.parameters)))
        if not self._order_is_fixed:
            self._order_is_fixed = True
            rest = [unit for unit in reversed(self._units) if unit not in self._completed]
            self._divide(self._completed + rest)

    def _divide(self, order: Sequence[ShardedUnit]) -> None:
        """Let small neighbours share a collective."""
        # One can be filled while another is on its way.
        most = min(self._bucket_elements // 2, max(_SMALLEST, max((unit.filled for unit in order), default=0)))
        groups: list[list[ShardedUnit]] = []
        for unit in order:
            last = groups[-1] if groups else None
            if last and last[0].dtype == unit.dtype and sum(u.filled for u in last) + unit.filled <= most:
                last.append(unit)
            else:
                groups.append([unit])
        self._group_of = {id(unit): group for group in groups for unit in group}


class _Done:
    def wait(self) -> None:
        pass


def _put(target: torch.Tensor, source: torch.Tensor, scale: float, *, again: bool) -> None:
    if again:
        target.add_(source.to(target.dtype), alpha=scale)
    elif source.dtype == target.dtype:
        torch.mul(source, scale, out=target)
    else:  # widen before scaling, or the product is rounded in the narrow type
        target.copy_(source).mul_(scale)
