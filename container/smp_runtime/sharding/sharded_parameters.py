"""Sharded data parallelism (MiCS): parameters, gradients and optimizer state shared out over a group of ranks.

Every rank of a sharding group keeps an equal shard of each unit's parameters, gradients and optimizer state; groups
are replicas of each other. See Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud".
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.comm.broadcasting import broadcast_tensors
from smp_runtime.comm.collectives import TorchCollectives
from smp_runtime.errors import SMPUserError
from smp_runtime.job.ranks import Ranks
from smp_runtime.parameters.optimizer_shards import NUMBER_ATTRIBUTE, Piece
from smp_runtime.parameters.precision import Precision
from smp_runtime.sharding.choose_gather import make_gathering
from smp_runtime.sharding.deepspeed_names import mark_parameters
from smp_runtime.sharding.gather_trace import sharing_positions
from smp_runtime.sharding.gradients import ShardedGradients
from smp_runtime.sharding.live_parameters import LiveParameters
from smp_runtime.sharding.module_hooks import ModuleUses
from smp_runtime.sharding.options import ShardingOptions
from smp_runtime.sharding.registered_parameters import registered_parameters
from smp_runtime.sharding.sharded_unit import ShardedUnit
from smp_runtime.sharding.state_reads import AutocastWarning, StateReads
from smp_runtime.sharding.unit_plan import is_sharded, plan_units
from smp_runtime.tensors.torch_private import before_loading


class ShardedParameters:
    """The sharded part of a model, and what the optimizer updates of it.

    Args:
        module: the model; its parameters are whole and equal on all replicas, or placeholders whose values come later
            by :meth:`take`.
        parameters: those of this rank, all to be trained or kept; small ones stay whole.
        ranks: groups, collectives and settings.
        precision: in which type the parameters are stored.
        deferred: by ``id``, parameters whose values come later.
        split: by ``id``, parameters of which every tensor parallel rank has another part.

    Attributes:
        units: what is gathered together.
        live: what is gathered now.
        gradients: of this rank's shards.
        pieces: what the optimizer updates of each trained parameter, small ones included.
    """

    sharing = Group.SHARD

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        ranks: Ranks,
        precision: Precision,
        *,
        deferred: frozenset[int] = frozenset(),
        split: frozenset[int] = frozenset(),
    ) -> None:
        self._split = split
        self.options = ShardingOptions.of(ranks.cfg)
        self._ranks = ranks
        self._precision = precision
        self._group = ranks.groups.group(Group.SHARD)
        self._members = ranks.members(Group.SHARD)
        collectives, degree = ranks.collectives, len(self._members)
        gathering = make_gathering(ranks, hierarchical=self.options.hierarchical)
        chosen = [p for p in parameters if is_sharded(p, self.options)]
        self.whole = [p for p in parameters if not is_sharded(p, self.options)]
        self.units = [
            ShardedUnit(
                plan.name,
                plan.module,
                plan.parameters,
                precision.compute or plan.parameters[0].dtype,
                degree,
                gathering.position,
                ranks.device,
            )
            for plan in plan_units(module, chosen, self.options)
        ]
        self._where = {p: (unit, index) for unit in self.units for index, p in enumerate(unit.parameters)}
        # Trained ones first: their numbers are those of the vectors that optimizers sum.
        ordered = sorted(parameters, key=lambda p: not p.requires_grad)
        self._numbers = {p: number for number, p in enumerate(ordered)}
        self._shard_of = gathering.shard_of
        self.live = LiveParameters(self.units, gathering, self.options.max_live)
        trained = [unit for unit in self.units if unit.trained]
        self.gradients = ShardedGradients(
            trained,
            self._group,
            ranks.groups.group(Group.REPLICA) if ranks.size(Group.REPLICA) > 1 else None,
            ranks.groups.group(Group.RDP),
            position=ranks.rank_in(Group.RDP),
            sharing=sharing_positions(ranks),
            gathers=self.live.trace,
            replicas=ranks.size(Group.RDP),
            shard_of=gathering.shard_of,
            collectives=collectives,
            bucket_elements=self.options.bucket_elements,
            dtype=precision.reduce,
        )
        self.pieces: dict[nn.Parameter, Piece | None] = {}
        for unit in self.units:
            for index, parameter in enumerate(unit.parameters):
                master = self._master(unit, index)
                if unit.trained:
                    self.pieces[parameter] = self._piece(unit, index, master)
            self._take_values([p for p in unit.parameters if id(p) not in deferred])
            unit.detach()
        self.uses = ModuleUses(module, self.units, self.live, self.gradients)
        for part in module.modules():
            for parameter in registered_parameters(part):
                self.uses.register(part, parameter)
        self._watch_gradients()
        self._follow_writes(module)
        self._reads = StateReads(module, self.uses, degree)
        self._autocast = AutocastWarning(self.units, ranks.device, speaks=ranks.rank == 0)
        mark_parameters(self.units)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _take_values(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take parts of present parameters, those of the first replica."""
        # What tensor parallel ranks do not share out is equal on them too.
        for group, members in (
            (Group.DP, [p for p in parameters if id(p) not in self._split]),
            (Group.RDP, [p for p in parameters if id(p) in self._split]),
        ):
            values = [p.detach().to(self._ranks.device) for p in members]
            source, process_group = self._ranks.members(group)[0], self._ranks.groups.group(group)
            broadcast_tensors(values, source, process_group, self._ranks.collectives)
            for parameter, value in zip(members, values, strict=True):
                self.take(parameter, value)

    def _master(self, unit: ShardedUnit, index: int) -> torch.Tensor | None:
        """Memory for this rank's float32 part of a parameter, in half precision training."""
        fragment = unit.fragment(index)
        if not self._precision.is_half or not unit.trained or fragment is None:
            return None
        stored = unit.slice_of(unit.shard, fragment)
        return torch.zeros(stored.shape, dtype=torch.float32, device=stored.device)

    def _piece(self, unit: ShardedUnit, index: int, master: torch.Tensor | None) -> Piece | None:
        fragment = unit.fragment(index)
        if fragment is None:
            return None
        stored = unit.slice_of(unit.shard, fragment)
        optimized = nn.Parameter(stored if master is None else master)
        setattr(optimized, NUMBER_ATTRIBUTE, self._numbers[unit.parameters[index]])
        gradients = self.gradients
        return Piece(
            unit.parameters[index],
            fragment.start,
            fragment.stop,
            optimized,
            stored,
            lambda: gradients.of(unit, index),
        )

    def add_whole(self, pieces: Mapping[nn.Parameter, Piece]) -> None:
        """Add the pieces of the small parameters that stay whole on every rank."""
        for parameter, piece in pieces.items():
            setattr(piece.optimized, NUMBER_ATTRIBUTE, self._numbers[parameter])
            self.pieces[parameter] = piece

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Keep this rank's part of a parameter's whole value, in float32 too where there is a master."""
        unit, index = self._where[parameter]
        unit.take(index, value)
        piece = self.pieces.get(parameter)
        if piece is not None:
            piece.take(value)

    def receive(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Take the value of a parameter that was created later; small ones take all of it, other stages' nothing."""
        if parameter in self._where:
            self.take(parameter, value)
        elif parameter in self._numbers:
            parameter.data.copy_(value)

    @property
    def clipping(self) -> float:
        """Norm that every update clips its gradients to."""
        return self.options.clipping

    def counts(self, piece: Piece) -> bool:
        """Whether this rank adds a piece to sums over the sharding group: every element counts once."""
        return piece.parameter in self._where or self._ranks.rank_in(Group.SHARD) == 0

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that are sharded."""
        return set(self._where)

    @property
    def places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """First and last element (exclusive) of this rank's part of every sharded parameter; equal if it has none."""
        found = {}
        for parameter, (unit, index) in self._where.items():
            fragment = unit.fragment(index)
            found[parameter] = (fragment.start, fragment.stop) if fragment else (0, 0)
        return found

    @property
    def elements(self) -> tuple[int, int]:
        """Elements that are sharded, and that stay whole."""
        return sum(unit.filled for unit in self.units), sum(p.numel() for p in self.whole)

    # -- a window --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around a call of the model, or of a part of it."""
        self._autocast.check()
        with self.uses.watch_saved():
            yield

    def begin_window(self, kind: str) -> None:
        """A training step, an evaluation, or whatever repeats begins; anything left over is let go."""
        self.uses.reset()
        self.live.free_all()
        self.gradients.begin_window()
        self.live.order.begin(kind)

    def finish_window(self, *, reduces: bool) -> None:
        """It ends: gradients are summed over the group, and over all replicas if ``reduces``."""
        self.gradients.finish_window(reduces=reduces)
        self.live.order.end()
        self.live.free_all()
        self.gradients.touched = False

    def abandon_window(self) -> None:
        """It ended with an error; its order is forgotten."""
        self.begin_window("")

    @property
    def touched(self) -> bool:
        """Whether backward has added to any gradient in this window."""
        return self.gradients.touched

    def _watch_gradients(self) -> None:
        weak = weakref.ref(self)

        def hook(unit: ShardedUnit, index: int) -> Callable[[torch.Tensor], None]:
            def gradient_added(parameter: torch.Tensor) -> None:
                me = weak()
                if me is not None and me.gradients.arrived(unit, index, parameter):
                    me.uses.gradients_complete(unit)

            return gradient_added

        for unit in self.units:
            if unit.trained:
                for index, parameter in enumerate(unit.parameters):
                    parameter.register_post_accumulate_grad_hook(hook(unit, index))

    # -- for the optimizer -----------------------------------------------------------------------------------------

    def gather_parameters(self) -> None:
        """After an update; parameters are gathered when they are needed, those that were left gathered too."""
        self.release()

    def release(self) -> None:
        """Shards change, or are about to: what a forward pass without backward has left gathered is let go."""
        for unit in self.units:
            self.live.free(unit)

    def clear_gradients(self) -> None:
        """Forget the gradients of this rank's shards."""
        self.gradients.clear()

    def sum_over_shards(self, vector: torch.Tensor) -> torch.Tensor:
        """Sum a vector over the sharding group, in place.

        A vector with one entry per parameter counts those of whole parameters, which every rank knows, once.
        """
        if vector.numel() == len(self.pieces) and self._ranks.rank_in(Group.SHARD) != 0:
            for parameter in self.whole:
                if parameter.requires_grad:
                    vector[self._numbers[parameter]] = 0
        self._ranks.collectives.all_reduce(vector, self._group).wait()
        return vector

    # -- whole tensors ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self, unit: ShardedUnit) -> Iterator[list[torch.Tensor]]:
        """A unit's parameters with their values, outside any use; every rank of the group enters it."""
        was_there = unit.ready
        if not was_there:
            self.live.fetch(unit)
        try:
            yield list(unit.parameters)
        finally:
            if not was_there:
                self.live.free(unit)

    @torch.no_grad()
    def whole_parameters(self, *, keep: bool = True) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Every sharded parameter with its whole value on the CPU, unit by unit; every rank of the group iterates.

        One that does not ``keep`` them only takes part, and gets nothing.
        """
        for unit in self.units:
            with self.gathered(unit) as parameters:
                values = [parameter.detach().to("cpu", copy=True) for parameter in parameters if keep]
            if keep:
                yield from zip(unit.parameters, values, strict=True)

    @torch.no_grad()
    def gather_whole(
        self, values: Mapping[nn.Parameter, torch.Tensor], *, keep: bool = True
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Whole tensors from pieces; every rank of the group calls it.

        Args:
            values: by parameter, a tensor of the shape of this rank's piece; parameters without one are left out.
            keep: False on a rank that only takes part; it gets nothing.

        Returns:
            By parameter, the tensor of the parameter's shape on the CPU, for every parameter that any rank has a value for.
        """
        mine = {self._numbers[p]: v.dtype for p, v in values.items() if p in self._where}
        everyone = self._ranks.control.allgather(mine, self._members)
        known: dict[int, torch.dtype] = {}
        for theirs in everyone:
            known.update(theirs)
        whole = {p: v.detach().to("cpu", copy=True) for p, v in values.items() if keep and p not in self._where}
        for unit in self.units:
            wanted = [index for index, p in enumerate(unit.parameters) if self._numbers[p] in known]
            if not wanted:
                continue
            dtype = known[self._numbers[unit.parameters[wanted[0]]]]
            shard = torch.zeros(unit.shard_elements, dtype=dtype, device=unit.device)
            for index in wanted:
                fragment, value = unit.fragment(index), values.get(unit.parameters[index])
                if fragment is not None and value is not None:
                    unit.slice_of(shard, fragment).copy_(value.view(unit.slice_of(shard, fragment).shape))
            rows = torch.empty(len(self._members), unit.shard_elements, dtype=dtype, device=unit.device)
            self._ranks.collectives.all_gather(rows.view(-1), shard, self._group).wait()
            if not keep:
                continue
            order = sorted(range(len(self._members)), key=self._shard_of.__getitem__)
            flat = (rows if order == sorted(order) else rows[order]).view(-1)
            views = unit.views_of(flat)
            for index in wanted:
                whole[unit.parameters[index]] = views[index].to("cpu", copy=True)
        return whole

    @torch.no_grad()
    def whole_values(
        self, values: Mapping[nn.Parameter, torch.Tensor], apart: torch.distributed.ProcessGroup | None = None
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Whole tensors from pieces, one unit's at a time; every rank of the group iterates to the end.

        Args:
            values: by parameter, a tensor of the shape of this rank's piece, for trained ones.
            apart: a group of the same ranks that nothing else uses, for another thread; the values are on the CPU then.

        Returns:
            Each trained sharded parameter with a tensor of its shape, zero where no rank has a value, and only valid
            until the next unit's are asked for.
        """
        collectives = self._ranks.collectives if apart is None else TorchCollectives()
        device = self._ranks.device if apart is None else torch.device("cpu")
        for unit in self.units:
            if not unit.trained:
                continue
            dtype = torch.float32 if self._precision.is_half else unit.dtype
            shard = torch.zeros(unit.shard_elements, dtype=dtype, device=device)
            for index, parameter in enumerate(unit.parameters):
                fragment, value = unit.fragment(index), values.get(parameter)
                if fragment is not None and value is not None:
                    shard[fragment.offset : fragment.offset + value.numel()].copy_(value.reshape(-1))
            rows = torch.empty(len(self._members), unit.shard_elements, dtype=dtype, device=device)
            collectives.all_gather(rows.view(-1), shard, apart or self._group).wait()
            order = sorted(range(len(self._members)), key=self._shard_of.__getitem__)
            flat = (rows if order == sorted(order) else rows[order]).view(-1)
            yield from zip(unit.parameters, unit.views_of(flat), strict=True)

    def gather_names(self, names: set[str]) -> list[set[str]]:
        """Every rank's names; every rank of the group calls it."""
        return self._ranks.control.allgather(names, self._members)

    def gather_objects(self, values: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Any]:
        """One object per parameter, from whichever rank has one; every rank of the group calls it."""
        by_number = {
            self._numbers[p]: value.cpu() if isinstance(value, torch.Tensor) else value for p, value in values.items()
        }
        merged: dict[int, Any] = {}
        for theirs in self._ranks.control.allgather(by_number, self._members):
            for number, value in theirs.items():
                merged.setdefault(number, value)
        return {p: merged[number] for p, number in self._numbers.items() if number in merged}

    # -- loading ---------------------------------------------------------------------------------------------------

    def _follow_writes(self, module: nn.Module) -> None:
        """``load_state_dict``, also of a submodule, finds parameters to write into, and this rank keeps its shard."""
        weak = weakref.ref(self)
        for part in module.modules():
            units = self.uses.units_held_by(part)
            if not units:
                continue

            def before(*_: Any, units: list[ShardedUnit] = units) -> None:
                for unit in units:
                    if (me := weak()) is not None:  # a forward pass without backward leaves some gathered or under way
                        me.live.free(unit)
                    if not unit.ready:
                        unit.fill_from_shard()

            def after(*_: Any, units: list[ShardedUnit] = units) -> None:
                if (me := weak()) is not None:
                    me._keep(units)

            before_loading(part, before)
            part.register_load_state_dict_post_hook(after)

    def _keep(self, units: Sequence[ShardedUnit]) -> None:
        for unit in units:
            if not unit.ready:
                continue
            unit.keep_shard()
            unit.detach()
            for parameter in unit.parameters:
                piece = self.pieces.get(parameter)
                if piece is not None:
                    piece.refresh()

    def reading_state(self) -> contextlib.AbstractContextManager[None]:
        """Inside, ``state_dict`` of the module is allowed: :meth:`complete` puts the values into it."""
        return self._reads.allowed()

    def complete(
        self, state: dict[str, Any], names_of: Callable[[nn.Parameter], Sequence[str]], prefix: str, keep: bool = True
    ) -> None:
        """Put whole values into a ``state_dict``, on the CPU, if ``keep``; every rank of the group calls it."""
        for parameter, value in self.whole_parameters(keep=keep):
            for name in names_of(parameter):
                if prefix + name in state:
                    state[prefix + name] = value

    def refuse_partial_load(self, loads: Sequence[int]) -> None:
        """Say that a state reached only some ranks.

        Raises:
            SMPUserError: always.
        """
        raise SMPUserError(
            f"the data parallel ranks have loaded {list(loads)} model states, but with sharded data parallelism each "
            "rank keeps its own part of what it loads: call load_state_dict on every rank"
        )
