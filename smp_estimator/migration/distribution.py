"""The ``distribution`` dictionary of a call as ``distributed=``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from smp_config.parameters import KEYS
from smp_estimator.migration.source import call, is_literal, literal_value

if TYPE_CHECKING:
    from smp_estimator.migration.names import ScriptNames
    from smp_estimator.migration.source import ScriptSource
    from smp_estimator.migration.values import Values


#: Parameters that only version 2 of the original has, and how SDK v3 takes its parameters.
_ONLY_VERSION_2 = {
    "hybrid_shard_degree",
    "sm_activation_offloading",
    "activation_loading_horizon",
    "context_parallel_degree",
    "expert_parallel_degree",
}
_OF_VERSION_2 = _ONLY_VERSION_2 | {
    "tensor_parallel_degree",
    "fsdp_cache_flush_warnings",
    "allow_empty_shards",
    "random_seed",
}

#: Enough of the distribution for SDK v3 to choose the image of version 2 of the library.
IMAGE_OF_VERSION_2 = '{"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True}}}'


def strategy_of(node: ast.AST | None, values: Values) -> str:
    """Return the strategy of a distribution.

    It is ``modelparallel``, ``modelparallel 2`` (version 2 of the library), ``dataparallel``, ``torch_distributed``,
    ``pytorchddp``, ``pytorchxla``, ``mpi``, ``none``, or ``unknown`` if only a run knows.
    """
    node = values.resolve(node)
    if node is None:
        return "none"
    # None, or an empty dictionary.
    if is_literal(node) and not literal_value(node):
        return "none"
    parts = _items(node)
    if parts is None:
        return "unknown"
    libraries: dict[str, ast.expr] | None = {}
    if "smdistributed" in parts:
        libraries = _items(values.resolve(parts["smdistributed"]))
    if libraries is None or _is_part_on(libraries, "modelparallel", values):
        return _model_parallel_strategy(parts, libraries or {}, values)
    if _is_part_on(libraries, "dataparallel", values):
        return "dataparallel"
    for name in ("torch_distributed", "pytorchddp", "pytorchxla", "mpi"):
        if _is_part_on(parts, name, values):
            return name
    return "none"


def _model_parallel_strategy(parts: dict[str, ast.expr], libraries: dict[str, ast.expr], values: Values) -> str:
    model = _items(values.resolve(libraries.get("modelparallel"))) or {}
    parameters = _items(values.resolve(model.get("parameters"))) or {}
    # Version 2 is started by torchrun, version 1 by mpirun, where this library's version 1 has more parameters than the original's.
    of_version_2 = _ONLY_VERSION_2
    if _is_part_on(parts, "mpi", values):
        of_version_2 = _ONLY_VERSION_2 - KEYS
    has_its_parameters = not of_version_2.isdisjoint(parameters)
    if has_its_parameters or _is_part_on(parts, "torch_distributed", values):
        return "modelparallel 2"
    return "modelparallel"


def translate_distribution(
    source: ScriptSource,
    node: ast.expr,
    indent: int,
    more: list[tuple[str, str]],
    names: ScriptNames,
    *,
    is_ours: bool = False,
) -> tuple[str, set[str]]:
    """Return the value of ``distributed=`` for a distribution.

    Args:
        indent: number of spaces before the line that the value is on.
        more: further arguments of ModelParallel.
        is_ours: whether version 2 of the library is this package's, as for SMPEstimator.

    Returns:
        The text, and the names that it uses. Both are empty if SDK v3 has no counterpart or the strategy is off.
    """
    values = names.values
    strategy = strategy_of(node, values)
    plain = _items(values.resolve(node)) or {}
    if strategy in ("modelparallel", "unknown"):
        return _of_this_library(source, node, indent, more, names)
    if strategy == "modelparallel 2":
        return _version_2(source, node, indent, values, is_ours), {"Torchrun", "SMP"}
    if strategy == "dataparallel":
        source.note(
            node,
            "smdistributed.dataparallel has no place in SDK v3: distributed=Torchrun() is given, which starts the ranks; let the "
            'script use init_process_group("nccl"), or ModelParallel(parameters={"ddp": True}) and this library',
        )
        return "Torchrun()", {"Torchrun"}
    if strategy == "pytorchddp":
        source.note(
            node,
            "pytorchddp started the ranks with mpirun: distributed=Torchrun() is given; see that the script reads RANK and "
            "LOCAL_RANK, not OMPI_COMM_WORLD_RANK",
        )
        return "Torchrun()", {"Torchrun"}
    if strategy in ("torch_distributed", "pytorchxla"):
        return "Torchrun()", {"Torchrun"}
    if strategy == "mpi":
        return _mpi(source, node, indent, values), {"MPI"}
    for name in plain:
        if name not in ("smdistributed", "mpi", "torch_distributed", "pytorchddp", "pytorchxla"):
            source.note(node, f"the strategy {name!r} has no place in SDK v3 and is left out")
    return "", set()


def _of_this_library(
    source: ScriptSource, node: ast.expr, indent: int, more: list[tuple[str, str]], names: ScriptNames
) -> tuple[str, set[str]]:
    """Return ModelParallel with the parts of a plain dictionary, or with ``from_distribution`` for other expressions."""
    name = names.model_parallel
    parts = _items(node) or {}
    libraries = _items(parts.get("smdistributed")) or {}
    model = _items(libraries.get("modelparallel"))
    mpi = _items(parts.get("mpi")) if "mpi" in parts else {}
    if model is None or mpi is None:
        words = [("", source.moved(node, indent)), *more]
        return call(f"{name}.from_distribution", words, indent), {name.partition(".")[0]}
    return _model_parallel(source, name, model, mpi, indent, more), {name.partition(".")[0]}


def _version_2(source: ScriptSource, node: ast.expr, indent: int, values: Values, is_ours: bool) -> str:
    """Return version 2 of the library as SDK v3 has it, and note which library trains."""
    if not is_ours:
        source.note(
            node,
            "this is version 2 of the model parallel library (torch.sagemaker): Torchrun(smp=SMP(…)) trains with the library in "
            "the image that is named; without training_image, ModelTrainer of smp_estimator.model_trainer trains with its own",
        )
    model, text = _entry(source, *_entry(source, node, "", "smdistributed"), "modelparallel")
    known = _items(values.resolve(model))
    if known is not None and "parameters" not in known:
        return "Torchrun(smp=SMP())"
    given, text = _entry(source, model, text, "parameters")
    parameters = _items(given)
    if parameters is None:
        return f"Torchrun(smp=SMP(**{text}))"
    for name in sorted(parameters.keys() - _OF_VERSION_2):
        source.note(node, f"SMP of SDK v3 has no {name!r}: {source.segment(parameters[name])} is left out")
    words = [(name, source.moved(value, indent)) for name, value in parameters.items() if name in _OF_VERSION_2]
    return f"Torchrun(smp={call('SMP', words, indent)})"


def _entry(source: ScriptSource, node: ast.expr | None, text: str, key: str) -> tuple[ast.expr | None, str]:
    """Return an entry of a dictionary: its node if the call contains it, and the text of an expression for it."""
    found = (_items(node) or {}).get(key)
    if found is not None:
        return found, source.segment(found)
    if node is not None:
        text = source.segment(node)
    return None, f'{text}["{key}"]'


def _model_parallel(
    source: ScriptSource,
    name: str,
    model: dict[str, ast.expr],
    mpi: dict[str, ast.expr],
    indent: int,
    more: list[tuple[str, str]],
) -> str:
    words = []
    if "parameters" in model:
        words.append(("parameters", source.moved(model["parameters"], indent + 4)))
    for word in ("processes_per_host", "custom_mpi_options"):
        if word in mpi:
            words.append((word, source.moved(mpi[word], indent + 4)))
    return call(name, [*words, *more], indent)


def _mpi(source: ScriptSource, node: ast.expr, indent: int, values: Values) -> str:
    plain = _items(values.resolve(node)) or {}
    known = _items(values.resolve(plain.get("mpi"))) or {}
    part, text = _entry(source, node, "", "mpi")
    words = []
    if "processes_per_host" in known:
        words.append(("process_count_per_node", _entry(source, part, text, "processes_per_host")[1]))
    if "custom_mpi_options" in known:
        value, options = _entry(source, part, text, "custom_mpi_options")
        is_simple = value is None or isinstance(value, ast.Constant | ast.JoinedStr | ast.Name)
        words.append(("mpi_additional_options", f"{options if is_simple else f'({options})'}.split()"))
    return call("MPI", words, indent)


def parameters_of(node: ast.expr | None) -> list[ast.AST]:
    """Return the parts of a distribution that are kept as written.

    These are the library's parameters, or the whole expression if it is not a plain dictionary.
    """
    if node is None:
        return []
    parts = _items(node)
    if parts is None:
        return [node]
    libraries = _items(parts.get("smdistributed")) or {}
    model = _items(libraries.get("modelparallel")) or {}
    if "parameters" not in model:
        return []
    return [model["parameters"]]


def _items(node: ast.AST | None) -> dict[str, ast.expr] | None:
    """Return the entries of a dictionary literal with plain string keys, or None for any other expression."""
    if not isinstance(node, ast.Dict):
        return None
    found: dict[str, ast.expr] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = literal_value(key)
        if not isinstance(name, str):
            return None
        found[name] = value
    return found


def _is_part_on(parts: dict[str, ast.expr], name: str, values: Values) -> bool:
    """Return whether a strategy of a distribution is on; one that only a run knows counts as on."""
    if name not in parts:
        return False
    found = _items(values.resolve(parts[name]))
    return found is None or _is_on(found)


def _is_on(part: dict[str, ast.expr]) -> bool:
    """Return whether a strategy is on, judging by its source; a variable counts as on."""
    enabled = part.get("enabled")
    return enabled is not None and (not isinstance(enabled, ast.Constant) or enabled.value is True)
