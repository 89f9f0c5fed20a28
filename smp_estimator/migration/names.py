"""The names of the SDK in a script, their modules in SDK v3, and the imports that a change needs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_estimator.migration.holders import Holders
from smp_estimator.migration.values import Values

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

#: Module of SDK v3 → modules of SDK v2 and the names that moved from there.
_MOVED_FROM = {
    "sagemaker.core.helper.session_helper": {
        "sagemaker": "Session get_execution_role",
        "sagemaker.session": "Session get_execution_role",
    },
    "sagemaker.core.inputs": {
        "sagemaker.inputs": "TrainingInput FileSystemInput ShuffleConfig",
        "sagemaker": "TrainingInput",
    },
    "sagemaker.core": {"sagemaker": "image_uris"},
    "sagemaker.core.s3": {"sagemaker.s3": "S3Uploader S3Downloader s3_path_join parse_s3_url"},
    "sagemaker.core.common_utils": {"sagemaker.utils": "name_from_base unique_name_from_base name_from_image"},
    "sagemaker.core.debugger": {
        "sagemaker.debugger": """ProfilerConfig FrameworkProfile Rule ProfilerRule rule_configs DebuggerHookConfig
        CollectionConfig TensorBoardOutputConfig""",
    },
    "sagemaker.core.analytics": {"sagemaker.analytics": "TrainingJobAnalytics"},
    "sagemaker.core.instance_group": {"sagemaker.instance_group": "InstanceGroup"},
    "sagemaker.core.parameter": {
        "sagemaker.parameter": "IntegerParameter ContinuousParameter CategoricalParameter",
        "sagemaker.tuner": "IntegerParameter ContinuousParameter CategoricalParameter",
    },
    "sagemaker.core.experiments.run": {"sagemaker.experiments.run": "Run load_run", "sagemaker.experiments": "Run"},
    "sagemaker.core.workflow.pipeline_context": {"sagemaker.workflow.pipeline_context": "PipelineSession"},
}

#: Other names of SDK v2 → the module of SDK v3 that has the name.
MOVED = {
    f"{old}.{name}": new for new, parts in _MOVED_FROM.items() for old, names in parts.items() for name in names.split()
}

#: Where the names stand that changed calls use.
HOMES = {
    **dict.fromkeys(["ModelParallel", "ModelTrainer"], "smp_estimator.model_trainer"),
    **dict.fromkeys(
        """CheckpointConfig Compute InputData MetricDefinition Networking OutputDataConfig SourceCode StoppingCondition
        Tag""".split(),
        "sagemaker.core.training.configs",
    ),
    **dict.fromkeys(["MPI", "SMP", "Torchrun"], "sagemaker.train.distributed"),
    "Path": "pathlib",
    "model_trainer": "smp_estimator",
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
    "sagemaker.__version__": 'importlib.metadata.version("sagemaker")',
    "sagemaker.local.LocalSession": "training_mode=Mode.LOCAL_CONTAINER of ModelTrainer",
}


@dataclass
class ScriptNames:
    """The meaning of the names in a script, or in all cells of a notebook.

    Attributes:
        bound: name → its full imported name.
        holders: what holds an estimator whose call is changed.
        values: values of variables.
    """

    bound: dict[str, str] = field(default_factory=dict)
    values: Values = field(default_factory=Values)

    def __post_init__(self) -> None:
        self.holders = Holders(lambda node: self.moved_kind(node) is not None)

    def read(self, sources: Sequence[ScriptSource]) -> None:
        """Take in the imports, the variables and the estimators of all pieces."""
        trees = [source.tree for source in sources]
        for source in sources:
            for node in _imports(source):
                if isinstance(node, ast.Import):
                    self._bind_modules(node)
                else:
                    self._bind_members(node)
        self.values.read(trees)
        self.holders.read(trees)

    def _bind_members(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def _bind_modules(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self.bound[alias.asname] = alias.name
            else:  # "import a.b" binds a
                package = alias.name.split(".")[0]
                self.bound[package] = package

    def full(self, node: ast.AST) -> str:
        """Return an expression's full imported name, or an empty string if it does not come from an import."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.full(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def root(self, node: ast.AST) -> str:
        """Return the full imported name of the first word of a dotted name."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self.full(node)

    def estimator_kind(self, node: ast.AST) -> str | None:
        """Return the estimator class that a call creates, or None for any other expression."""
        return ESTIMATORS.get(self.full(node.func)) if isinstance(node, ast.Call) else None

    def moved_kind(self, node: ast.AST) -> str | None:
        """Return the class if the call creates an estimator and names all of its arguments."""
        if not isinstance(node, ast.Call) or hidden_arguments(node) is not None:
            return None
        return self.estimator_kind(node)

    def is_estimator(self, node: ast.AST) -> bool:
        """Return whether an expression is an estimator whose call is changed."""
        return self.holders.is_one(node)

    @property
    def model_parallel(self) -> str:
        """Return what ModelTrainer's ModelParallel is called here; a script may have the strategy of that name."""
        is_taken = self.bound.get("ModelParallel") == "smp_estimator.ModelParallel"
        return "model_trainer.ModelParallel" if is_taken else "ModelParallel"


def hidden_arguments(node: ast.Call) -> ast.expr | None:
    """Return the first ``*`` or ``**`` argument of a call, or None."""
    stars = [value for value in node.args if isinstance(value, ast.Starred)]
    return next(iter([*stars, *(word.value for word in node.keywords if word.arg is None)]), None)


def moved_names(source: ScriptSource, names: ScriptNames) -> dict[tuple[int, int], str]:
    """Return the positions of SDK v2 names with a module prefix, and the names to use after they are imported directly."""
    found = {}
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute) or not source.is_placed(node):
            continue
        # A script that sets such an attribute does not use the SDK's.
        is_read = not isinstance(node.ctx, ast.Store)
        if is_read and names.full(node) in MOVED:
            found[source.span(node)] = node.attr
    return found


def kept_names(source: ScriptSource, names: ScriptNames) -> set[str]:
    """Return the full names in ``sagemaker`` that are used after the change, and note those that SDK v3 does not have."""
    kept = set()
    for node in ast.walk(source.tree):
        full = names.full(node)
        if full.split(".")[0] != "sagemaker":
            continue
        parent = source.parent(node)
        is_part = isinstance(parent, ast.Attribute) and bool(names.full(parent))
        was_replaced = source.is_placed(node) and _has_moved(full)
        if is_part or was_replaced:
            continue
        kept |= {full, names.root(node)}
        if isinstance(node, ast.Attribute):
            _note_if_missing(source, node, full)
    return kept


def rename_classes(source: ScriptSource, names: ScriptNames) -> tuple[set[str], set[str]]:
    """Change mentions of estimator classes outside of calls to ModelTrainer where that is the same.

    Returns:
        The full names of classes that stay, and the names that the changed code needs.
    """
    kept, needed = set(), set()
    for node in ast.walk(source.tree):
        full = names.full(node)
        if full not in ESTIMATORS or not isinstance(node, ast.Name | ast.Attribute):
            continue
        parent = source.parent(node)
        if isinstance(parent, ast.Call) and parent.func is node:
            if names.moved_kind(parent) is None:
                kept |= {full, names.root(node)}
            continue
        if _is_type(source, node) and source.is_placed(node):
            source.replace_node(node, "ModelTrainer")
            needed.add("ModelTrainer")
            continue
        kept |= {full, names.root(node)}
        if not isinstance(parent, ast.Attribute):
            source.note(
                node, f"{source.segment(node)} stays here: SDK v3 has ModelTrainer, which takes other arguments"
            )
    return kept, needed


def _is_type(source: ScriptSource, node: ast.AST) -> bool:
    """Return whether a class is an annotation, or the second argument of ``isinstance``."""
    child, parent = node, source.parent(node)
    # The class may be inside a union, an Optional or a tuple of classes.
    while isinstance(parent, ast.Subscript | ast.Tuple | ast.BinOp | ast.List):
        child, parent = parent, source.parent(parent)
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func) == "isinstance" and child in parent.args[1:]
    if isinstance(parent, ast.AnnAssign | ast.arg):
        return parent.annotation is child
    return isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and parent.returns is child


def _has_moved(full: str) -> bool:
    """Return whether a full name is one that moves or an estimator class, or an attribute of one."""
    return any(f"{full}.".startswith(f"{moved}.") for moved in (*MOVED, *ESTIMATORS))


def _moves(full: str) -> bool:
    """Return whether a full name moves, is the prefix of a name that moves, or is an estimator class."""
    if _has_moved(full):
        return True
    return any(moved.startswith(f"{full}.") for moved in (*MOVED, *ESTIMATORS))


def move_imports(
    source: ScriptSource, names: ScriptNames, needed: Iterable[str], gone: set[str], still_used: set[str]
) -> None:
    """Write the imports that the changed piece needs, and take out those of names that it no longer has.

    Args:
        needed: names that changed calls use.
        gone: full names that nothing in the script uses any more.
        still_used: full names that something in the script uses.
    """
    wanted: dict[str, set[str]] = {}
    for name in needed:
        wanted.setdefault(HOMES[name], set()).add(name)
    for node in _imports(source):
        kept = []
        for alias in node.names:
            full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if full in gone or _is_left_behind(full, node, still_used):
                continue
            if isinstance(node, ast.ImportFrom) and full in MOVED:
                wanted.setdefault(MOVED[full], set()).add(_as(alias))
            else:
                kept.append(alias)
        _note_missing(source, node, kept)
        if len(kept) == len(node.names):
            continue
        if kept:
            words = ", ".join(map(_as, kept))
            text = f"from {node.module} import {words}" if isinstance(node, ast.ImportFrom) else f"import {words}"
            source.replace_node(node, text)
        else:
            source.remove_statement(node)
    if wanted:
        _insert(source, names, [_import(home, sorted(held)) for home, held in sorted(wanted.items())])


def _is_left_behind(full: str, node: ast.Import | ast.ImportFrom, kept: set[str]) -> bool:
    """Return whether the script uses nothing of an imported module of SDK v2 but what has moved."""
    if not full.startswith("sagemaker."):
        return False
    is_moved_itself = full in (*MOVED, *ESTIMATORS)
    if is_moved_itself or not _moves(full):
        return False
    # ``import sagemaker.x`` also binds the name ``sagemaker``.
    if isinstance(node, ast.Import) and "sagemaker" in kept:
        return False
    return not any(f"{each}.".startswith(f"{full}.") for each in kept)


def _import(home: str, held: list[str]) -> str:
    line = f"from {home} import {', '.join(held)}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"from {home} import (", *(f"    {name}," for name in held), ")"])


def _note_missing(source: ScriptSource, node: ast.Import | ast.ImportFrom, kept: list[ast.alias]) -> None:
    """Add notes on remaining imports that SDK v3 does not have."""
    for alias in kept:
        full = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        _note_if_missing(source, node, full)


def _note_if_missing(source: ScriptSource, node: ast.AST, full: str) -> None:
    """Add a note if SDK v3 has no module of the SDK with this full name."""
    package, _, inside = full.partition(".")
    if package != "sagemaker" or not inside:
        return
    if inside.split(".")[0] in _OF_VERSION_3:
        return
    instead = _RENAMED.get(full)
    advice = f"; it has {instead}" if instead else ""
    source.note(node, f"SDK v3 has no {full}{advice}")


def _insert(source: ScriptSource, names: ScriptNames, lines: list[str]) -> None:
    """Insert imports where the SDK was imported, if nothing uses them earlier; else behind the imports at the top."""
    body = source.tree.body
    text = "\n".join(lines) + "\n"
    after = _header_length(source)
    sdk = _first_import_of_sdk(body, names, after)
    if sdk is not None:
        place = source.line_start(sdk)
    elif after < len(body):
        place = source.top_of(body[after])
        if not after:
            text += "\n"
    else:
        place = len(source.text)
        if not source.text.endswith("\n"):
            text = "\n" + text
    source.replace(place, place, text)


def _header_length(source: ScriptSource) -> int:
    """Return the number of statements at the top that are the docstring, imports or magics."""
    body = source.tree.body
    for number, node in enumerate(body):
        is_magic = node.lineno in source.magics
        if not is_magic and not _is_header(number, node):
            return number
    return len(body)


def _is_header(number: int, node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_import_of_sdk(body: list[ast.stmt], names: ScriptNames, after: int) -> ast.stmt | None:
    """Return the first import of the SDK, or None if a statement from the position ``after`` on uses the SDK before it."""
    for number, node in enumerate(body):
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_of_sdk(node):
            return node
        if number >= after and _uses_sdk(node, names):
            return None
    return None


def _is_of_sdk(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        modules = [alias.name for alias in node.names]
    packages = {module.split(".")[0] for module in modules}
    return not packages.isdisjoint(("sagemaker", "smp_estimator"))


def _uses_sdk(statement: ast.stmt, names: ScriptNames) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    for node in ast.walk(statement):
        if names.is_estimator(node):
            return True
        if names.full(node).startswith(("sagemaker", "smp_estimator")):
            return True
    return False


def _imports(source: ScriptSource) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that name their module in full."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield node
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node


def _as(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name
