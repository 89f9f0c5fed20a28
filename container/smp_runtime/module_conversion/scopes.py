"""Marks on modules to distribute: set while they are created inside a scope, or afterwards by a function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from smp_config.errors import kind_of, suggest
from smp_runtime.errors import SMPUserError
from smp_runtime.microbatch_state.construction_marks import mark_constructed
from smp_runtime.module_conversion.builtin import known_arguments
from smp_runtime.module_conversion.transformers_tp_plan import checked_plan
from smp_runtime.nn.settings import tell_without_effect

#: Attribute of a module that tensor parallelism may split, or may not.
_MARK = "_smp_tensor_parallelism"

#: Keywords that switch something on or off.
SWITCHES = frozenset(
    """attention_in_fp32 query_key_layer_scaling fused_softmax fused_dropout fused_bias_gelu distribute_embedding use_alibi
    fp32_residual_addition flash_attention zero_init""".split()
)


@dataclass(frozen=True)
class Mark:
    """What a script asked for a module.

    Attributes:
        enabled: whether it is to be distributed.
        overrides: arguments of the distributed module, by name.
        keeps_weights: whether its weights go into the distributed module.
        plan: how the linear maps in the outermost module with this mark are split; None leaves it to the library.
        in_place: whether modules keep their classes and names, and only linear maps and embeddings in them are replaced.
    """

    enabled: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    keeps_weights: bool = True
    plan: Mapping[str, str] | None = None
    in_place: bool = False


#: Of modules that nothing has marked.
_NO_MARK = Mark()


@contextlib.contextmanager
def tensor_parallelism(
    enabled: bool = True, *, keep_weights: bool = True, plan: Mapping[str, str] | None = None, **overrides: Any
) -> Iterator[None]:
    """Distribute the supported modules created inside the block, when ``smp.DistributedModel`` wraps the model.

    Of nested modules the outermost is distributed. Of nested scopes the innermost counts. Some modules are left as
    they are, with a warning: those that share weights with another, and those with sizes that the tensor parallel
    degree does not divide.

    Args:
        enabled: False leaves the modules created inside as they are.
        keep_weights: False lets the distributed modules draw new weights, instead of those that a module has when it
            is wrapped. This saves the time to copy them if they do not matter.
        plan: how linear maps in the outermost module created inside are split, if no distributed class replaces it:
            from names, with ``*`` for any part of one, to the styles of Transformers. Default: the model's own
            plan, if it has one. An empty plan splits each linear map separately.
        overrides: arguments of the distributed modules, instead of those of the original.

    Raises:
        SMPUserError: an unknown keyword or style, or a switch that is not true or false.

    Example:
        >>> with smp.tensor_parallelism():
        ...     model = LlamaForCausalLM.from_pretrained("a-folder")  # doctest: +SKIP
    """
    with mark_constructed(_MARK, _mark(enabled, keep_weights, plan, overrides)):
        yield


def set_tensor_parallelism(
    module: nn.Module,
    enabled: bool = True,
    *,
    keep_weights: bool = True,
    plan: Mapping[str, str] | None = None,
    **overrides: Any,
) -> None:
    """Distribute the outermost supported modules in ``module``, itself included, or leave all of them as they are.

    Use it if a script cannot put a scope around the creation of a model. Call it before ``smp.DistributedModel``.
    A later call for a part of the module counts for that part.

    Args:
        module: the model, or a part of it.
        enabled: False takes the whole subtree out.
        keep_weights: as in :func:`tensor_parallelism`.
        plan: likewise, for names in ``module``.
        overrides: as in :func:`tensor_parallelism`.

    Raises:
        SMPUserError: no module, or an unknown argument.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> smp.set_tensor_parallelism(mlp, True)  # before smp.DistributedModel
    """
    if not isinstance(module, nn.Module):
        raise SMPUserError(f"set_tensor_parallelism got {kind_of(module)}; pass a module of the model", code="SMP307")
    mark = _mark(enabled, keep_weights, plan, overrides)
    for part in module.modules():
        part.__dict__[_MARK] = mark


def mark_in_place(module: nn.Module) -> None:
    """Distribute the linear maps and embeddings in ``module``; all other modules in it keep their classes and names."""
    for part in module.modules():
        part.__dict__[_MARK] = Mark(enabled=True, in_place=True)


def mark_of(module: nn.Module) -> Mark:
    """Return a script's mark on ``module``."""
    return module.__dict__.get(_MARK, _NO_MARK)


def is_marked(module: nn.Module) -> bool:
    """Return whether a script has marked any part of ``module``, to be distributed or not."""
    return any(_MARK in part.__dict__ for part in module.modules())


def _mark(enabled: bool, keep_weights: bool, plan: object, overrides: Mapping[str, Any]) -> Mark:
    checked = None if plan is None else checked_plan(plan)
    mark = Mark(_truth("enabled", enabled), _checked(overrides), _truth("keep_weights", keep_weights), checked)
    if enabled:
        tell_without_effect(overrides)
    return mark


def _checked(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in overrides.items():
        if name in SWITCHES:
            _truth(name, value)
            continue
        known = known_arguments() | SWITCHES
        if name not in known:
            raise SMPUserError(
                f"no distributed module has an argument {name!r}{suggest(name, known)}; it would have no effect: remove it",
                code="SMP307",
            )
    return dict(overrides)


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SMPUserError(f"{name} is {value!r}, {kind_of(value)}; it is a switch: use True or False", code="SMP307")
    return value
