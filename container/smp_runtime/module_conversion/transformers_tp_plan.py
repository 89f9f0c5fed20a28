"""Tensor parallel plans as Transformers writes them: a style for each name of a submodule, with ``*`` for a part of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from smp_config.errors import kind_of, suggest
from smp_runtime.errors import SMPUserError
from smp_runtime.nn.split_in_place.linear import LinearSplit, is_linear, is_transposed

if TYPE_CHECKING:
    from torch import nn

#: The ways in which a plan splits a linear map.
_COLUMNS, _ROWS = LinearSplit(columns=True), LinearSplit(columns=False)
_COLUMNS_JOINED, _ROWS_OF_WHOLE = LinearSplit(columns=True, joins=True), LinearSplit(columns=False, joins=True)
#: Styles of linear maps. Local styles need no distinction here, since a split weight is a plain parameter.
_LINEAR = {
    "colwise": _COLUMNS,
    "local_colwise": _COLUMNS,
    "rowwise": _ROWS,
    "local_rowwise": _ROWS,
    "colwise_rep": _COLUMNS_JOINED,
    "colwise_gather_output": _COLUMNS_JOINED,
    "rowwise_rep": _ROWS_OF_WHOLE,
    "rowwise_split_input": _ROWS_OF_WHOLE,
}
#: Styles that need no action: the layout behind these modules follows from the maps inside.
_WHOLE = frozenset({"replicate", "local", "gather", "all_reduce", "replicated_with_grad_allreduce"})
#: Styles of models' own plans that are not supported yet. Modules with these styles stay whole, and so do the modules
#: beside them.
_LATER = frozenset(
    """sequence_parallel packed_colwise packed_rowwise local_packed_colwise local_packed_rowwise embedding_rowwise
    embedding_colwise moe_tp_experts moe_identity_expert mla_kv_a_proj local_params grouped_gemm ep_router""".split()
)

#: By the path of a linear map within a module, how it is split.
Leaves = Mapping[str, LinearSplit]


def checked_plan(plan: object) -> dict[str, str]:
    """Return a script's plan after a check.

    Raises:
        SMPUserError: it is no plan, or has an unknown style.
    """
    if not isinstance(plan, Mapping) or not all(isinstance(s, str) for pair in plan.items() for s in pair):
        raise SMPUserError(
            f"plan is {plan!r}; pass a dictionary from names of submodules, with * for any part of a name, to styles: "
            f"{', '.join(_LINEAR)}, replicate",
            code="SMP307",
        )
    known = [*_LINEAR, *_WHOLE]
    for pattern, style in plan.items():
        if style not in known:
            raise SMPUserError(
                f"the plan has the style {style!r} for {pattern!r}{suggest(style, known)}; the styles are {', '.join(known)}",
                code="SMP307",
            )
    return dict(plan)


def leaves_of_plan(module: nn.Module, plan: Mapping[str, str], *, is_scripts: bool) -> dict[str, LinearSplit]:
    """Return how a plan splits the linear maps in a module, by their paths.

    Args:
        is_scripts: a script wrote it, so that every name in it must exist. In a model's own plan some names may be
            those of other variants of the model.

    Raises:
        SMPUserError: in a script's plan, a name does not exist in the module, or is no linear map.
    """
    found: dict[str, LinearSplit] = {}
    left: set[str] = set()
    modules = dict(module.named_modules())
    for pattern, style in plan.items():
        expression = _compiled(pattern)
        paths = [path for path in modules if expression.fullmatch(path)]
        if is_scripts and not paths:
            raise _error_without_module(pattern, module)
        splits_parameter = not paths and _names_parameter(module, pattern)
        stays_whole = style in _LATER or (style in _LINEAR and splits_parameter)
        if stays_whole:
            for path in paths or [pattern]:
                left.update(_parents(path, modules))
        elif style in _LINEAR:
            parts = {path: modules[path] for path in paths}
            found.update(_splits_of(parts, style, is_scripts=is_scripts))
    # Modules beside those with such styles stay whole too, since they take one another's results.
    kept = {}
    for path, split in found.items():
        parent = path.rpartition(".")[0]
        if parent not in left:
            kept[path] = split
    return kept


def _error_without_module(pattern: str, module: nn.Module) -> SMPUserError:
    linear_maps = [path for path, part in module.named_modules() if is_linear(part)]
    names = ", ".join(linear_maps) or "none"
    return SMPUserError(
        f"the plan has a style for {pattern!r}, but the {type(module).__name__} has no submodule of that name; its linear "
        f"maps are {names}",
        code="SMP307",
    )


def _splits_of(parts: Mapping[str, nn.Module], style: str, *, is_scripts: bool) -> dict[str, LinearSplit]:
    """Return how a style splits the linear maps among some modules."""
    found = {}
    for path, part in parts.items():
        if is_linear(part):
            found[path] = replace(_LINEAR[style], transposed=is_transposed(part))
        elif is_scripts:
            raise SMPUserError(
                f"the plan has the style {style!r} for {path!r}, {kind_of(part)}; it is for linear maps (nn.Linear, Conv1D)",
                code="SMP307",
            )
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern in which ``*`` stands for one part of a name."""
    return re.compile(pattern.replace(".", r"\.").replace("*", "[^.]+"))


def _names_parameter(module: nn.Module, pattern: str) -> bool:
    expression = _compiled(pattern)
    return any(expression.fullmatch(name) for name, _ in module.named_parameters())


def _parents(path: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    expression = _compiled(path.rpartition(".")[0])
    return (name for name in modules if expression.fullmatch(name))
