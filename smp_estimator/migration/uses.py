"""The uses of an estimator in a script: ``fit()`` and the attributes, and the older names of errors and helpers."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from smp_estimator.migration.names import ESTIMATORS, MOVED, ScriptNames, hidden_arguments
from smp_estimator.migration.source import call, literal_value

if TYPE_CHECKING:
    from smp_estimator.migration.source import ScriptSource

#: Arguments of ``fit()`` by position.
_FIT = ("inputs", "wait", "logs", "job_name", "experiment_config")

#: Attributes of ``latest_training_job``.
_JOB_ATTRIBUTES = {"name": "training_job_name", "job_name": "training_job_name"}

#: What a trainer lacks, and what to use.
_WITHOUT_PLACE = {
    "deploy": "build a model with sagemaker.serve.ModelBuilder from trainer.model_data",
    "create_model": "build a model with sagemaker.serve.ModelBuilder from trainer.model_data",
    "register": "see sagemaker.serve.ModelBuilder.register()",
    "attach": "read the job with sagemaker.core.resources.TrainingJob.get(name)",
    "jobs": "the newest job is trainer.latest_training_job",
    "set_hyperparameters": "change trainer.hyperparameters, a dictionary",
    "training_job_analytics": "read the metrics with sagemaker.core.resources.TrainingJob",
    "instance_type": "it is trainer.compute.instance_type",
    "instance_count": "it is trainer.compute.instance_count",
    "distribution": "it is trainer.distributed",
    "output_path": "it is trainer.output_data_config.s3_output_path",
    "checkpoint_s3_uri": "it is trainer.checkpoint_config.s3_uri",
    "entry_point": "it is trainer.source_code.entry_script",
    "source_dir": "it is trainer.source_code.source_dir",
    "image_uri": "it is trainer.training_image",
}

#: What a trainer has, or a change leads to.
_KNOWN = frozenset(
    """fit logs hyperparameters latest_training_job model_data base_job_name role environment sagemaker_session tags plan suggest
    rehearse train _current_job_name training_image_uri""".split()
)

#: What the SDK's session lacks, and what to use.
_SESSION_WITHOUT_PLACE = {
    **dict.fromkeys(
        ["describe_training_job", "wait_for_job", "logs_for_job", "stop_training_job"],
        "sagemaker.core.resources.TrainingJob.get(name) has refresh(), wait() and stop()",
    ),
    "train": "use ModelTrainer",
    "describe_endpoint": "use sagemaker.core.resources.Endpoint.get(name)",
    "endpoint_from_job": "see sagemaker.serve.ModelBuilder",
    "endpoint_from_model_data": "see sagemaker.serve.ModelBuilder",
}

#: Full names of the SDK's session.
_SESSIONS = ("sagemaker.Session", "sagemaker.session.Session")


def rewrite_uses(source: ScriptSource, names: ScriptNames) -> set[str]:
    """Change the uses of estimators and of other SDK names; return the names that the new code needs."""
    needed: set[str] = set()
    for node in ast.walk(source.tree):
        if not source.is_placed(node):
            continue
        if isinstance(node, ast.Call):
            needed |= _method_call(source, names, node)
        elif isinstance(node, ast.Attribute):
            needed |= _attribute(source, names, node)
    return needed


def _method_call(source: ScriptSource, names: ScriptNames, node: ast.Call) -> set[str]:
    """Change a call of an estimator's method, if it is one."""
    method = node.func
    if not isinstance(method, ast.Attribute) or not names.is_estimator(method.value):
        return set()
    owner_end = source.span(method.value)[1]
    call_end = source.span(node)[1]
    if method.attr == "fit":
        return _fit(source, names, node)
    if method.attr == "logs":
        source.replace(owner_end, call_end, ".latest_training_job.wait(logs=True)")
    elif method.attr == "training_image_uri":
        source.replace(owner_end, call_end, ".training_image")
    elif method.attr == "hyperparameters":
        source.replace(source.span(method)[1], call_end, "")
    return set()


def _fit(source: ScriptSource, names: ScriptNames, node: ast.Call) -> set[str]:
    if not isinstance(node.func, ast.Attribute):
        raise AssertionError("fit() is called on something")
    hidden = hidden_arguments(node)
    if hidden is not None and not isinstance(hidden, ast.Starred):
        source.note(
            node,
            f"fit() is train() in SDK v3, and takes input_data_config, wait and logs: write out what {source.segment(hidden)} "
            "holds",
        )
        return set()
    given = dict(zip(_FIT, node.args, strict=False)) | {word.arg: word.value for word in node.keywords if word.arg}
    indent = source.indent_of(node)
    needed: set[str] = set()
    words = _inputs(source, names, given.pop("inputs", None), indent, needed)
    if "wait" in given:
        words.append(("wait", source.segment(given.pop("wait"))))
    if (logs := given.pop("logs", None)) is not None:
        words += _logs(source, logs)
    for name, value in given.items():
        if isinstance(value, ast.Constant) and value.value is None:
            continue
        named = "; jobs are named by base_job_name and the time" if name == "job_name" else " and is left out"
        source.note(node, f"fit({name}={source.segment(value)}) has no place in train(){named}")
    start = source.span(node.func.value)[1]
    source.replace(start, source.span(node)[1], call(".train", words, indent))
    return needed


def _inputs(
    source: ScriptSource, names: ScriptNames, inputs: ast.expr | None, indent: int, needed: set[str]
) -> list[tuple[str, str]]:
    """Return the channels of a call.

    A dictionary of plain addresses becomes a list of the SDK's records. Other expressions are kept as they are.
    """
    if inputs is None:
        return []
    found = names.values.resolve(inputs)
    if isinstance(found, ast.Call) and names.full(found.func).startswith("sagemaker.inputs."):
        return [("", f'{{"training": {source.moved(inputs, indent + 4)}}}')]  # as SDK v2 names one channel alone
    if not isinstance(inputs, ast.Dict) or not all(_is_address(value) for value in inputs.values):
        return [("", source.moved(inputs, indent + 4))]
    needed.add("InputData")
    rows = [
        f"InputData(channel_name={source.segment(key)}, data_source={source.segment(value)})"
        for key, value in zip(inputs.keys, inputs.values, strict=True)
        if key is not None
    ]
    return [("input_data_config", _listed(rows, indent + 4))]


def _logs(source: ScriptSource, logs: ast.expr) -> list[tuple[str, str]]:
    """Translate the ``logs`` argument of SDK v2; SDK v3 shows all logs or none."""
    shown = literal_value(logs)
    if isinstance(shown, bool):
        return [("logs", str(shown))]
    if shown == "None":
        return [("logs", "False")]
    return [("logs", source.segment(logs))] if shown is None else []


def _is_address(node: ast.expr) -> bool:
    """Return whether a channel is a plain address; a call may return an object of the SDK."""
    return isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)


def _listed(rows: list[str], indent: int) -> str:
    one_line = f"[{', '.join(rows)}]"
    if len(one_line) + indent <= 88:
        return one_line
    inner = " " * (indent + 4)
    return "\n".join(["[", *(f"{inner}{row}," for row in rows), f"{' ' * indent}]"])


def _attribute(source: ScriptSource, names: ScriptNames, node: ast.Attribute) -> set[str]:
    full = names.full(node)
    if full in MOVED and not isinstance(node.ctx, ast.Store):
        name = full.rpartition(".")[2]
        source.replace_node(node, name)
        return {name} if name in ("Session", "image_uris") else {f"={full}"}
    owner = node.value
    if _is_latest_job(owner, names):
        _job_attribute(source, node)
    elif node.attr == "_current_job_name" and names.is_estimator(owner):
        source.replace(source.span(owner)[1], source.span(node)[1], ".latest_training_job.training_job_name")
    else:
        _note_without_place(source, names, node)
    return set()


def _job_attribute(source: ScriptSource, node: ast.Attribute) -> None:
    """Change an attribute of ``latest_training_job``."""
    if node.attr in _JOB_ATTRIBUTES:
        source.replace(source.span(node.value)[1], source.span(node)[1], f".{_JOB_ATTRIBUTES[node.attr]}")
    elif node.attr == "describe":
        source.note(
            node, "latest_training_job.describe() is refresh() in SDK v3, and its answer an object with attributes"
        )


def _is_latest_job(node: ast.expr, names: ScriptNames) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "latest_training_job":
        return False
    return names.is_estimator(node.value)


def _note_without_place(source: ScriptSource, names: ScriptNames, node: ast.Attribute) -> None:
    """Note an attribute of an estimator or of a session that SDK v3 lacks."""
    name, owner = node.attr, node.value
    # An attribute of the class, or of an object.
    is_of_estimator = names.is_estimator(owner) or names.full(owner) in ESTIMATORS
    if name not in _KNOWN and is_of_estimator:
        instead = _WITHOUT_PLACE.get(name, "help(ModelTrainer) lists what there is")
        source.note(node, f"{source.segment(node)} is not in ModelTrainer; {instead}")
    elif name in _SESSION_WITHOUT_PLACE and _is_session(names, owner):
        instead = _SESSION_WITHOUT_PLACE[name]
        source.note(node, f"{source.segment(node)} is not in SDK v3; {instead}")


def _is_session(names: ScriptNames, node: ast.expr) -> bool:
    """Return whether an expression is the SDK's session."""
    found = names.values.resolve(node)
    return isinstance(found, ast.Call) and names.full(found.func) in _SESSIONS
