"""Argument sets of ``ModelTrainer``, drawn at random, the same in every run; only where version 3 of the SDK is installed.

They go over all that the SDK's class takes and a CreateTrainingJob request shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sagemaker.core.inputs import FileSystemInput, ShuffleConfig, TrainingInput
from sagemaker.core.shapes import (
    Channel,
    DataSource,
    FileSystemDataSource,
    InstanceGroup,
    InstancePreference,
    S3DataSource,
)
from sagemaker.core.shapes import ShuffleConfig as ShuffleShape
from sagemaker.core.training import configs
from sagemaker.train.distributed import MPI, Torchrun

from support.platform.cloud import ROLE
from support.platform.requests_compared import training_job_defaults

SEED = 30
COUNT = 60
FILE_SYSTEM = "fs-0123456789abcdef0"

#: Parameters of the library that are right on eight GPUs of each of some hosts.
PARAMETERS: list[dict[str, Any]] = [
    {"ddp": True},
    {"partitions": 2, "ddp": True, "microbatches": 4},
    {"pipeline_parallel_degree": 4, "ddp": True, "microbatches": 4, "placement_strategy": "PTD"},
    {"tensor_parallel_degree": 8, "ddp": True, "bf16": True},
    {"sharded_data_parallel_degree": 8, "ddp": True},
]
MPI_OPTIONS = ["", "-verbose", "-x NCCL_DEBUG=INFO", "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384"]


@dataclass
class Case:
    """One drawn argument set.

    Attributes:
        arguments: of both classes.
        distributed: of the SDK's own kinds, or None with ``parallel``.
        parallel: fields of ModelParallel, or None.
        image: ``own``, or ``chosen`` by our class; the SDK's gets its address.
        private: records that ``with_…()`` sets, by the method's name.
        inputs: of ``train()``, in the form that ours takes and in that of the SDK.
        mistake: what was spoilt; empty if nothing.
        training_job: section of the defaults file.
    """

    arguments: dict[str, Any]
    distributed: Any = None
    parallel: dict[str, Any] | None = None
    image: str = "own"
    private: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, Any] = (None, None)
    mistake: str = ""
    training_job: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Return whether the job trains with the model parallel library."""
        return self.parallel is not None


def draw(number: int) -> Case:
    """Draw an argument set; each call makes new objects, which the SDK changes. Those after the first 60 are spoilt."""
    source = random.Random(f"{SEED}-{number}")
    case = Case(arguments={"role": ROLE})
    if source.random() < 0.7 or number >= COUNT:
        case.parallel = {"parameters": dict(source.choice(PARAMETERS)), "processes_per_host": 8}
        case.parallel["custom_mpi_options"] = source.choice(MPI_OPTIONS)
        case.image = source.choice(["own", "own", "chosen"])
    else:
        case.distributed = source.choice([None, Torchrun(process_count_per_node=8), MPI(process_count_per_node=8)])
    given = case.arguments
    given["compute"] = _compute(source, case)
    for name, draw_value in _OPTIONS.items():
        if source.random() < 0.3:
            given[name] = draw_value(source)
    if source.random() < 0.5:
        given["hyperparameters"] = dict(source.sample(sorted(_HYPERPARAMETERS.items()), source.randrange(1, 5)))
    if given["compute"].get("enable_managed_spot_training"):
        limits = {"max_runtime_in_seconds": 3600, "max_wait_time_in_seconds": source.choice([3600, 7200])}
        given["stopping_condition"] = configs.StoppingCondition(**limits)
    for method, draw_value in _PRIVATE.items():
        if source.random() < 0.15:
            case.private[method] = draw_value(source)
    case.inputs = _inputs(source)
    if source.random() < 0.6:
        case.training_job = training_job_defaults(source)
        if "RoleArn" in case.training_job:
            given.pop("role")
    if number >= COUNT:
        case.private, case.inputs = {}, (None, None)
        case.mistake, spoil = MISTAKES[number - COUNT]
        spoil(case)
    given["compute"] = configs.Compute(**given["compute"])
    return case


def _compute(source: random.Random, case: Case) -> dict[str, Any]:
    kind, count = source.choice(["ml.p4d.24xlarge", "ml.p3.16xlarge", "ml.g5.48xlarge"]), source.choice([1, 2, 4])
    more: dict[str, Any] = {
        "volume_size_in_gb": source.choice([1, 500]),
        "volume_kms_key_id": "volume-key",
        "enable_managed_spot_training": source.choice([True, True, False]),
        "keep_alive_period_in_seconds": source.choice([0, 600]),
        "training_plan_arn": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p",
    }
    drawn = {name: value for name, value in more.items() if source.random() < 0.3}
    if source.random() < 0.15:
        kinds = ["ml.p4d.24xlarge", "ml.p5.48xlarge"]
        drawn["instance_preferences"] = [InstancePreference(instance_type=each, instance_count=count) for each in kinds]
        for name in ("training_plan_arn", "enable_managed_spot_training"):
            drawn.pop(name, None)
    elif not case.ours and source.random() < 0.3:
        groups = [("gpus", kind, count), ("cpus", "ml.c5.18xlarge", 1)][: source.choice([1, 2])]
        names = ("instance_group_name", "instance_type", "instance_count")
        drawn["instance_groups"] = [InstanceGroup(**dict(zip(names, group, strict=True))) for group in groups]
    else:
        drawn |= {"instance_type": kind, "instance_count": count}
    return drawn


def _choice(*values: Any) -> Callable[[random.Random], Any]:
    return lambda source: copy.deepcopy(source.choice(values))


def _networking(source: random.Random) -> Any:
    vpc = {"subnets": ["subnet-1", "subnet-2"], "security_group_ids": ["sg-1"]}
    switches = {
        "enable_network_isolation": source.choice([True, False]),
        "enable_inter_container_traffic_encryption": source.choice([True, False]),
    }
    drawn = {name: value for name, value in switches.items() if source.random() < 0.5}
    return configs.Networking(**drawn, **(vpc if source.random() < 0.6 else {}))


def _output(source: random.Random) -> Any:
    fields = {"s3_output_path": "s3://bucket/output", "kms_key_id": "output-key", "compression_type": "NONE"}
    return configs.OutputDataConfig(**{name: value for name, value in fields.items() if source.random() < 0.6})


#: Arguments that need no others.
_OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "base_job_name": _choice("training", "My-Job-7"),
    "input_s3_key_prefix": _choice("my-pipeline"),
    "networking": _networking,
    "output_data_config": _output,
    "stopping_condition": _choice(
        configs.StoppingCondition(max_runtime_in_seconds=60),
        configs.StoppingCondition(max_runtime_in_seconds=86400, max_pending_time_in_seconds=7200),
    ),
    "checkpoint_config": _choice(
        configs.CheckpointConfig(s3_uri="s3://bucket/checkpoints"),
        configs.CheckpointConfig(local_path="/opt/ml/local"),
    ),
    "training_input_mode": _choice("File", "FastFile", "Pipe"),
    "environment": _choice({"MINE": "1"}, {"A": "", "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192"}, {}, None),
    "tags": _choice([configs.Tag(key="team", value="nlp")], []),
    "training_image_config": _choice(
        configs.TrainingImageConfig(
            training_repository_access_mode="Vpc",
            training_repository_auth_config=configs.TrainingRepositoryAuthConfig(
                training_repository_credentials_provider_arn="arn:aws:lambda:us-east-1:123456789012:function:f"
            ),
        )
    ),
    "input_data_config": lambda source: [configs.InputData(channel_name="given", data_source="s3://bucket/given")],
}

#: What only methods set.
_PRIVATE: dict[str, Callable[[random.Random], Any]] = {
    "with_tensorboard_output_config": _choice(None, configs.TensorBoardOutputConfig(s3_output_path="s3://bucket/b")),
    "with_retry_strategy": _choice(configs.RetryStrategy(maximum_retry_attempts=3)),
    "with_infra_check_config": _choice(None, configs.InfraCheckConfig(enable_infra_check=False)),
    "with_session_chaining_config": _choice(None),
    "with_remote_debug_config": _choice(configs.RemoteDebugConfig(enable_remote_debug=True)),
    "with_checkpoint_config": _choice(configs.CheckpointConfig(s3_uri="s3://bucket/other")),
    "with_metric_definitions": _choice([configs.MetricDefinition(name="accuracy", regex="acc=([0-9.]+)")]),
}

_HYPERPARAMETERS: dict[str, Any] = {
    "steps": 10,
    "lr": 1e-4,
    "large": 10**12,
    "flag": True,
    "off": False,
    "nothing": None,
    "text": "two words",
    "number-like": "007",
    "letters": "größer ✓",
    "list": [1, "x", None],
    "record": {"a": {"b": [1.5]}},
    "empty": "",
}


def _inputs(source: random.Random) -> tuple[Any, Any]:
    """Draw the channels, as ours takes them and as the SDK does."""
    form = source.choice(["none", "one address", "addresses", "records", "channels", "channels"])
    if form == "none":
        return None, None
    if form == "one address":
        return "s3://bucket/data", [configs.InputData(channel_name="training", data_source="s3://bucket/data")]
    names = source.sample(["train", "test", "given"], source.randrange(1, 4))
    if form == "addresses":
        listed = [configs.InputData(channel_name=name, data_source=f"s3://bucket/{name}") for name in names]
        return {name: f"s3://bucket/{name}" for name in names}, listed
    if form == "records":
        records = [_record(source, name) for name in names]
        return records, copy.deepcopy(records)
    both = {name: _channel(source, name) for name in names}
    return {name: pair[0] for name, pair in both.items()}, [pair[1] for pair in both.values()]


def _record(source: random.Random, name: str) -> Any:
    files = FileSystemDataSource(
        file_system_id=FILE_SYSTEM, file_system_access_mode="ro", file_system_type="EFS", directory_path="/data"
    )
    data = S3DataSource(s3_data_type="ManifestFile", s3_uri="s3://bucket/manifest", attribute_names=["a"])
    given = source.choice(["s3://bucket/text", data, files])
    more = source.choice([{}, {"content_type": "text/csv"}])
    return configs.InputData(channel_name=name, data_source=given, **more)


def _channel(source: random.Random, name: str) -> tuple[Any, Any]:
    """Draw the input of a dictionary of channels, and the SDK's record of the same."""
    if source.random() < 0.3:
        kind, mode = source.choice(["EFS", "FSxLustre"]), source.choice(["ro", "rw"])
        record = FileSystemDataSource(
            file_system_id=FILE_SYSTEM, file_system_access_mode=mode, file_system_type=kind, directory_path="/data"
        )
        made = FileSystemInput(FILE_SYSTEM, kind, "/data", mode)
        return made, Channel(channel_name=name, data_source=DataSource(file_system_data_source=record))
    seed = source.randrange(1000)
    drawn = {
        "s3_data_type": source.choice(["S3Prefix", "ManifestFile"]),
        "distribution": source.choice(["FullyReplicated", "ShardedByS3Key"]),
        "attribute_names": source.choice([None, ["source-ref", "label"]]),
        "compression": source.choice([None, "Gzip"]),
        "content_type": source.choice([None, "application/x-recordio"]),
        "record_wrapping": source.choice([None, "RecordIO"]),
        "input_mode": source.choice([None, "Pipe", "FastFile"]),
    }
    shuffle = source.random() < 0.3
    made = TrainingInput("s3://bucket/data", **drawn, shuffle_config=ShuffleConfig(seed) if shuffle else None)
    in_source = {"s3_data_type": "s3_data_type", "distribution": "s3_data_distribution_type"}
    in_source["attribute_names"] = "attribute_names"
    around = {"compression": "compression_type", "record_wrapping": "record_wrapper_type"}
    around |= {"content_type": "content_type", "input_mode": "input_mode"}
    kept = {name: value for name, value in drawn.items() if value is not None}
    data = S3DataSource(s3_uri="s3://bucket/data", **{new: kept[old] for old, new in in_source.items() if old in kept})
    more: dict[str, Any] = {new: kept[old] for old, new in around.items() if old in kept}
    if shuffle:
        more["shuffle_config"] = ShuffleShape(seed=seed)
    return made, Channel(channel_name=name, data_source=DataSource(s3_data_source=data), **more)


def _set(**arguments: Any) -> Callable[[Case], None]:
    return lambda case: case.arguments.update(arguments)


def _channels(given: Any) -> Callable[[Case], None]:
    return lambda case: setattr(case, "inputs", (given, given))


def _compute_of(**fields: Any) -> Callable[[Case], None]:
    return lambda case: case.arguments["compute"].update(fields)


def _groups(case: Case) -> None:
    group = InstanceGroup(instance_group_name="one", instance_type="ml.p4d.24xlarge", instance_count=1)
    case.image = "own"
    case.arguments["compute"] = {"instance_groups": [group]}


def _short_wait(case: Case) -> None:
    limits = configs.StoppingCondition(max_runtime_in_seconds=7200, max_wait_time_in_seconds=3600)
    case.arguments |= {"stopping_condition": limits}
    case.arguments["compute"] = {**_TWO_HOSTS, "enable_managed_spot_training": True}


def _no_wait(case: Case) -> None:
    case.arguments.pop("stopping_condition", None)
    case.arguments["compute"] = {**_TWO_HOSTS, "enable_managed_spot_training": True}


_TWO_HOSTS = {"instance_type": "ml.p4d.24xlarge", "instance_count": 2}


MISTAKES: list[tuple[str, Callable[[Case], None]]] = [
    ("an unknown argument", _set(instance_type="ml.p4d.24xlarge")),
    ("a number as a variable", _set(environment={"A": 1})),
    ("tags that are text", _set(tags="team")),
    ("a channel that is a number", _channels([5])),
    ("a channel nowhere", _channels([configs.InputData(channel_name="train", data_source="/nowhere")])),
    ("an instance group", _groups),
    ("spot without a wait", _no_wait),
    ("spot with a short wait", _short_wait),
    ("a local output", _set(output_data_config=configs.OutputDataConfig(s3_output_path="file:///tmp/output"))),
    ("a warm pool for a week", _compute_of(keep_alive_period_in_seconds=604800)),
    ("a name of a job with a blank", _set(base_job_name="my job")),
    ("a variable with a hyphen", _set(environment={"MY-NAME": "1"})),
    ("a quotation mark", _set(hyperparameters={"text": "it's"})),
    ("a long hyperparameter", _set(hyperparameters={"text": "x" * 3000})),
]
