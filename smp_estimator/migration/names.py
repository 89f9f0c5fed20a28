"""The names of the SDK in a script, their modules in SDK v3, and the imports that a change needs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_estimator.migration.source import ScriptSource

#: Estimators, by their full name.
ESTIMATORS = {
    "sagemaker.pytorch.PyTorch": "PyTorch",
    "sagemaker.pytorch.estimator.PyTorch": "PyTorch",
    "sagemaker.huggingface.HuggingFace": "HuggingFace",
    "sagemaker.huggingface.estimator.HuggingFace": "HuggingFace",
    "smp_estimator.SMPEstimator": "SMPEstimator",
    "smp_estimator.sdk_v2.estimator.SMPEstimator": "SMPEstimator",
    "smp_estimator.SMPHuggingFace": "SMPHuggingFace",
    "smp_estimator.sdk_v2.estimator.SMPHuggingFace": "SMPHuggingFace",
}

#: Other names of SDK v2 → the module of SDK v3 that has the name.
MOVED = {
    "sagemaker.Session": "sagemaker.core.helper.session_helper",
    "sagemaker.session.Session": "sagemaker.core.helper.session_helper",
    "sagemaker.get_execution_role": "sagemaker.core.helper.session_helper",
    "sagemaker.session.get_execution_role": "sagemaker.core.helper.session_helper",
    "sagemaker.inputs.TrainingInput": "sagemaker.core.inputs",
    "sagemaker.inputs.FileSystemInput": "sagemaker.core.inputs",
    "sagemaker.TrainingInput": "sagemaker.core.inputs",
    "sagemaker.image_uris": "sagemaker.core",
}

#: Where the names stand that changed calls use.
HOMES = {
    **dict.fromkeys(["ModelParallel", "ModelTrainer"], "smp_estimator.model_trainer"),
    **dict.fromkeys(
        """CheckpointConfig Compute InputData MetricDefinition Networking OutputDataConfig SourceCode StoppingCondition
        Tag""".split(),
        "sagemaker.core.training.configs",
    ),
    **dict.fromkeys(["MPI", "Torchrun"], "sagemaker.train.distributed"),
    "Mode": "sagemaker.train.model_trainer",
    "Session": "sagemaker.core.helper.session_helper",
    "image_uris": "sagemaker.core",
    "FailedStatusError": "sagemaker.core.utils.exceptions",
}


#: Characters of an import that is not wrapped.
_LINE = 100

#: Packages below ``sagemaker`` that SDK v3 has.
_OF_VERSION_3 = frozenset("ai_registry core lineage mlops serve train".split())

#: Names of SDK v2 that are called otherwise in SDK v3.
_RENAMED = {
    "sagemaker.exceptions.UnexpectedStatusException": "FailedStatusError of sagemaker.core.utils.exceptions",
    "sagemaker.tuner.HyperparameterTuner": "HyperparameterTuner of sagemaker.train.tuner",
    "sagemaker.local.LocalSession": "training_mode=Mode.LOCAL_CONTAINER of ModelTrainer",
}


@dataclass
class ScriptNames:
    """The meaning of the names in a script, or in all cells of a notebook.

    Attributes:
        bound: name → its full imported name.
        estimators: variables that hold an estimator.
    """

    bound: dict[str, str] = field(default_factory=dict)
    estimators: set[str] = field(default_factory=set)

    def read(self, source: ScriptSource) -> None:
        """Take in the imports and the estimators of one more piece."""
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.bound[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign) and self.estimator_kind(node.value):
                self.estimators |= {ast.unparse(target) for target in node.targets}
            elif isinstance(node, ast.AnnAssign) and node.value is not None and self.estimator_kind(node.value):
                self.estimators.add(ast.unparse(node.target))

    def full(self, node: ast.AST) -> str:
        """Return an expression's full imported name, or an empty string if it does not come from an import."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def estimator_kind(self, node: ast.AST) -> str | None:
        """Return the estimator class that a call creates, or None for any other expression."""
        return ESTIMATORS.get(self.full(node.func)) if isinstance(node, ast.Call) else None

    def is_estimator(self, node: ast.AST) -> bool:
        """Return whether an expression is a variable that holds an estimator, or a call that creates one."""
        return ast.unparse(node) in self.estimators or self.estimator_kind(node) is not None


def moved_names(source: ScriptSource, names: ScriptNames) -> dict[tuple[int, int], str]:
    """Return the positions of SDK v2 names with a module prefix, and the names to use after they are imported directly."""
    found = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and names.full(node) in MOVED and not isinstance(node.ctx, ast.Store):
            start, end = source.span(node)
            if source.text[start:end] == ast.unparse(node):  # before Python 3.12, places in f-strings may be others
                found[start, end] = node.attr
    return found


def note_kept_names(source: ScriptSource, names: ScriptNames) -> bool:
    """Add notes on names in ``sagemaker`` that SDK v3 does not have.

    Return whether any name stays, so that the import of ``sagemaker`` is still needed.
    """
    used = {
        full: node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and (full := names.full(node))
    }
    kept = {full: node for full, node in used.items() if full.startswith("sagemaker.") and not _moves(full)}
    for full, node in kept.items():
        is_whole = not any(other.startswith(f"{full}.") for other in kept)
        if is_whole and full.split(".")[1] not in _OF_VERSION_3:
            instead = _RENAMED.get(full)
            source.note(node, f"SDK v3 has no {full}" + (f"; it has {instead}" if instead else ""))
    return bool(kept)


def _moves(full: str) -> bool:
    """Return whether a full name moves, is the prefix of a name that moves, or is an estimator class."""
    return any(f"{moved}.".startswith(f"{full}.") or full.startswith(f"{moved}.") for moved in (*MOVED, *ESTIMATORS))


def move_imports(source: ScriptSource, names: ScriptNames, needed: Iterable[str], gone: set[str]) -> None:
    """Write the imports that the changed piece needs, and take out those of names that it no longer has.

    Args:
        needed: names that changed calls use.
        gone: full names that nothing in the script uses any more.
    """
    wanted: dict[str, set[str]] = {}
    for name in needed:
        wanted.setdefault(HOMES[name], set()).add(name)
    first: ast.stmt | None = None
    for node in _imports(source):
        kept = []
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if full in gone:
                continue
            if isinstance(node, ast.ImportFrom) and full in MOVED:
                wanted.setdefault(MOVED[full], set()).add(_as(alias))
            else:
                kept.append(alias)
        _note_missing(source, node, kept)
        if len(kept) == len(node.names):
            continue
        first = first or node
        if kept:
            words = ", ".join(map(_as, kept))
            text = f"from {node.module} import {words}" if isinstance(node, ast.ImportFrom) else f"import {words}"
            source.replace_node(node, text)
        else:
            source.remove_lines(node)
    if wanted:
        _insert(source, [_import(home, sorted(held)) for home, held in sorted(wanted.items())], first)


def _import(home: str, held: list[str]) -> str:
    line = f"from {home} import {', '.join(held)}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"from {home} import (", *(f"    {name}," for name in held), ")"])


def _note_missing(source: ScriptSource, node: ast.Import | ast.ImportFrom, kept: list[ast.alias]) -> None:
    """Add notes on remaining imports that SDK v3 does not have."""
    for alias in kept:
        full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        parts = full.split(".")
        if parts[0] == "sagemaker" and len(parts) > 1 and parts[1] not in _OF_VERSION_3:
            instead = _RENAMED.get(full)
            source.note(node, f"SDK v3 has no {full}" + (f"; it has {instead}" if instead else ""))


def _insert(source: ScriptSource, lines: list[str], first: ast.stmt | None) -> None:
    """Insert new imports in the place of the first old one, else before the first statement that is not an import."""
    text = "\n".join(lines) + "\n"
    if first is not None:
        indent = " " * source.indent_of(first)
        place = source.line_start(first)
        source.replace(place, place, "".join(f"{indent}{line}\n" for whole in lines for line in whole.split("\n")))
        return
    body = source.tree.body
    after = 0
    for number, node in enumerate(body):
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        after = number + 1
    place = source.line_start(body[after]) if after < len(body) else len(source.text)
    if after == len(body) and not source.text.endswith("\n"):
        text = "\n" + text
    source.replace(place, place, text if after else text + "\n" if body else text)


def _imports(source: ScriptSource) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module and not node.level):
            yield node


def _as(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name
