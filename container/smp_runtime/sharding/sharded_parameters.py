"""Sharded data parallelism (MiCS): parameters, gradients and optimizer state shared out over a group of ranks.

Every rank of a sharding group keeps an equal shard of each unit's parameters, gradients and optimizer state; groups
are replicas of each other. See Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud".
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smp_config import Group
from smp_runtime.comm.collectives import TorchCollectives, broadcast_tensors
from smp_runtime.errors import SMPUserError
from smp_runtime.fp8.gathering import EightBitGather, find_scales
from smp_runtime.parameters.deferred_creation import Deferrals
from smp_runtime.parameters.late_values import StandIn, materialize, stand_ins
from smp_runtime.parameters.precision import Precision
from smp_runtime.parameters.script_writes import check_shape
from smp_runtime.sharding.all_gather import make_gathering
from smp_runtime.sharding.detached_parameters import ShardOwner
from smp_runtime.sharding.flat_shards import FlatShards
from smp_runtime.sharding.flat_unit import ShardedUnit, mark_parameter
from smp_runtime.sharding.gather_scheduler import GatherScheduler, warn_of_large_units
from smp_runtime.sharding.module_hooks import ModuleUses
from smp_runtime.sharding.requests import GatherRequests
from smp_runtime.sharding.sharded_gradients import ShardedGradients
from smp_runtime.sharding.wrap_policy import ShardingOptions, is_sharded, plan_units
from smp_runtime.tensors.parameter_attributes import get_data, own
from smp_runtime.tensors.torch_private import before_loading

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks
    from smp_runtime.parameters.optimizer_shards import OptimizerShard


class ShardedParameters(FlatShards[ShardedUnit]):
    """The sharded part of a model, and the tensors that the optimizer updates for it.

    Args:
        module: the model; its parameters are whole and equal on all replicas, or placeholders; :meth:`take` sets the
            placeholders' values later.
        parameters: those of this rank, all to be trained or kept; small ones stay whole.
        deferred: by ``id``, parameters that get their values later.
        split: by ``id``, parameters that tensor parallel ranks have different parts of.

    Attributes:
        optimizer_shards: the tensors that the optimizer updates for each trained parameter, small ones included.
    """

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
        gathering = make_gathering(ranks, hierarchical=self.options.hierarchical)
        degree = ranks.size(Group.SHARD)
        wide = precision.wide_parameters(module.modules())  # units have one type
        scales = find_scales(module)
        chosen = [p for p in parameters if is_sharded(p, self.options) and id(p) not in wide]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        units = []
        for plan in plan_units(module, chosen, self.options, scales):
            unit = ShardedUnit(
                plan.name,
                plan.module,
                plan.parameters,
                precision.compute or plan.parameters[0].dtype,
                degree,
                gathering.position,
                ranks.device,
                by_tokens=plan.by_tokens,
                names=[names.get(id(parameter), "") for parameter in plan.parameters],
            )
            units.append(unit)
        for unit in units:
            if all(id(parameter) in scales for parameter in unit.parameters):
                unit.rounding = EightBitGather(unit, [scales[id(parameter)] for parameter in unit.parameters])
        super().__init__(ranks, Group.SHARD, parameters, units, precision, gathering.shard_of)
        speaks = ranks.rank_in(Group.DP) == 0  # of each stage
        if speaks:
            warn_of_large_units(self.units, self.options.max_live)
        self.scheduler = GatherScheduler(self.units, gathering, self.options.max_live, speaks=speaks)
        trained = [unit for unit in self.units if unit.trained]
        bucket_elements = self.options.bucket_elements
        self.gradients = ShardedGradients(
            trained, ranks, self.scheduler.trace, gathering.shard_of, bucket_elements, precision.reduce
        )
        owner = ShardOwner(self, self.script_gradients)
        self._warns_of_reads = speaks
        self._is_updated = False
        for unit in self.units:
            self._share_out(unit)
            self._take_values([p for p in unit.parameters if id(p) not in deferred])
            for parameter in unit.parameters:
                own(parameter, owner)
            unit.reshard()
            unit.mark_parameters()
        in_order = ranks.size(Group.PP) == 1
        self.uses = ModuleUses(module, self.units, self.scheduler, self.gradients, in_order=in_order)
        self._follow_writes(module)
        self._reads = StateReads(module, self.uses, degree)
        self._autocast = AutocastWarning(self.units, ranks.device, speaks=ranks.rank == 0)

    # -- values ----------------------------------------------------------------------------------------------------

    def _take_values(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take parts of present parameters, those of the first replica."""
        # What tensor parallel ranks do not share out is equal on them too.
        whole = [parameter for parameter in parameters if id(parameter) not in self._split]
        split = [parameter for parameter in parameters if id(parameter) in self._split]
        for group, members in ((Group.DP, whole), (Group.RDP, split)):
            values = [p.detach().to(self._ranks.device) for p in members]
            source, process_group = self._ranks.members(group)[0], self._ranks.groups.group(group)
            broadcast_tensors(values, source, process_group, self._ranks.collectives)
            for parameter, value in zip(members, values, strict=True):
                self.take(parameter, value)

    def add_whole(self, optimizer_shards: Mapping[nn.Parameter, OptimizerShard]) -> None:
        """Add the optimizer shards of the small parameters that stay whole on every rank."""
        for parameter, shard in optimizer_shards.items():
            shard.number = self._numbers[parameter]
            self.optimizer_shards[parameter] = shard
            mark_parameter(parameter, parameter.shape, parameter.detach().view(-1))

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Keep this rank's part of a parameter's whole value, in float32 too where there is a master."""
        unit, index = self._where[parameter]
        unit.take(index, value)
        shard = self.optimizer_shards.get(parameter)
        if shard is not None:
            shard.take(value)

    def receive(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Take the value of a parameter that was created later; small ones take all of it, other stages' nothing."""
        if parameter in self._where:
            self.take(parameter, value)
        elif parameter in self._numbers:
            get_data(parameter).copy_(value)

    # -- writes of the script --------------------------------------------------------------------------------------

    def unit_of(self, parameter: nn.Parameter) -> ShardedUnit:
        """Return the unit that a sharded parameter is in."""
        return self._where[parameter][0]

    def fill(self, unit: ShardedUnit) -> bool:
        """Fill a unit's parameters with this rank's part of the values; return whether they had no memory."""
        if unit.work is not None:
            self.scheduler.free(unit)
        if unit.ready:
            return False
        unit.fill_from_shard()
        return True

    def assign(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Keep this rank's part of ``parameter.data = value``."""
        unit, index = self._where[parameter]
        check_shape(f"a parameter of {unit.name or 'the model'}", unit.shapes[index], value)
        if unit.work is not None:
            self.scheduler.free(unit)
        unit.assign(index, value.detach())
        shard = self.optimizer_shards.get(parameter)
        if shard is not None:
            shard.take(value.detach())

    def adopt_writes(self) -> None:
        """Keep the script's writes into parameters, in float32 too."""
        for unit in self.units:
            if unit.is_filled:
                unit.reshard()
            unit.keep_written()
            if unit.was_written:
                unit.was_written = False
                for parameter in unit.parameters:
                    if (shard := self.optimizer_shards.get(parameter)) is not None:
                        shard.adopt()

    @property
    def is_running(self) -> bool:
        """Return whether a module call is running; it gathers the parameters that it needs."""
        return self.uses.is_running

    def note_read(self) -> None:
        """Warn once that a rank reads its own part only."""
        if self._warns_of_reads:
            self._warns_of_reads = False
            logger.warning(
                "values of sharded parameters were read outside a step, where a rank has its part of them and NaN for the rest; "
                "changes element by element are right, norms and sums are NaN: read whole values from model.state_dict(), which "
                "every rank calls"
            )

    @property
    def clipping(self) -> float:
        """Return the norm that every update clips its gradients to."""
        return self.options.clipping

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Return the sharded parameters."""
        return set(self._where)

    @property
    def elements(self) -> tuple[int, int]:
        """Return the numbers of elements that are sharded, and that stay whole."""
        whole = (p.numel() for p in self._numbers if p not in self._where)
        return sum(unit.filled for unit in self.units), sum(whole)

    # -- a window --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run a call of the model, or of a part of it, in the block, and watch what autograd saves."""
        self._autocast.check()
        with self.uses.watch_saved():
            yield

    @contextlib.contextmanager
    def on_request(self) -> Iterator[None]:
        """Run an evaluation that differs between ranks in the block; every rank of the sharding group enters it."""
        with self.scheduler.on_request(GatherRequests(self._ranks)):
            yield
        self.uses.reset()

    def begin_window(self, kind: str) -> None:
        """Begin a training step, an evaluation or another repeated window; free anything left over."""
        self.adopt_writes()
        self.uses.reset()
        self.scheduler.free_all()
        self.gradients.begin_window()
        self.scheduler.order.begin(kind)

    def finish_window(self, *, reduces: bool) -> None:
        """End the window: sum gradients over the group, and over all replicas if ``reduces``."""
        self.gradients.finish_window(reduces=reduces)
        if reduces:
            for unit, reduced, used in self.gradients.ready():
                self._hand_out(unit, reduced, used)
        self.scheduler.order.end()
        self.scheduler.free_all()
        self.gradients.touched = False

    def abandon_window(self) -> None:
        """End the window after an error, and forget its order."""
        self.begin_window("")

    @property
    def touched(self) -> bool:
        """Return whether backward has added to any gradient in this window."""
        return self.gradients.touched

    # -- for the optimizer -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Prepare for an update; see :meth:`.FlatShards.settle`."""
        super().settle()
        self._is_updated = True

    def gather_parameters(self) -> None:
        """Free gathered values of before the update; each unit is gathered again when it is used."""
        if self._is_updated:
            self._is_updated = False
            for parameter in self._parameters_to_update():
                unit, index = self._where[parameter]
                unit.lose_saved(index, "the optimizer has updated it")
        self.release()

    def release(self) -> None:
        """Free units that a forward pass without backward has left gathered, since shards change."""
        for unit in self.units:
            self.scheduler.free(unit)

    def clear_gradients(self, *, to_zero: bool = False) -> None:
        """Forget the gradients of this rank's shards, those under way too; see :meth:`.FlatShards.clear_gradients`."""
        super().clear_gradients(to_zero=to_zero)
        self.gradients.clear()

    def _zeros_of(self, unit: ShardedUnit) -> torch.Tensor:
        return self.gradients.zeros_of(unit)

    # -- whole tensors ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def whole_parameters(
        self, *, keep: bool = True, only: Container[int] | None = None
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield every sharded parameter with its whole value on the CPU; every rank of the group iterates.

        The parameters come unit by unit.

        Args:
            keep: False on a rank that only takes part; it gets nothing.
            only: by ``id``, the requested parameters; units without one are not gathered.
        """
        for unit in self.units:
            asked = [parameter for parameter in unit.parameters if only is None or id(parameter) in only]
            if not asked:
                continue
            was_there = unit.ready
            self.scheduler.fetch_exact(unit)
            try:
                values = [parameter.detach().to("cpu", copy=True) for parameter in asked if keep]
            finally:
                if not was_there:
                    self.scheduler.free(unit)
            if keep:
                yield from zip(asked, values, strict=True)

    @torch.no_grad()
    def whole_values(
        self, values: Mapping[nn.Parameter, torch.Tensor], apart: torch.distributed.ProcessGroup | None = None
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield whole tensors from optimizer shards, one unit's at a time; every rank iterates to the end.

        The ranks are those of the group.

        Args:
            values: by parameter, a tensor of the shape of this rank's shard, for trained ones.
            apart: a group of the same ranks that nothing else uses, for another thread; the values are on the CPU then.

        Returns:
            Each trained sharded parameter with a tensor of its shape, zero where no rank has a value, and only valid
            until the next unit's are asked for.
        """
        if apart is None:
            collectives, device, group = self._ranks.collectives, self._ranks.device, self._group
        else:
            collectives, device, group = TorchCollectives(), torch.device("cpu"), apart
        rooms: dict[torch.dtype, torch.Tensor] = {}
        for unit in self.units:
            if not unit.trained:
                continue
            dtype = torch.float32 if self._precision.is_half else unit.dtype
            if dtype not in rooms:
                rooms[dtype] = self._room([each for each in self.units if each.trained], dtype, device)
            views = self._whole_of(unit, values, rooms[dtype], collectives, group)
            yield from zip(unit.parameters, views, strict=True)

    # -- loading ---------------------------------------------------------------------------------------------------

    def _follow_writes(self, module: nn.Module) -> None:
        """Let ``load_state_dict``, also of a submodule, write into filled parameters, and keep this rank's shard."""
        weak = weakref.ref(self)
        for part in module.modules():
            units = self.uses.units_held_by(part)
            if not units:
                continue

            def before(*_: Any, units: list[ShardedUnit] = units) -> None:
                me = weak()
                for unit in units:
                    if me is not None:  # a forward pass without backward leaves some gathered or under way
                        me.scheduler.free(unit)
                    if not unit.ready:
                        unit.fill_from_shard()

            def after(*_: Any, units: list[ShardedUnit] = units) -> None:
                me = weak()
                if me is not None:
                    me.keep(units)

            before_loading(part, before)
            part.register_load_state_dict_post_hook(after)

    def keep(self, units: Sequence[ShardedUnit]) -> None:
        """Keep this rank's part of values loaded into gathered parameters, and free the parameters."""
        for unit in units:
            if not unit.ready:
                continue
            unit.keep_shard()
            unit.reshard()
            for parameter in unit.parameters:
                shard = self.optimizer_shards.get(parameter)
                if shard is not None:
                    shard.refresh()

    def reading_state(self) -> contextlib.AbstractContextManager[None]:
        """Allow ``state_dict`` of the module inside the block; :meth:`complete` puts the values into it."""
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
        """Raise the error for a state that reached only some ranks.

        Raises:
            SMPUserError: always.
        """
        raise SMPUserError(
            f"the data parallel ranks have loaded {list(loads)} model states, but with sharded data parallelism each "
            "rank keeps its own part of what it loads: call load_state_dict on every rank",
            code="SMP308",
        )


def make_stand_ins(ranks: Ranks, module: nn.Module) -> list[StandIn]:
    """Make parameters without values in place of deferred ones; small ones have memory already."""
    options = ShardingOptions.of(ranks.cfg)
    wide = Precision.of(ranks.cfg).wide_parameters(module.modules())

    def make(meta: nn.Parameter) -> torch.Tensor:
        if is_sharded(meta, options) and id(meta) not in wide:
            return torch.zeros((), dtype=meta.dtype, device=ranks.device).expand(meta.shape)
        return torch.empty(meta.shape, dtype=meta.dtype, device=ranks.device)

    return stand_ins(ranks.keep(Deferrals, Deferrals), module, make)


def create_shards(ranks: Ranks, module: nn.Module, made: list[StandIn], shards: ShardedParameters) -> None:
    """Run the creation that was deferred; every rank of a stage draws the same numbers and keeps its part."""
    materialize(ranks.keep(Deferrals, Deferrals), module, ranks.device, replaced=made, take=shards.receive)


logger = logging.getLogger("smp")


class StateReads:
    """Refuses ``state_dict`` of the module inside, which would be placeholders: only the wrapper's has the values."""

    def __init__(self, module: nn.Module, uses: ModuleUses, degree: int) -> None:
        self._allowed = False
        for name, part in module.named_modules():
            if not uses.units_held_by(part):
                continue

            def before(_: nn.Module, prefix: str, keep_vars: bool, name: str = name) -> None:
                if keep_vars or self._allowed:  # who wants the parameters themselves gets them as they are
                    return
                raise SMPUserError(
                    f"state_dict was called on a module inside smp.DistributedModel, but of the parameters of "
                    f"{name or 'the module'!r} this rank holds 1/{degree} (sharded_data_parallel_degree is {degree}) and the "
                    "state would be NaN; call model.state_dict() of the wrapper on every rank, and for Transformers "
                    "model.save_pretrained(folder, state_dict=model.state_dict())",
                    code="SMP308",
                )

            part.register_state_dict_pre_hook(before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Allow reads of the state inside the block, since the caller adds the values afterwards."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before


class AutocastWarning:
    """A one-time warning that ``torch.autocast`` makes a copy of every weight, which autograd keeps.

    Args:
        speaks: whether this rank is the one that warns.
    """

    def __init__(self, units: Sequence[ShardedUnit], device: torch.device, *, speaks: bool) -> None:
        self._types = {unit.dtype for unit in units}
        self._kind = device.type
        self._waits = speaks

    def check(self) -> None:
        """Warn at the beginning of a forward pass, if autocast casts weights."""
        if not self._waits or not torch.is_autocast_enabled(self._kind):
            return
        cast = torch.get_autocast_dtype(self._kind)
        if self._types <= {cast}:
            return
        self._waits = False
        logger.warning(
            "torch.autocast is on and casts weights of %s to %s: autograd keeps these copies of the whole model on every rank "
            "until backward, which sharding should avoid; leave autocast out and use 'bf16: true'",
            ", ".join(sorted(map(str, self._types - {cast}))),
            cast,
        )
