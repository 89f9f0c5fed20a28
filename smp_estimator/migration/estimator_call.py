"""The call that makes an estimator of SDK v2 as one that makes a ``ModelTrainer`` of SDK v3."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from smp_estimator.migration.distribution import IMAGE_OF_VERSION_2, parameters_of, strategy_of, translate_distribution
from smp_estimator.migration.source import call, is_literal, literal_value

if TYPE_CHECKING:
    from smp_estimator.migration.names import ScriptNames
    from smp_estimator.migration.source import ScriptSource

#: Arguments by position.
_POSITIONS = {
    "PyTorch": ("entry_point", "framework_version", "py_version", "source_dir", "hyperparameters")
    + ("image_uri", "distribution", "compiler_config"),
    "HuggingFace": (
        "py_version",
        "entry_point",
        "transformers_version",
        "tensorflow_version",
        "pytorch_version",
        *("source_dir", "hyperparameters", "image_uri", "distribution", "compiler_config"),
    ),
}
_POSITIONS |= {"SMPEstimator": _POSITIONS["PyTorch"], "SMPHuggingFace": _POSITIONS["HuggingFace"]}

#: Names of arguments in version 1 of the SDK, as notebooks still have them.
_OLDER = {
    "train_instance_type": "instance_type",
    "train_instance_count": "instance_count",
    "train_volume_size": "volume_size",
    "train_volume_kms_key": "volume_kms_key",
    "train_max_run": "max_run",
    "train_max_wait": "max_wait",
    "train_use_spot_instances": "use_spot_instances",
    "image_name": "image_uri",
    "distributions": "distribution",
}

#: Record of SDK v3 → argument of ModelTrainer that holds it, and its fields by the older argument.
_RECORDS = {
    "Compute": (
        "compute",
        {
            "instance_type": "instance_type",
            "instance_count": "instance_count",
            "volume_size": "volume_size_in_gb",
            "volume_kms_key": "volume_kms_key_id",
            "keep_alive_period_in_seconds": "keep_alive_period_in_seconds",
            "use_spot_instances": "enable_managed_spot_training",
            "training_plan": "training_plan_arn",
        },
    ),
    "StoppingCondition": (
        "stopping_condition",
        {"max_run": "max_runtime_in_seconds", "max_wait": "max_wait_time_in_seconds"},
    ),
    "OutputDataConfig": ("output_data_config", {"output_path": "s3_output_path", "output_kms_key": "kms_key_id"}),
    "CheckpointConfig": (
        "checkpoint_config",
        {"checkpoint_s3_uri": "s3_uri", "checkpoint_local_path": "local_path"},
    ),
    "Networking": (
        "networking",
        {
            "subnets": "subnets",
            "security_group_ids": "security_group_ids",
            "enable_network_isolation": "enable_network_isolation",
            "encrypt_inter_container_traffic": "enable_inter_container_traffic_encryption",
        },
    ),
}

#: Arguments that ModelTrainer has too.
_SAME = {
    "image_uri": "training_image",
    "role": "role",
    "hyperparameters": "hyperparameters",
    "environment": "environment",
    "base_job_name": "base_job_name",
    "sagemaker_session": "sagemaker_session",
    "input_mode": "training_input_mode",
}

#: What SDK v3 has no place for, and what to do instead.
_WITHOUT_PLACE = {
    "dependencies": "copy them into source_dir, which travels whole",
    "git_config": "clone the repository, and name its folder as source_dir",
    "code_location": "the code goes to the session's default bucket; Session(default_bucket=…) names another",
    "instance_groups": "ModelParallel trains on hosts that are alike: give one instance_type and instance_count",
    "model_uri": "give it as a channel of train()",
    "compiler_config": "the training compiler has no counterpart; torch.compile in the script may take its place",
    "profiler_config": "SDK v3 has no profiler of jobs; the log and SMP_PROFILE in environment may take its place",
    "rules": "SDK v3 has no rules of the debugger",
    "debugger_hook_config": "SDK v3 has no hook of the debugger",
    "training_recipe": "use ModelTrainer.from_recipe()",
    "max_retry_attempts": "see ModelTrainer.with_retry_strategy()",
    "tensorboard_output_config": "see ModelTrainer.with_tensorboard_output_config()",
    "enable_remote_debug": "see ModelTrainer.with_remote_debug_config()",
    "enable_infra_check": "see ModelTrainer.with_infra_check_config()",
    "enable_session_tag_chaining": "see ModelTrainer.with_session_chaining_config()",
    "container_log_level": "set SM_LOG_LEVEL in environment",
    "max_restarts": "set SMP_MAX_RESTARTS in environment",
    "memory_checkpoint": "set SMP_MEMORY_CHECKPOINT in environment",
    "record_numerics": "set SMP_RECORD_NUMERICS in environment",
    "loggers": "set SMP_LOGGERS in environment",
    "profile": "set SMP_PROFILE in environment",
}

#: Where these are left out or off, nothing is lost.
_OFF = {"debugger_hook_config": False, "disable_profiler": True, "enable_sagemaker_metrics": False, "rules": None}

#: Instance types of local mode.
_LOCAL = ("local", "local_gpu")

#: The limit of SDK v2, where none is given; that of SDK v3 is an hour.
_MAX_RUN_SECONDS = 24 * 60 * 60

#: The oldest PyTorch that the runtime works with.
_TORCH_FLOOR = (2, 4)


class EstimatorCall:
    """One call, on its way.

    Attributes:
        needed: names of SDK v3 that the new call uses.
    """

    def __init__(self, source: ScriptSource, node: ast.Call, kind: str, folder: Path, names: ScriptNames) -> None:
        """Take the call apart.

        Args:
            kind: the class of the estimator.
            folder: from which paths in the call are seen.
        """
        self._names = names
        self.source = source
        self.node = node
        self.kind = kind
        self.needed: set[str] = {"ModelTrainer"}
        self._folder = folder
        self._indent = source.indent_of(node)
        self._given: dict[str, ast.expr] = dict(zip(_POSITIONS[kind], node.args, strict=False))
        self._given |= {_OLDER.get(word.arg, word.arg): word.value for word in node.keywords if word.arg}
        # None is what they all are without being given.
        self._given = {n: v for n, v in self._given.items() if not (isinstance(v, ast.Constant) and v.value is None)}
        self._instance_type = self._given.get("instance_type")
        self._strategy = strategy_of(self._given.get("distribution"), names.values)

    def rewrite(self) -> None:
        """Replace the old call by the new one."""
        kept: list[ast.AST] = [value for name, value in self._given.items() if name != "distribution"]
        kept += parameters_of(self._given.get("distribution"))
        arguments = [
            *self._source_code(),
            *self._records(),
            *self._image(),
            *self._distributed(),
            *self._same(),
            *self._tags(),
        ]
        after = self._metrics()
        self._note_local_or_not()
        if len(self.node.args) > len(_POSITIONS[self.kind]):
            self.source.note(self.node, "arguments by position that are not known are left out: give them by name")
        for name in self._given:
            self._note_left_out(name)
        comments = self.source.comments_between(self.node, kept)
        made = call("ModelTrainer", arguments, self._indent, comments)
        self.source.replace_node(self.node, made + after)

    # -- parts ---------------------------------------------------------------------------------------------

    def _text(self, name: str, deeper: int = 1) -> str:
        """Return an argument as written, indented for its new place."""
        return self.source.moved(self._given.pop(name), self._indent + 4 * deeper)

    def _is_local(self) -> bool:
        found = self._names.values.possible(self._instance_type)
        return bool(found) and all(value in _LOCAL for value in found)

    def _note_local_or_not(self) -> None:
        """Note an instance type that is a local one in some runs."""
        found = self._names.values.possible(self._instance_type)
        if not self._is_local() and any(value in _LOCAL for value in found):
            self.source.note(
                self.node,
                f"where {self._compute_type} is 'local' or 'local_gpu', give training_mode=Mode.LOCAL_CONTAINER, too",
            )

    def _source_code(self) -> list[tuple[str, str]]:
        script, folder = self._given.get("entry_point"), self._given.get("source_dir")
        words: list[tuple[str, str]] = []
        if folder is not None and literal_value(folder) != "":
            words = [("source_dir", self._text("source_dir", 2)), ("entry_script", self._text("entry_point", 2))]
            self._requirements(literal_value(folder), words)
        elif script is not None:
            self._given.pop("source_dir", None)
            value = literal_value(script)
            if isinstance(value, str):
                path = Path(value)
                words = [("source_dir", json.dumps(path.parent.as_posix())), ("entry_script", json.dumps(path.name))]
                self._requirements(path.parent.as_posix(), words)
            else:
                text = self.source.segment(script)
                words = [("source_dir", f"str(Path({text}).parent)"), ("entry_script", f"Path({text}).name")]
                self.needed.add("Path")
            self.source.note(
                self.node,
                "entry_point stood alone and travelled alone; SDK v3 ships the whole folder that the script lies in: see that "
                "nothing large or secret lies there, or give it a folder of its own",
            )
            del self._given["entry_point"]
        if not words:
            return []
        self.needed.add("SourceCode")
        return [("source_code", call("SourceCode", words, self._indent + 4))]

    def _requirements(self, folder: object, words: list[tuple[str, str]]) -> None:
        """Add ``requirements.txt`` to the arguments if the file exists: SDK v2 finds it, SDK v3 needs its name."""
        if not isinstance(folder, str) or self._is_local():
            return
        if (self._folder / folder / "requirements.txt").is_file():
            words.append(("requirements", '"requirements.txt"'))

    def _records(self) -> list[tuple[str, str]]:
        made = []
        condition = self._condition_of_checkpoints()
        for record, (argument, fields) in _RECORDS.items():
            words = [(fields[name], self._text(name, 2)) for name in fields if name in self._given]
            self._complete_record(record, words)
            if not words:
                continue
            self.needed.add(record)
            text = call(record, words, self._indent + 4)
            if record == "CheckpointConfig" and condition is not None:
                # SDK v3 makes up an address if there is a record without one.
                text += f" if {condition} else None"
            made.append((argument, text))
        return made

    def _condition_of_checkpoints(self) -> str | None:
        """Return the expression that is true if there is an address for checkpoints; None if there always is one."""
        address = self._given.get("checkpoint_s3_uri")
        if address is None or None not in self._names.values.possible(address):
            return None
        text = self.source.segment(address)
        if isinstance(address, ast.IfExp):
            return f"({text})"
        return text

    def _complete_record(self, record: str, words: list[tuple[str, str]]) -> None:
        """Add the arguments of a record for which SDK v3 has no default, or another default than SDK v2."""
        names = {name for name, _ in words}
        lacks_count = bool(words) and "instance_count" not in names
        lacks_limit = "max_runtime_in_seconds" not in names
        if record == "Compute" and lacks_count:
            words.append(("instance_count", "1"))
        elif record == "StoppingCondition" and lacks_limit and not self._is_local():
            words.insert(0, ("max_runtime_in_seconds", str(_MAX_RUN_SECONDS)))
        elif record == "OutputDataConfig":
            uncompressed = self._given.pop("disable_output_compression", None)
            if literal_value(uncompressed) is True:
                words.append(("compression_type", '"NONE"'))

    def _image(self) -> list[tuple[str, str]]:
        """Return the arguments for the image, and for the mode that a local instance type implies."""
        versions = {
            name: self._given.pop(name, None)
            for name in (
                "framework_version",
                "transformers_version",
                "pytorch_version",
                "py_version",
                "tensorflow_version",
            )
        }
        if self._is_local() and ("image_uri" in self._given or self.kind in ("PyTorch", "HuggingFace")):
            self.needed.add("Mode")
            mode = [("training_mode", "Mode.LOCAL_CONTAINER")]
        else:
            mode = []
        if "image_uri" in self._given or (self._is_local() and self.kind.startswith("SMP")):
            return mode
        named = {name: value for name, value in versions.items() if value is not None}
        if not named:
            if self.kind == "SMPHuggingFace":
                self.source.note(
                    self.node,
                    "SMPHuggingFace took the newest Hugging Face image, and ModelTrainer takes the newest of PyTorch, without "
                    "Transformers: give training_image=image_uris.retrieve(…), or name transformers in source_code.requirements",
                )
            return mode
        torch = versions["pytorch_version"] or versions["framework_version"]
        is_ours = self._strategy in ("modelparallel", "unknown") or self._trains_version_2_here
        if is_ours and self._is_too_old(literal_value(torch)):
            self.source.note(
                self.node,
                f"PyTorch {literal_value(torch)} is older than the runtime's 2.4: no training_image is given, and the newest "
                "stock image "
                "is taken; see that the script runs with it",
            )
            return mode
        return [*mode, ("training_image", self._retrieved(versions))]

    def _retrieved(self, versions: dict[str, ast.expr | None]) -> str:
        self.needed.add("image_uris")
        session = self._given.get("sagemaker_session")
        if session is None or literal_value(session) is not None:
            self.needed.add("Session")
        region = f"{self.source.segment(session) if session is not None else 'Session()'}.boto_region_name"
        text = {name: self.source.segment(value) for name, value in versions.items() if value is not None}
        kind = self._compute_type
        words = [("", '"huggingface"' if "transformers_version" in text else '"pytorch"'), ("", region)]
        if "transformers_version" in text:
            words.append(("version", text["transformers_version"]))
            torch = literal_value(versions["pytorch_version"])
            if "pytorch_version" in text:
                base = json.dumps(f"pytorch{torch}") if torch else f'"pytorch" + {text["pytorch_version"]}'
                words.append(("base_framework_version", base))
        elif "framework_version" in text:
            words.append(("version", text["framework_version"]))
        if "py_version" in text:
            words.append(("py_version", text["py_version"]))
        words.append(("instance_type", kind))
        if self._strategy == "modelparallel 2" and not self._trains_version_2_here:
            # retrieve() of SDK v3 does not look for the images of the library; this function does.
            older = {"version": "framework_version"}
            named = [(older.get(name, name), value) for name, value in words if name != "base_framework_version"]
            framework, region_word, *rest = named
            versions_of_torch = [("pytorch_version", text["pytorch_version"])] if "pytorch_version" in text else []
            arguments = [region_word, framework, *rest, *versions_of_torch, ("distribution", IMAGE_OF_VERSION_2)]
            return call("image_uris.get_training_image_uri", arguments, self._indent + 4)
        words.append(("image_scope", '"training"'))
        return call("image_uris.retrieve", words, self._indent + 4)

    @property
    def _trains_version_2_here(self) -> bool:
        """Return whether the job's version 2 of the library is this package's, and not that of an image."""
        return self._strategy == "modelparallel 2" and self.kind.startswith("SMP")

    @property
    def _compute_type(self) -> str:
        return self.source.segment(self._instance_type) if self._instance_type is not None else "None"

    @staticmethod
    def _is_too_old(version: object) -> bool:
        if not isinstance(version, str):
            return False
        parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        return parts < _TORCH_FLOOR

    def _distributed(self) -> list[tuple[str, str]]:
        node = self._given.pop("distribution", None)
        shipped = self._given.pop("ship_runtime", None)
        if node is None or (literal_value(node) in (None, {}) and is_literal(node)):
            return []
        more = [("ship_runtime", self.source.segment(shipped))] if shipped is not None else []
        if self._strategy == "unknown" and not self.kind.startswith("SMP"):
            self.source.note(
                self.node,
                f"only a run knows what {self.source.segment(node)} is, and it is read as one of the model parallel library: give "
                "distributed=Torchrun() or MPI() for another strategy",
            )
        text, names = translate_distribution(
            self.source, node, self._indent + 4, more, self._names, is_ours=self._trains_version_2_here
        )
        self.needed |= names
        return [("distributed", text)] if text else []

    def _same(self) -> list[tuple[str, str]]:
        session = self._given.get("sagemaker_session")
        made = []
        if isinstance(session, ast.Call) and ast.unparse(session.func).endswith("ProcessSession"):
            del self._given["sagemaker_session"]
            made = self._of_process_session(session)
        return [(new, self._text(old)) for old, new in _SAME.items() if old in self._given] + made

    def _of_process_session(self, session: ast.Call) -> list[tuple[str, str]]:
        fields = {"root": "local_container_root", "keep": "keep_job_folder", "stop_grace_seconds": "stop_grace_seconds"}
        words = {
            **dict(zip(["root"], session.args, strict=False)),
            **{w.arg: w.value for w in session.keywords if w.arg},
        }
        for name in set(words) - set(fields):
            self.source.note(session, f"ProcessSession({name}=…) has no place in ModelTrainer: it is left out")
        return [(fields[name], self.source.segment(value)) for name, value in words.items() if name in fields]

    def _tags(self) -> list[tuple[str, str]]:
        node = self._given.pop("tags", None)
        if node is None:
            return []
        self.needed.add("Tag")
        text = self.source.segment(node)
        if isinstance(self._names.values.resolve(node), ast.Dict):
            return [("tags", f"[Tag(key=key, value=value) for key, value in {text}.items()]")]
        rows = literal_value(node)
        if not _is_list_of_tags(rows):
            return [("tags", f'[Tag(key=tag["Key"], value=tag["Value"]) for tag in {text}]')]
        made = []
        for row in rows:
            made.append(f"Tag(key={json.dumps(row['Key'])}, value={json.dumps(row['Value'])})")
        return [("tags", f"[{', '.join(made)}]")]

    def _metrics(self) -> str:
        node = self._given.pop("metric_definitions", None)
        if node is None:
            return ""
        self.needed.add("MetricDefinition")
        rows = f'[MetricDefinition(name=row["Name"], regex=row["Regex"]) for row in {self.source.segment(node)}]'
        return f".with_metric_definitions(\n{' ' * (self._indent + 4)}{rows}\n{' ' * self._indent})"

    def _note_left_out(self, name: str) -> None:
        value = self._given[name]
        if is_literal(value) and (literal_value(value) is None or literal_value(value) == _OFF.get(name, ...)):
            return
        instead = _WITHOUT_PLACE.get(name, "help(ModelTrainer) lists what there is")
        self.source.note(
            self.node, f"{name}={self.source.segment(value)} has no place in ModelTrainer and is left out; {instead}"
        )


def _is_list_of_tags(rows: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a list of tags as SDK v2 has them."""
    if not isinstance(rows, list):
        return False
    return all(isinstance(row, dict) and {"Key", "Value"} <= row.keys() for row in rows)
