"""Distributed modules take the place of ordinary ones, when the model is wrapped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from torch import nn

from smp_runtime.nn import builtin
from smp_runtime.nn.module import DistributedModule, NotDistributableError
from smp_runtime.tensor_parallel.group import TensorGroup
from smp_runtime.tensor_parallel.initialisation import weight_stream
from smp_runtime.tensor_parallel.registration import Registration, registration_of, was_noted
from smp_runtime.tensor_parallel.scopes import Mark, mark_of

logger = logging.getLogger("smp")

#: What the replaced module had besides weights, and scripts read.
_KEPT_ATTRIBUTES = ("config", "generation_config")


def distribute(module: nn.Module, group: TensorGroup) -> nn.Module:
    """``module`` with the outermost supported modules that scripts marked replaced; all ranks of the group call it.

    A marked module that cannot be distributed stays as it is, and a warning says why, once.
    """
    builtin.register_all()
    candidates = list(_outermost(module, ""))
    if not candidates:
        return module
    uses = _parameter_uses(module)
    made: dict[int, nn.Module] = {}
    with weight_stream(group):
        for name, original, how, mark in candidates:
            if id(original) in made:
                continue
            replacement = _try(name, original, how, mark, uses, group)
            if replacement is not None:
                made[id(original)] = replacement
    return _put_in_place(module, made)


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Registration, Mark]]:
    if isinstance(module, DistributedModule):
        return
    mark = mark_of(module)
    how = registration_of(module) if mark.enabled else None
    if how is not None and (how.only_if is None or mark.overrides.get(how.only_if)):
        yield name, module, how, mark
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


def _try(
    name: str, original: nn.Module, how: Registration, mark: Mark, uses: Counter[int], group: TensorGroup
) -> nn.Module | None:
    title = f"{name or 'the model'} ({type(original).__name__})"
    inside = _parameter_uses(original)
    if any(uses[key] > count for key, count in inside.items()):
        _left_alone(title, "it shares a weight with another module; tie them inside one distributed module", group)
        return None
    if how.arguments is None and not was_noted(original):
        _left_alone(title, "it was created before its class was registered; register the class first", group)
        return None
    try:
        made = how.distributed(original, mark.overrides)
    except NotDistributableError as error:
        _left_alone(title, str(error), group)
        return None
    nested = Counter(
        type(part).__name__
        for part in original.modules()
        if part is not original and mark_of(part).enabled and _would_be_replaced(part)
    )
    if nested and not how.is_whole_model and group.rank == 0:
        parts = ", ".join(f"{count} × {kind}" for kind, count in nested.items())
        logger.warning("%s is distributed as a whole: %s inside it are not distributed on their own", title, parts)
    if how.translations is not None:
        group.session.module_manager.note(how.translations)
    made.train(original.training)
    if inside and not any(parameter.requires_grad for parameter in original.parameters()):
        made.requires_grad_(False)
    for attribute in _KEPT_ATTRIBUTES:
        if hasattr(original, attribute) and not hasattr(made, attribute):
            setattr(made, attribute, getattr(original, attribute))
    made.replaced_class = type(original).__name__  # type: ignore[assignment]
    return made


def _would_be_replaced(module: nn.Module) -> bool:
    how = registration_of(module)
    return how is not None and (how.only_if is None or bool(mark_of(module).overrides.get(how.only_if)))


def _left_alone(title: str, why: str, group: TensorGroup) -> None:
    if group.rank == 0:
        logger.warning("%s is not distributed: %s", title, why)


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by the parameter's id."""
    return Counter(
        id(parameter) for part in module.modules() for parameter in part._parameters.values() if parameter is not None
    )


def _put_in_place(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """Every reference to a replaced module becomes one to its replacement."""
    if id(module) in made:
        return made[id(module)]
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and id(child) in made:
                part._modules[name] = made[id(child)]
    return module
