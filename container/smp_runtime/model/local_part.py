"""The part of a model that lies on this rank's pipeline stage, and its parallel state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_config import Group
from smp_runtime.activations.marking import is_marked
from smp_runtime.microbatch_state.compiled_blocks import Compiling
from smp_runtime.module_conversion.parameter_layout import place
from smp_runtime.nn.distributed_module import DistributedModule
from smp_runtime.nn.layer import DistributedTransformerLayer
from smp_runtime.nn.sublayer import HalfBlock
from smp_runtime.parameters.registry import ParameterRegistry
from smp_runtime.parameters.script_writes import ScriptWrites
from smp_runtime.sharding.sharded_state import ShardedState
from smp_runtime.tensor_parallel.activation_layout import SlicedFlow
from smp_runtime.tensors import parameter_attributes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from smp_runtime.job.ranks import Ranks
    from smp_runtime.job.session import Session
    from smp_runtime.parameters.known_parameters import KnownParameters
    from smp_runtime.parameters.optimizer_shards import OptimizerShard
    from smp_runtime.sharding.sharded_parameters import ShardedParameters


class LocalPart:
    """A model as this rank has it: all of it without pipeline parallelism, else the modules of one stage.

    Attributes:
        registry: names and places of all parameters of the model.
        stage_of: pipeline stage of a module by its path; None while all of the model is on this rank.
    """

    def __init__(self, module: nn.Module, stage: int) -> None:
        self.module = module
        self.stage = stage
        self.stage_of: Callable[[str], int] | None = None
        self.register()

    def register(self) -> None:
        """Record the model's parameters as they are now, and the ranks that have their elements."""
        self.registry = ParameterRegistry(self.module)
        place(self.module, self.registry)
        if self.stage_of is not None:
            self.registry.place_stages(self.stage_of)

    def has(self, path: str) -> bool:
        """Return whether a module is on this rank."""
        return self.stage_of is None or self.stage_of(path) == self.stage

    def compile(self, ranks: Ranks, placed: ParallelState) -> None:
        """Compile blocks of this rank: repeated ones if so configured, and those of ``smp.compile``."""
        cfg, shards = ranks.cfg, placed.shards

        def hinders(block: nn.Module) -> str | None:
            reason = adapted_inside(block)
            if reason is None and shards is not None:
                reason = shards.uses.leave_inside(block)
            return reason

        Compiling(
            repeated=cfg.compile_backend if cfg.compile else None,
            has=self.has,
            hinders=hinders,
            interrupts=checkpointed_inside,
            # The first rank of each stage, and of each host, on which something else may be missing.
            tells=ranks.rank_in(Group.DP) == 0 or ranks.local_rank == 0,
        ).begin(self.module)

    def has_tensor(self, name: str) -> bool:
        """Return whether a parameter or buffer is on this rank, by its name."""
        return self.has(name.rpartition(".")[0])

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules of this rank, with names."""
        return ((path, module) for path, module in self.module.named_modules() if self.has(path))

    def modules(self) -> Iterator[nn.Module]:
        """Return an iterator over the modules of this rank."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over the parameters of this rank, with names."""
        return ((name, p) for name, p in self.module.named_parameters() if self.has_tensor(name))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return an iterator over the parameters of this rank."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of this rank, with names.

        A buffer with several names comes only under the first one on this rank, or under all of them if
        ``remove_duplicate`` is False.
        """
        seen: set[int] = set()
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if not self.has_tensor(name):
                continue
            if remove_duplicate and id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield name, buffer

    def buffers(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the buffers of this rank."""
        return (buffer for _, buffer in self.named_buffers())


@dataclass
class ParallelState:
    """The results of the strategies on this rank's part; empty before the model is partitioned."""

    #: Tensors that the optimizer updates instead of the parameters; None if it updates the parameters.
    optimizer_shards: dict[nn.Parameter, OptimizerShard | None] | None = None
    #: How optimizer state is shared out over the replicas, or None.
    sharded_state: ShardedState | ShardedParameters | None = None
    #: The same with parameters and gradients too, under sharded data parallelism.
    shards: ShardedParameters | None = None
    #: Parameters that are not trained, and that nothing averages.
    frozen: list[nn.Parameter] = field(default_factory=list)
    #: The script's writes into parameters that the optimizer updates through other tensors; None if there are none.
    writes: ScriptWrites | None = None
    must_gather: bool = False  # whether shards have changed that other ranks have copies of
    #: Refuses parameters that come or go later; None while one process may train any, as in plain PyTorch.
    known: KnownParameters | None = None
    is_away: bool = False  # whether ``model.cpu()`` has moved the weights from the device that trains
    is_copied: bool = False  # or has put a whole copy in the place of what trains

    def refresh(self) -> None:
        """Update the master weights from values that were written into the model."""
        for shard in (self.optimizer_shards or {}).values():
            if shard is not None:
                shard.refresh()

    def watch_writes(self, part: LocalPart) -> None:
        """Watch the script's writes into parameters from now on, except sharded ones, which their units watch."""
        shards, state = self.optimizer_shards or {}, self.sharded_state
        in_units = self.shards.parameters if self.shards is not None else set()
        watched = []
        for parameter in part.parameters():
            shard = shards.get(parameter)
            is_updated_itself = parameter not in shards or (shard is not None and shard.optimized is parameter)
            if parameter not in in_units and not is_updated_itself:
                watched.append(parameter)

        def settle() -> None:
            if state is not None:
                state.settle()

        gradients = state.script_gradients if state is not None else None
        names = part.registry
        self.writes = ScriptWrites(watched, shards, lambda p: names.record_of(p).name, settle, gradients)

    def adopt_writes(self) -> None:
        """Let training continue from values that the script has written into parameters."""
        if self.is_away:
            return
        if self.writes is not None:
            self.writes.adopt()
        if self.shards is not None:
            self.shards.adopt_writes()

    def follow_calls(self, part: LocalPart) -> None:
        """Make modules wait for parameters that come late; call it when modules are as they will run."""
        if isinstance(self.sharded_state, ShardedState):
            self.sharded_state.follow_calls(part.module)

    def updated(self, part: LocalPart) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the values that this rank's optimizer updates, by parameter name; with sharded state, its own parts."""
        shards = self.optimizer_shards or {}
        for record in part.registry:
            if not part.has_tensor(record.name):
                continue
            if record.parameter not in shards:
                yield record.name, record.parameter
                continue
            shard = shards[record.parameter]
            if shard is not None:
                yield record.name, shard.optimized


class _OwnedAttributes:
    """Marks a job in which owners answer for ``data`` and ``grad`` of parameters."""

    outlives_regrouping = True


def own_attributes(session: Session) -> None:
    """Watch the script's use of ``data`` and ``grad`` of wrapped models' parameters until the session closes."""
    if session.ranks.kept(_OwnedAttributes) is None:
        session.ranks.keep(_OwnedAttributes, _OwnedAttributes)
        session.at_close.append(parameter_attributes.install())


def adapted_inside(block: nn.Module) -> str | None:
    """Return why a block that tensor parallelism has split cannot be one graph, or None if it can."""
    for part in block.modules():
        if not isinstance(part, DistributedModule) or part.tensor_group.size == 1:
            continue
        flow = getattr(part, "flow", None)
        sees_all_rows = isinstance(flow, SlicedFlow) and flow.rows_see_all
        has_free_order = sees_all_rows or not _is_chain(block, part)
        if has_free_order:
            # What no data orders, compilers of two ranks may order differently.
            return (
                "with tensor parallelism some of its collectives may not follow from each other, so that ranks could run them in "
                'different orders; layers of smp.nn with "optimize": "speed" are compiled'
            )
    for part in block.modules():
        if part is not block and _has_hooks_of_ours(part):
            return f"tensor parallelism changes what its {type(part).__name__} computes while it runs"
    return None


def _is_chain(block: nn.Module, part: DistributedModule) -> bool:
    """Return whether each collective of a part follows from the one before it."""
    if not isinstance(block, HalfBlock | DistributedTransformerLayer):
        return False
    has_branches = getattr(getattr(part, "settings", None), "parallel_attn_output", False)
    return not has_branches and not getattr(part, "cross_attention", None)


def _has_hooks_of_ours(part: nn.Module) -> bool:
    """Return whether tensor parallelism has put hooks on a module."""
    for hook in (*vars(part)["_forward_pre_hooks"].values(), *vars(part)["_forward_hooks"].values()):
        owner = getattr(hook, "__self__", hook)
        home = str(getattr(owner, "__module__", ""))
        if home.startswith(("smp_runtime.tensor_parallel", "smp_runtime.module_conversion")):
            return True
    return False


def checkpointed_inside(block: nn.Module) -> str | None:
    """Return why a block with parts that are checkpointed separately cannot be one graph, or None if it can."""
    inside = next((part for part in block.modules() if part is not block and is_marked(part)), None)
    if inside is None:
        return None
    return f"its {type(inside).__name__} is checkpointed by itself; checkpoint the whole block to have both"
