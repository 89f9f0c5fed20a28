"""The ``distribution`` dictionary of a call as ``distributed=``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from smp_estimator.migration.source import call, literal_value

if TYPE_CHECKING:
    from smp_estimator.migration.source import ScriptSource


def translate_distribution(
    source: ScriptSource, node: ast.expr, indent: int, more: list[tuple[str, str]]
) -> tuple[str, str | None]:
    """Return the value of ``distributed=`` for a distribution.

    Args:
        indent: number of spaces before the line that the value is on.
        more: further arguments of ModelParallel.

    Returns:
        The text, and the name that it uses. The name is None if SDK v3 has no counterpart or the strategy is off.
    """
    parts = _items(node)
    if parts is None:
        words = [("", source.moved(node, indent)), *more]
        return call("ModelParallel.from_distribution", words, indent), "ModelParallel"
    libraries = _items(parts.get("smdistributed")) or {}
    mpi = _items(parts.get("mpi"))
    model = _items(libraries.get("modelparallel"))
    if model is not None and _is_on(model):
        return _model_parallel(source, model, mpi or {}, indent, more), "ModelParallel"
    if "modelparallel" in libraries and model is None:  # a variable among braces
        return call(
            "ModelParallel.from_distribution", [("", source.moved(node, indent)), *more], indent
        ), "ModelParallel"
    if "dataparallel" in libraries:
        source.note(
            node,
            "smdistributed.dataparallel has no place in SDK v3: distributed=Torchrun() is given, which starts the ranks; let the "
            'script use init_process_group("nccl"), or ModelParallel(parameters={"ddp": True}) and this library',
        )
        return "Torchrun()", "Torchrun"
    if _is_on(_items(parts.get("torch_distributed")) or {}):
        return "Torchrun()", "Torchrun"
    if mpi is not None and _is_on(mpi):
        return _mpi(source, mpi, indent), "MPI"
    for name in parts:
        if name not in ("smdistributed", "mpi", "torch_distributed"):
            source.note(node, f"the strategy {name!r} has no place in SDK v3 and is left out")
    return "", None


def _model_parallel(
    source: ScriptSource, model: dict[str, ast.expr], mpi: dict[str, ast.expr], indent: int, more: list[tuple[str, str]]
) -> str:
    words = []
    if "parameters" in model:
        words.append(("parameters", source.moved(model["parameters"], indent + 4)))
    for name in ("processes_per_host", "custom_mpi_options"):
        if name in mpi:
            words.append((name, source.moved(mpi[name], indent + 4)))
    return call("ModelParallel", [*words, *more], indent)


def _mpi(source: ScriptSource, mpi: dict[str, ast.expr], indent: int) -> str:
    words = []
    if "processes_per_host" in mpi:
        words.append(("process_count_per_node", source.segment(mpi["processes_per_host"])))
    if "custom_mpi_options" in mpi:
        words.append(("mpi_additional_options", f"{source.segment(mpi['custom_mpi_options'])}.split()"))
    return call("MPI", words, indent)


def parameters_of(node: ast.expr | None) -> list[ast.AST]:
    """Return the parts of a distribution that are kept as written.

    These are the library's parameters, or the whole expression if it is not a plain dictionary.
    """
    parts = _items(node)
    if parts is None:
        return [node] if node is not None else []
    model = _items((_items(parts.get("smdistributed")) or {}).get("modelparallel")) or {}
    return [model["parameters"]] if "parameters" in model else []


def _items(node: ast.AST | None) -> dict[str, ast.expr] | None:
    """Return the entries of a dictionary literal with plain string keys, or None for any other expression."""
    if not isinstance(node, ast.Dict):
        return None
    keys = [literal_value(key) if key is not None else None for key in node.keys]
    if not all(isinstance(key, str) for key in keys):
        return None
    return dict(zip([str(key) for key in keys], node.values, strict=True))


def _is_on(part: dict[str, ast.expr]) -> bool:
    """Return whether a strategy is on, judging by its source; a variable counts as on."""
    enabled = part.get("enabled")
    return enabled is not None and (not isinstance(enabled, ast.Constant) or enabled.value is True)
