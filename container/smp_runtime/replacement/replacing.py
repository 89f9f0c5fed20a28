"""Distributed modules take the place of ordinary ones, when the model is wrapped."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smp_config import Group
from smp_runtime.job.trained import ModuleManager
from smp_runtime.nn.distributed_module import DistributedModule, NotDistributableError, parameters_in
from smp_runtime.parameters.deferred_creation import Deferrals, deferring
from smp_runtime.pipeline.partition.manual_stages import hand_on_stage
from smp_runtime.replacement import builtin
from smp_runtime.replacement.inheriting import inherit, parameter_type, set_parameter_type
from smp_runtime.replacement.registration import Registration, registration_of, was_noted
from smp_runtime.replacement.scopes import Mark, mark_of
from smp_runtime.tensor_parallel.initialisation import weight_stream

if TYPE_CHECKING:
    from torch import nn

    from smp_runtime.tensor_parallel.group import TensorGroup

logger = logging.getLogger("smp")


def distribute(module: nn.Module, group: TensorGroup) -> nn.Module:
    """``module`` with the outermost supported modules that scripts marked replaced; all ranks of the group call it.

    A marked module that cannot be distributed stays as it is, and a warning says why, once.
    """
    builtin.register_all()
    automatic = _automatic(group)
    candidates = list(_outermost(module, "", automatic))
    if not candidates:
        _warn_if_useless(module, group)
        return module
    # The tracing step of a pipeline runs on one device: where parameters have no values yet, new ones have none either.
    traced_on_meta = group.ranks.size(Group.PP) > 1 and any(p.is_meta for p in module.parameters())
    uses, paths = _parameter_uses(module), _paths(module)
    made: dict[int, nn.Module] = {}
    seen: set[int] = set()
    later = deferring(group.ranks.keep(Deferrals, Deferrals)) if traced_on_meta else contextlib.nullcontext()
    with later, weight_stream(group):
        for name, original, how, mark in candidates:
            if id(original) in seen:
                continue
            seen.add(id(original))
            title = f"{name or 'the model'} ({type(original).__name__})"
            # What all references to it lead to is replaced in all places; what others lead to as well would be torn apart.
            inside, times = _parameter_uses(original), paths[id(original)]
            if any(uses[key] > count * times for key, count in inside.items()):
                why = "it shares a weight with another module; tie them inside one distributed module"
                _left_alone(title, why, group)
                continue
            replacement = _try(title, original, how, mark, automatic, group)
            if replacement is not None:
                made[id(original)] = replacement
    module = _put_in_place(module, made)
    _warn_if_useless(module, group)
    return module


def _warn_if_useless(module: nn.Module, group: TensorGroup) -> None:
    """Say that tensor parallelism has nothing to do in a model."""
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


def _automatic(group: TensorGroup) -> Mapping[str, Any]:
    """Arguments of distributed modules that follow from the configuration, unless a script gives them."""
    sharded = group.size > 1 and group.ranks.cfg.sharded_data_parallel_degree > 1
    return {"distribute_embedding": True} if sharded else {}


def _outermost(
    module: nn.Module, name: str, automatic: Mapping[str, Any]
) -> Iterator[tuple[str, nn.Module, Registration, Mark]]:
    if isinstance(module, DistributedModule):
        return
    mark = mark_of(module)
    how = _wanted(module, mark, automatic) if mark.enabled else None
    if how is not None:
        yield name, module, how, mark
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name, automatic)


def _wanted(module: nn.Module, mark: Mark, automatic: Mapping[str, Any]) -> Registration | None:
    how = registration_of(module)
    if how is None or how.only_if is None or {**automatic, **mark.overrides}.get(how.only_if):
        return how
    return None


def _try(
    title: str, original: nn.Module, how: Registration, mark: Mark, automatic: Mapping[str, Any], group: TensorGroup
) -> nn.Module | None:
    if how.arguments is None and not was_noted(original):
        _left_alone(title, "it was created before its class was registered; register the class first", group)
        return None
    dtype = parameter_type(original, group.ranks.cfg) if "dtype" not in mark.overrides else None
    try:
        with parameters_in(dtype):
            made = how.distributed(original, mark.overrides, automatic)
    except NotDistributableError as error:
        _left_alone(title, str(error), group)
        return None
    if dtype is not None:
        set_parameter_type(made, dtype)
    nested = Counter(
        type(part).__name__
        for part in original.modules()
        if part is not original and (own := mark_of(part)).enabled and _wanted(part, own, automatic) is not None
    )
    if nested and not how.is_whole_model and group.rank == 0:
        parts = ", ".join(f"{count} × {kind}" for kind, count in nested.items())
        logger.warning("%s is distributed as a whole: %s inside it are not distributed on their own", title, parts)
    if how.translations is not None:
        group.ranks.keep(ModuleManager, ModuleManager).note(how.translations)
    to_ours = None if how.translations is None else how.translations[1]
    inherit(original, made, to_ours, title, warns=group.rank == 0)
    hand_on_stage(original, made)
    made.replaced_class = type(original).__name__  # type: ignore[assignment]
    return made


def _left_alone(title: str, why: str, group: TensorGroup) -> None:
    if group.rank == 0:
        logger.warning("%s is not distributed: %s", title, why)


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """In how many places each parameter is met, by its id; a module that has several names counts under each."""
    return Counter(
        id(parameter)
        for _, part in module.named_modules(remove_duplicate=False)
        for parameter in part._parameters.values()
        if parameter is not None
    )


def _paths(module: nn.Module) -> Counter[int]:
    """How many names each module has, by its id."""
    return Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))


def _put_in_place(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Every reference to a replaced module becomes one to its replacement."""
    if id(module) in made:
        return made[id(module)]
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and id(child) in made:
                part._modules[name] = made[id(child)]
    return module
