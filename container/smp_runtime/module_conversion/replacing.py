"""Replacement of ordinary modules by distributed ones, when the model is wrapped."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smp_config import Group
from smp_runtime.comm.collectives import broadcast_tensors
from smp_runtime.errors import SMPUserError
from smp_runtime.job.module_manager import ModuleManager
from smp_runtime.module_conversion import builtin
from smp_runtime.module_conversion.candidates import Candidate, find_outermost, find_registration, is_taken
from smp_runtime.module_conversion.carry_over_attributes import (
    CarriedAttributes,
    inherit,
    inherit_parameter_attributes,
    list_names,
    parameter_type,
    set_parameter_type,
    state_of,
)
from smp_runtime.module_conversion.fast_paths import leave_fast_paths
from smp_runtime.module_conversion.in_place.blocks import parameter_uses
from smp_runtime.module_conversion.in_place.capture import used_by_others
from smp_runtime.module_conversion.in_place.planning import plan_splits
from smp_runtime.module_conversion.in_place.vocabulary import vocabulary_ties
from smp_runtime.module_conversion.matrix_origins import find_origins
from smp_runtime.module_conversion.parameter_layout import slices_by_name
from smp_runtime.module_conversion.registration import was_noted
from smp_runtime.module_conversion.scopes import mark_of
from smp_runtime.module_conversion.splitting import adapt, require_all
from smp_runtime.nn.distributed_module import DistributedModule, NotDistributableError, parameters_in
from smp_runtime.nn.embedding import DistributedEmbedding
from smp_runtime.nn.linear import DistributedConv1D, DistributedLinear
from smp_runtime.parameters.deferred_creation import Deferral, Deferrals
from smp_runtime.parameters.registry import Successors
from smp_runtime.pipeline.partition.manual_stages import hand_on_stage
from smp_runtime.tensor_parallel.initialisation import weight_stream, without_values
from smp_runtime.tensors.torch_private import without_modes

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")

_BY_THEMSELVES = (DistributedLinear, DistributedConv1D, DistributedEmbedding)


def distribute(module: nn.Module, group: TensorGroup) -> nn.Module:
    """Replace the outermost supported modules that scripts marked in ``module``; all ranks of the group call it.

    A marked module that cannot be distributed stays as it is, and a warning reports why, once.
    """
    builtin.register_all()
    automatic = _automatic(module, group)
    in_place = plan_splits(module, group, lambda part: is_taken(part, automatic))
    ties = vocabulary_ties(module, in_place, group)
    candidates = find_outermost(module, automatic, in_place, ties, lambda title, why: _left_alone(title, why, group))
    if not candidates:
        _warn_if_useless(module, group)
        return module
    uses, paths, read = parameter_uses(module), _paths(module), _read_by_others(module, candidates, group)
    made: dict[int, nn.Module] = {}
    seen: set[int] = set()
    # A module with deferred creation is replaced within its own record. So its distributed form gets values when the
    # module would have.
    for deferral, run in itertools.groupby(candidates, lambda candidate: _deferral_of(candidate.original, group)):
        late = contextlib.nullcontext() if deferral in (None, Deferral.current()) else deferral.taking_over()
        with late, weight_stream(group):
            for candidate in run:
                original = candidate.original
                if id(original) in seen:
                    continue
                seen.add(id(original))
                # A weight can be replaced if all references to it pass through this module.
                # Otherwise replacing it would break a tie.
                inside, times = parameter_uses(original), paths[id(original)]
                shares = not candidate.how.shares_weights
                if shares and any(uses[key] > count * times for key, count in inside.items()):
                    why = "it shares a weight with another module; tie them inside one distributed module"
                    _left_alone(candidate.title, why, group)
                    continue
                if candidate.name in read:
                    _left_alone(
                        candidate.title, "its weight is used by the code around it too, not only by its own", group
                    )
                    continue
                replacement = _try(candidate, automatic, group)
                if replacement is not None:
                    made[id(original)] = replacement
    blocks = [(part, in_place[id(part)]) for part in module.modules() if id(part) in in_place]
    for block, split in blocks:
        require_all(block, split, made)
    module = _put_in_place(module, made)
    for block, split in blocks:
        adapt(block, split, group)
    leave_fast_paths(module, group)
    _warn_if_useless(module, group)
    return module


def _read_by_others(model: nn.Module, candidates: Iterable[Candidate], group: TensorGroup) -> set[str]:
    """Return the names of separately distributed linear maps and embeddings if other code needs the whole weight."""
    names = [candidate.name for candidate in candidates if candidate.how.dist_module in _BY_THEMSELVES]
    if group.size == 1 or not names:
        return set()
    found: set[str] = set()
    if group.rank == 0:
        # The other ranks wait in `agree`, which an error here must not skip.
        with contextlib.suppress(Exception):
            found = used_by_others(model, names)
    return group.agree(found)


def _warn_if_useless(module: nn.Module, group: TensorGroup) -> None:
    """Log a warning if tensor parallelism has no effect on a model."""
    if (
        group.size == 1
        or group.ranks.rank != 0
        or any(isinstance(part, DistributedModule) for part in module.modules())
    ):
        return
    logger.warning(
        "tensor_parallel_degree is %d, but no module of the %s is distributed, so each of these %d ranks holds and computes all "
        "of it: create it inside smp.tensor_parallelism(), or call smp.set_tensor_parallelism on parts of it before "
        "smp.DistributedModel (nn.Linear and whole Transformers models are supported; tp_register adds others), or set "
        "tensor_parallel_degree to 1",
        group.size,
        type(module).__name__,
        group.size,
    )


def _automatic(module: nn.Module, group: TensorGroup) -> Mapping[str, Any]:
    """Return arguments of distributed modules that follow from the configuration, unless a script sets them."""
    # The choice of blocks must depend on the tensor parallel degree alone: sharded checkpoints load at other sharding degrees.
    sharded = group.size > 1 and group.ranks.cfg.sharded_data_parallel_degree > 1 and not mark_of(module).in_place
    return {"distribute_embedding": True} if sharded else {}


def _deferral_of(module: nn.Module, group: TensorGroup) -> Deferral | None:
    """Return the deferral that will write a module's parameters, the last one if there are several; or None."""
    tensors = [*module.parameters(), *module.buffers()]
    owners = [d for d in group.ranks.keep(Deferrals, Deferrals) if any(d.owns(tensor) for tensor in tensors)]
    return owners[-1] if owners else None


def _try(candidate: Candidate, automatic: Mapping[str, Any], group: TensorGroup) -> nn.Module | None:
    _, original, how, mark = candidate
    if how.arguments is None and not was_noted(original):
        why = "it was created before its class was registered; register the class first"
        _left_alone(candidate.title, why, group)
        return None
    dtype = parameter_type(original, group.ranks.cfg) if "dtype" not in mark.overrides else None
    try:
        made = _made(candidate, dtype, automatic, group)
    except NotDistributableError as error:
        _left_alone(candidate.title, str(error), group)
        return None
    nested = _candidates_in(original, automatic)
    if nested and not how.is_whole_model:
        parts = ", ".join(f"{count} × {kind}" for kind, count in nested.items())
        message = "%s is distributed as a whole: %s inside it are not distributed on their own"
        _warn(group, message, candidate.title, parts)
    if how.translations is not None:
        group.ranks.keep(ModuleManager, ModuleManager).note(how.translations)
    inherit(original, made, how.to_ours, candidate.title, warns=group.rank == 0)
    hand_on_stage(original, made)
    made.replaced_class = type(original).__name__  # type: ignore[assignment]
    if isinstance(made, DistributedModule):
        made.matrix_origins = find_origins(original, made, how.to_ours)
    return made


def _candidates_in(original: nn.Module, automatic: Mapping[str, Any]) -> Counter[str]:
    """Count the modules inside another one, by class, that would be distributed on their own."""
    kinds: Counter[str] = Counter()
    for part in original.modules():
        mark = mark_of(part)
        if part is original or not mark.enabled:
            continue
        if find_registration(part, mark, automatic) is not None:
            kinds[type(part).__name__] += 1
    return kinds


def _made(
    candidate: Candidate, dtype: torch.dtype | None, automatic: Mapping[str, Any], group: TensorGroup
) -> nn.Module:
    """Create the distributed module, with the weights of the original, or with new ones if a script requests it.

    Raises:
        NotDistributableError: it cannot be made, or weights would be lost.
    """
    _, original, how, mark = candidate
    state = _agreed_state(candidate, group) if mark.keeps_weights and _has_weights(candidate, group) else {}
    # Constructors of the script's classes may look at values.
    waiting: dict[int, Callable[[], None]] = {}
    later = without_values(waiting) if state and how.arguments is not None else contextlib.nullcontext()
    with parameters_in(dtype), later:
        made = how.distributed(original, mark.overrides, automatic)
    if dtype is not None:
        set_parameter_type(made, dtype)
    heritage = CarriedAttributes(state, made, how.to_ours) if state else None
    written = _hand_over(candidate, heritage, made, group) if heritage is not None else set()
    successors = group.ranks.keep(Successors, Successors)
    for parameter in original.parameters():
        found = heritage.successors.get(id(parameter), ()) if heritage is not None and written else ()
        successors.note(parameter, found)
    lost = inherit_parameter_attributes(
        original, made, heritage.successors if heritage is not None and written else {}, slices_by_name(made)
    )
    lost = [name for name in lost if not name.rpartition(".")[2].startswith("_")]
    if lost:
        _warn(
            group,
            "%s is distributed, but attributes that were set on its parameters are lost, since one parameter takes the place of "
            "several with different ones, or none does: %s; set them on the parameters of the wrapped model",
            candidate.title,
            list_names(lost),
        )
    for key, write in waiting.items():
        if key not in written:
            write()
    return made


def _has_weights(candidate: Candidate, group: TensorGroup) -> bool:
    """Return whether the original has weights that are worth keeping; log it if not."""
    if candidate.how.was_initialised(candidate.original):
        return True
    if group.ranks.rank == 0:
        logger.info(
            "%s was created without the initialisation of its weights (the script has replaced init_weights): new ones are drawn",
            candidate.title,
        )
    return False


def _agreed_state(candidate: Candidate, group: TensorGroup) -> dict[str, torch.Tensor]:
    """Return the original's state, on all ranks that of the group's first; empty if it has no values."""
    state = state_of(candidate.original)
    deferral = Deferral.current()
    waiting = [value for value in state.values() if value.is_meta]
    if any(deferral is None or not deferral.owns(value) for value in waiting):
        if deferral is not None:
            raise NotDistributableError(
                "its parameters were created in several contexts of delayed creation; create it in one of them"
            )
        _warn(group, "%s has no values (its parameters are on the meta device); new weights are drawn", candidate.title)
        return {}
    if group.size > 1:
        ranks = group.ranks
        # Ranks may have drawn different weights, but their parts must be of one tensor.
        real = [value for value in state.values() if not value.is_meta]
        with without_modes(), torch.no_grad():
            broadcast_tensors(real, ranks.members(Group.TP)[0], ranks.groups.group(Group.TP), ranks.collectives)
    return state


def _hand_over(candidate: Candidate, heritage: CarriedAttributes, made: nn.Module, group: TensorGroup) -> set[int]:
    """Copy the original's weights into ``made``; return the ids of the parameters written."""
    how, title = candidate.how, candidate.title
    if heritage.lost and how.arguments is not None:
        raise NotDistributableError(
            f"weights of it would be lost: {list_names(heritage.lost)}; to distribute it with new weights, pass keep_weights=False "
            "to the scope or to set_tensor_parallelism"
        )
    if heritage.lost and how.state_hook is not None:
        raise SMPUserError(
            f"the state_hook of {title} returned weights that {type(made).__name__} does not have: {list_names(heritage.lost)}; it "
            "must return a state of the whole distributed module, by its names; if new weights are right, pass keep_weights=False",
            code="SMP307",
        )
    if heritage.lost or (heritage.missing and how.to_ours is None):
        _warn(
            group,
            "%s is distributed with new weights: its own do not fit %s (%s); register it with a state_hook that translates its "
            "state_dict, or pass keep_weights=False if new ones are right",
            title,
            type(made).__name__,
            list_names(heritage.lost or [f"it lacks {name}" for name in heritage.missing]),
        )
        return set()
    if heritage.missing:
        _warn(group, "%s is distributed, with new weights for what it lacks: %s", title, list_names(heritage.missing))
    return heritage.hand_over()


def _warn(group: TensorGroup, message: str, *args: object) -> None:
    if group.rank == 0:
        logger.warning(message, *args)


def _left_alone(title: str, why: str, group: TensorGroup) -> None:
    _warn(group, "%s is not distributed: %s", title, why)


def _paths(module: nn.Module) -> Counter[int]:
    """Return the number of names of each module, by its id."""
    return Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))


def _put_in_place(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Replace every reference to a replaced module by its replacement."""
    if id(module) in made:
        return made[id(module)]
    for part in list(module.modules()):
        for name, child in part._modules.items():
            replacement = made.get(id(child))
            if replacement is not None:
                part._modules[name] = replacement
    return module
