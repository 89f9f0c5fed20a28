"""What the job's parameters add to PyTorch's FSDP: groups, strategy, and arguments of version 2."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard

from smp_config import Group
from smp_runtime.comm.collectives import broadcast_tensors
from smp_runtime.errors import SMPUserError
from smp_runtime.tensors.torch_private import free_gathered_parameters, is_outermost, lacking_gradients
from smp_version2 import whole_state
from smp_version2.checkpoint.local_shards import accept_joined
from smp_version2.moe import shards
from smp_version2.moe.experts import SharedExperts, find_own_parameters
from smp_version2.split_parameters import find_slices
from smp_version2.state import state

if TYPE_CHECKING:
    from torch import nn

    from smp_config.version2.parameters import Version2Parameters
    from smp_runtime.job.ranks import Ranks

#: Numbers the meshes of this process.
_numbers = itertools.count()


def install(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Give FSDP the groups and the strategy of the parameters, where a script gives none; return the function that ends it."""
    ends = [
        _install_wrapper(parameters, ranks),
        _install_mesh(parameters, ranks),
        _install_fresh_weights(),
        whole_state.install(ranks.device),
    ]

    def end() -> None:
        for each in reversed(ends):  # two of them replace the same function
            each()

    return end


def _install_wrapper(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Let ``FullyShardedDataParallel`` take the parameters' groups, and arguments of the original's PyTorch."""
    original = FullyShardedDataParallel.__init__
    names = list(inspect.signature(original).parameters)

    under_way: list[FullyShardedDataParallel] = []

    @functools.wraps(original)
    def initialize(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True  # reports name the caller
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        finish = given.pop("post_param_init_fn", None)
        # Units that PyTorch makes inside of another one leave experts out, as that one does.
        experts = [] if under_way else shards.find_unsharded(given["module"])
        groups_of_experts = choose_groups(parameters, ranks, given.get("sharding_strategy"), are_experts=True)
        given = _with_groups(given, experts, groups_of_experts, parameters, ranks)
        given = shards.leave_out_again(given) if under_way else given
        _require_original_parameters(given)
        if ranks.device.type == "cpu":  # FSDP refuses to choose it, and emulated GPUs are CPUs
            given["device_id"] = ranks.device
            if given.pop("sync_module_states", False):
                _bring_states(given["module"], given.pop("param_init_fn", None), ranks)
        is_around = bool(experts) and given["module"] not in experts
        under_way.append(self)
        try:
            original(self, **(shards.leave_out(given, experts) if is_around else given))
        finally:
            under_way.remove(self)
        if not under_way:
            state.note_shards(_count_shards(self))
        whole_state.register(self)
        accept_joined(self)
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            self.register_forward_pre_hook(_keep_gradients)
        else:
            self.register_forward_hook(_free_gathered_unit)
        if is_around:
            shards.wrap(self, experts, given, groups_of_experts, FullyShardedDataParallel)
        elif experts:
            shards.note_wrapped(self)
        if finish is not None:
            finish(self)

    FullyShardedDataParallel.__init__ = initialize  # type: ignore[method-assign]

    def end() -> None:
        FullyShardedDataParallel.__init__ = original  # type: ignore[method-assign]

    return end


def _with_groups(
    given: dict[str, Any],
    experts: list[SharedExperts],
    groups_of_experts: dict[str, Any],
    parameters: Version2Parameters,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the arguments of a unit with the job's groups, unless a script has named others; experts always get the job's."""
    if given["module"] in experts:
        return {key: value for key, value in given.items() if key != "device_mesh"} | groups_of_experts
    if given.get("process_group") is None and given.get("device_mesh") is None:
        return given | choose_groups(parameters, ranks, given.get("sharding_strategy"))
    if experts:
        shards.require_all_ranks(given, ranks)
    return given


def _require_original_parameters(given: dict[str, Any]) -> None:
    """Raise an error if split parameters would be joined with whole ones."""
    if not given.get("use_orig_params") and find_slices(given["module"]):
        raise SMPUserError(
            "FullyShardedDataParallel got use_orig_params=False, and tensor parallelism has split parameters of this model; "
            "FSDP would join these with whole ones, which count differently in norms and checkpoints: pass use_orig_params=True",
            code="SMP303",
        )


def _bring_states(module: nn.Module, fill: Callable[[nn.Module], None] | None, ranks: Ranks) -> None:
    """Bring the first replica's values to all ranks on CPUs, where FSDP refuses ``sync_module_states``."""
    if fill is not None:
        for part in module.modules():
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in own):
                fill(part)
    of_experts = find_own_parameters(module)
    experts: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor in of_experts:
            experts.append(tensor.detach())
        else:
            others.append(tensor.detach())
    for kind, tensors in ((Group.RDP, others), (Group.EXPERT_RDP, experts)):
        members = ranks.members(kind)
        if len(members) > 1 and tensors:
            broadcast_tensors(tensors, members[0], ranks.process_group(kind), ranks.collectives)


def choose_groups(
    parameters: Version2Parameters, ranks: Ranks, strategy: ShardingStrategy | None, *, are_experts: bool = False
) -> dict[str, Any]:
    """Return the arguments of ``FullyShardedDataParallel`` that follow from the degrees.

    Args:
        are_experts: the unit has experts, which only some of the ranks have.
    """
    degree = parameters.shard_degree(ranks.topology.world_size)
    everyone, replica = (Group.EXPERT_RDP, Group.EXPERT_REPLICA) if are_experts else (Group.RDP, Group.REPLICA)
    if degree == 0:
        return {}
    if degree == 1:
        return {"process_group": ranks.process_group(everyone), "sharding_strategy": ShardingStrategy.NO_SHARD}
    if ranks.size(replica) == 1:
        made: dict[str, Any] = {"process_group": ranks.process_group(Group.SHARD)}
        if _is_hybrid(strategy):
            made["sharding_strategy"] = ShardingStrategy.FULL_SHARD
        return made
    groups = (ranks.process_group(Group.SHARD), ranks.process_group(replica))
    chosen = strategy if _is_hybrid(strategy) else ShardingStrategy.HYBRID_SHARD
    return {"process_group": groups, "sharding_strategy": chosen}


def _count_shards(unit: FullyShardedDataParallel) -> int:
    """Return how many ranks share one copy of a unit's state."""
    group = unit.process_group
    return 1 if group is None or unit.sharding_strategy is ShardingStrategy.NO_SHARD else group.size()


def _keep_gradients(unit: nn.Module, _: Any) -> None:
    """Let a pass add to gradients that passes in ``no_sync`` have computed, for parameters without a gradient before.

    If a script drops a parameter's gradient, FSDP marks the parameter, and removes the mark only in passes that average. If other
    parameters of the unit have a gradient, such as zeros, FSDP would drop the gradients of the passes in between.
    """
    marks, parameters = lacking_gradients(unit)
    if not any(marks):
        return
    for place, parameter in enumerate(parameters):
        marks[place] = marks[place] and parameter.grad is None


def _free_gathered_unit(unit: nn.Module, *_: Any) -> None:
    """Free the gathered weights of a unit after a forward pass that no backward pass follows.

    FSDP keeps those of the outermost unit and of ``SHARD_GRAD_OP`` for the backward pass. The next forward pass would compute with
    them, whatever a script has written into its parameters meanwhile, as by ``optimizer.step`` or an average of weights.
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        free_gathered_parameters(unit)


def _free_gathered_model(module: nn.Module, *_: Any) -> None:
    """Free the gathered weights of all units of ``fully_shard`` after the model's forward pass, as :func:`_free_gathered_unit`.

    Modules that are one unit may be called one after the other, so the outermost one frees them.
    """
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_outermost(module):
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _is_hybrid(strategy: ShardingStrategy | None) -> bool:
    """Return whether a strategy has a group that shards and a group that replicates; one such has a private name."""
    return strategy is not None and "HYBRID" in strategy.name


def _install_mesh(parameters: Version2Parameters, ranks: Ranks) -> Callable[[], None]:
    """Let ``fully_shard`` shard over the parameters' groups, unless a script passes a mesh."""
    function = inspect.unwrap(fully_shard)
    defaults = dict(function.__kwdefaults__ or {})
    if parameters.shard_degree(ranks.topology.world_size) == 0:
        return lambda: None
    function.__kwdefaults__ = {**defaults, "mesh": make_mesh(ranks)}
    stop_sharing = shards.install_function(make_mesh(ranks, of_experts=True), ranks)

    def end() -> None:
        stop_sharing()
        function.__kwdefaults__ = defaults

    return end


def _install_fresh_weights() -> Callable[[], None]:
    """Let each call of a model use the present weights of its ``fully_shard`` units; return the function that ends it.

    ``autocast`` keeps a weight's copy in half precision until its context ends. A second call of the model inside would use the
    copy of the first one, and autograd runs backward of older operations last: the gradient would arrive when the unit has averaged
    its gradients and freed the weight. In plain PyTorch it is lost.
    """
    cell = shards.find_cell()
    if cell is None:
        return lambda: None
    former = cell.cell_contents

    @functools.wraps(former)
    def shard(module: Any, *args: Any, **given: Any) -> Any:
        __tracebackhide__ = True  # reports name the caller
        made = former(module, *args, **given)
        for each in module if isinstance(module, (list, tuple)) else [module]:
            each.register_forward_pre_hook(_drop_casts, prepend=True)
            each.register_forward_hook(_free_gathered_model)
        return made

    cell.cell_contents = shard

    def end() -> None:
        cell.cell_contents = former

    return end


def _drop_casts(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        torch.clear_autocast_cache()


def make_mesh(ranks: Ranks, *, of_experts: bool = False) -> DeviceMesh:
    """Return the mesh of the ranks with this rank's tensor coordinate: replicas × shards, or shards alone.

    Args:
        of_experts: only the ranks that have this rank's experts.
    """
    kind = ranks.device.type
    replicas, members = (Group.EXPERT_REPLICA, Group.EXPERT_RDP) if of_experts else (Group.REPLICA, Group.RDP)
    shard = ranks.process_group(Group.SHARD)
    # PyTorch keeps results of operations by meshes, which are equal if their ranks and names are. That of an earlier job of this
    # process has other groups, so it must have other names.
    number = next(_numbers)
    names = (f"replicate_{number}", f"shard_{number}")
    if ranks.size(replicas) == 1:
        return DeviceMesh.from_group(shard, kind, mesh_dim_names=names[1:])
    inner = 1 if of_experts else ranks.size(Group.EP)
    grid = torch.tensor(ranks.members(members)).view(-1, ranks.size(Group.SHARD), inner)
    rows = grid.transpose(1, 2).reshape(-1, ranks.size(Group.SHARD))
    return DeviceMesh.from_group([ranks.process_group(replicas), shard], kind, mesh=rows, mesh_dim_names=names)
