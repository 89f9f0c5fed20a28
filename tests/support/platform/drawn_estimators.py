"""Argument sets of the estimators of SDK 2, drawn at random, the same in every run.

They go over all that the SDK's classes take and a CreateTrainingJob request shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support.platform.cloud import ROLE
from support.platform.jobs import model_parallel
from support.platform.requests_compared import training_job_defaults

FILE_SYSTEM = "fs-0123456789abcdef0"

SEED = 20
COUNT = 60

#: Own arguments, and the variables that they become.
OWN_ARGUMENTS: dict[str, tuple[Any, dict[str, str]]] = {
    "max_restarts": (2, {"SMP_MAX_RESTARTS": "2"}),
    "memory_checkpoint": ({"steps": 5}, {"SMP_MEMORY_CHECKPOINT": "1", "SMP_MEMORY_CHECKPOINT_STEPS": "5"}),
    "record_numerics": (True, {"SMP_RECORD_NUMERICS": "1"}),
    "loggers": ("tensorboard", {"SMP_LOGGERS": "tensorboard"}),
}

#: Parameters of the library that are right on eight GPUs of each of two hosts, or of one.
PARAMETERS: list[dict[str, Any]] = [
    {"ddp": True},
    {"partitions": 2, "ddp": True, "microbatches": 4},
    {"pipeline_parallel_degree": 4, "ddp": True, "microbatches": 4, "placement_strategy": "spread"},
    {"tensor_parallel_degree": 8, "ddp": True, "bf16": True},
    {"sharded_data_parallel_degree": 8, "ddp": True},
]

MPI_OPTIONS = [
    "-verbose",
    "-x NCCL_DEBUG=INFO",
    "-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=16384",
    "-x FI_PROVIDER=tcp --mca btl_vader_single_copy_mechanism none",
]

OTHER_STRATEGIES: list[dict[str, Any] | None] = [
    None,
    {"torch_distributed": {"enabled": True}},
    {"pytorchddp": {"enabled": True, "custom_mpi_options": "-verbose"}},
    {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-verbose"}},
    {"smdistributed": {"dataparallel": {"enabled": True}}},
]


@dataclass
class Case:
    """One drawn argument set.

    Attributes:
        kind: the framework, ``pytorch`` or ``huggingface``.
        image: ``own``, ``versions`` (of a stock image), or ``chosen`` (by our class; the SDK's gets its address).
        arguments: of both classes.
        own: arguments of ours alone.
        inputs: of ``fit()``.
        mistake: what was spoilt; empty if nothing.
        training_job: section of the defaults file.
        debug_hook: of the defaults file, for estimators.
    """

    kind: str
    image: str
    arguments: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    inputs: Any = None
    job_name: str | None = None
    experiment: dict[str, str] | None = None
    mistake: str = ""
    training_job: dict[str, Any] = field(default_factory=dict)
    debug_hook: bool | None = None

    @property
    def strategy(self) -> str:
        """Return the strategy's name."""
        given = self.arguments.get("distribution") or {}
        return next(iter(given.get("smdistributed", given)), "none")

    @property
    def ours(self) -> bool:
        """Return whether the job trains with the model parallel library."""
        return self.strategy == "modelparallel"

    @property
    def ships(self) -> bool:
        """Return whether the runtime travels with the code."""
        return self.image != "own" and self.strategy in ("modelparallel", "dataparallel")

    @property
    def groups(self) -> list[str]:
        """Return the names of the instance groups."""
        return [group.instance_group_name for group in self.arguments.get("instance_groups") or ()]


def draw(number: int) -> Case:
    """Draw an argument set; each call makes new objects, which the SDK changes. Those after the first 60 are spoilt."""
    source = random.Random(f"{SEED}-{number}")
    case = Case(
        kind=source.choice(["pytorch", "pytorch", "pytorch", "huggingface"]),
        image=source.choice(["own", "own", "versions", "chosen"]),
        arguments={"role": ROLE, "entry_point": "train.py"},
    )
    given = case.arguments
    if source.random() < 0.7:
        given["distribution"] = model_parallel(8, **source.choice(PARAMETERS))
        if source.random() < 0.5:
            given["distribution"]["mpi"]["custom_mpi_options"] = source.choice(MPI_OPTIONS)
        for name, (value, _) in OWN_ARGUMENTS.items():
            if source.random() < 0.15:
                case.own[name] = value
    else:
        given["distribution"] = copy.deepcopy(source.choice(OTHER_STRATEGIES))
        if case.image == "chosen" and case.strategy != "dataparallel":
            case.image = "own"  # our class chooses for its own libraries only
        if case.ships:
            case.kind = "pytorch"  # the oldest SDK has no image of Hugging Face that is new enough
        if case.kind == "huggingface" and case.strategy == "pytorchddp":
            case.kind = "pytorch"
    _instances(source, case)
    for name, draw_value in _OPTIONS.items():
        if source.random() < 0.25:
            given[name] = draw_value(source)
    _together(source, given)
    if source.random() < 0.5:
        given["hyperparameters"] = dict(source.sample(sorted(_HYPERPARAMETERS.items()), source.randrange(1, 5)))
    case.inputs = _inputs(source, case)
    case.job_name = f"job-{number}" if source.random() < 0.3 else None
    case.experiment = {"ExperimentName": "e", "TrialName": "t"} if source.random() < 0.15 else None
    if source.random() < 0.6:
        case.training_job = training_job_defaults(source)
        case.debug_hook = source.choice([None, None, True, False])
        if "RoleArn" in case.training_job:
            given.pop("role")
    if number >= COUNT:
        case.mistake, spoil = MISTAKES[number - COUNT]
        spoil(case)
    return case


def _instances(source: random.Random, case: Case) -> None:
    given = case.arguments
    kinds = ["ml.p4d.24xlarge", "ml.p3.16xlarge", "ml.g5.48xlarge"]
    if case.strategy not in ("modelparallel", "dataparallel"):
        kinds += ["ml.m5.xlarge", "ml.g4dn.12xlarge"]
    kind, count = source.choice(kinds), source.choice([1, 2, 2, 4])
    if source.random() > 0.15:
        given |= {"instance_type": kind, "instance_count": count}
        return
    from sagemaker.instance_group import InstanceGroup

    groups = [InstanceGroup("gpus", kind, count), InstanceGroup("cpus", "ml.c5.18xlarge", 1)][: source.choice([1, 2])]
    given["instance_groups"] = groups
    if given["distribution"]:
        given["distribution"] = {**given["distribution"], "instance_groups": groups[:1]}


def _together(source: random.Random, given: dict[str, Any]) -> None:
    """Draw arguments that need each other."""
    if source.random() < 0.3:
        given |= {"subnets": ["subnet-1", "subnet-2"], "security_group_ids": ["sg-1"]}
    if source.random() < 0.3:
        given |= {"use_spot_instances": True, "max_run": 3600, "max_wait": source.choice([3600, 7200])}
    if source.random() < 0.3:
        given["checkpoint_s3_uri"] = "s3://bucket/checkpoints"
        if source.random() < 0.5 and "instance_groups" not in given:  # the SDK's class then compares a missing count
            given["checkpoint_local_path"] = "/opt/ml/local/checkpoints"
    if source.random() < 0.15:
        given["training_repository_access_mode"] = "Vpc"
        given["training_repository_credentials_provider_arn"] = "arn:aws:lambda:us-east-1:123456789012:function:f"
    if not given.get("disable_profiler") and source.random() < 0.3:
        given |= {"disable_profiler": False, "profiler_config": _profiler(source)}
    if source.random() < 0.15:
        given |= {"model_uri": "s3://bucket/model.tar.gz", "model_channel_name": source.choice(["model", "start"])}


def _profiler(source: random.Random) -> Any:
    from sagemaker.debugger import ProfilerConfig

    return ProfilerConfig(
        s3_output_path=source.choice([None, "s3://bucket/profile"]),
        system_monitor_interval_millis=source.choice([None, 500]),
    )


def _hook(source: random.Random) -> Any:
    from sagemaker.debugger import CollectionConfig, DebuggerHookConfig

    hook = DebuggerHookConfig("s3://bucket/hook", hook_parameters={"save_interval": "10"})
    hook.collection_configs = [CollectionConfig("losses", {"save_interval": "5"})]
    return source.choice([True, False, hook])


def _rules(source: random.Random) -> Any:
    from sagemaker.debugger import Rule, rule_configs

    return [Rule.sagemaker(rule_configs.loss_not_decreasing()), Rule.sagemaker(rule_configs.vanishing_gradient())][
        : source.choice([0, 1, 2])
    ]


def _tensorboard(_: random.Random) -> Any:
    from sagemaker.debugger import TensorBoardOutputConfig

    return TensorBoardOutputConfig("s3://bucket/board", "/opt/ml/output/board")


def _choice(*values: Any) -> Callable[[random.Random], Any]:
    return lambda source: source.choice(values)


#: Arguments that need no others.
_OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "volume_size": _choice(1, 100, 500),
    "volume_kms_key": _choice("volume-key", "arn:aws:kms:us-east-1:123456789012:key/1"),
    "output_kms_key": _choice("output-key"),
    "output_path": _choice("s3://bucket/output", "s3://bucket/output/"),
    "code_location": _choice("s3://bucket/code", "s3://bucket/code/"),
    "max_run": _choice(60, 86400),
    "keep_alive_period_in_seconds": _choice(0, 600, 3600),
    "max_retry_attempts": _choice(1, 30),
    "input_mode": _choice("File", "FastFile", "Pipe"),
    "base_job_name": _choice("training", "My-Job-7"),
    "tags": _choice([{"Key": "team", "Value": "nlp"}], {"team": "nlp", "cost": "7"}),
    "environment": _choice({"MINE": "1"}, {"A": "", "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8192"}, {}),
    "metric_definitions": _choice([{"Name": "accuracy", "Regex": "acc=([0-9.]+)"}], []),
    "enable_sagemaker_metrics": _choice(True, False),
    "enable_network_isolation": _choice(True, False),
    "encrypt_inter_container_traffic": _choice(True, False),
    "container_log_level": _choice(10, 30),
    "container_entry_point": _choice(["python", "start.py"]),
    "container_arguments": _choice(["--one", "1"]),
    "enable_infra_check": _choice(True, False),
    "enable_remote_debug": _choice(True, False),
    "enable_session_tag_chaining": _choice(True, False),
    "disable_output_compression": _choice(True, False),
    "training_plan": _choice("arn:aws:sagemaker:us-east-1:123456789012:training-plan/p"),
    "instance_placement_config": _choice({"EnableMultipleJobs": True}),
    "disable_profiler": _choice(True, False),
    "debugger_hook_config": _hook,
    "rules": _rules,
    "tensorboard_output_config": _tensorboard,
}

_HYPERPARAMETERS: dict[str, Any] = {
    "steps": 10,
    "lr": 1e-4,
    "large": 10**12,
    "flag": True,
    "off": False,
    "nothing": None,
    "text": "two words",
    "quotes": 'it\'s "so"',
    "number-like": "007",
    "letters": "größer ✓",
    "list": [1, "x", None],
    "record": {"a": {"b": [1.5]}},
    "empty": "",
    "no number": float("nan"),
}


def _inputs(source: random.Random, case: Case) -> Any:
    form = source.choice(["none", "text", "alone", "channels", "channels", "channels"])
    if form == "none":
        return None
    if form == "text":
        return "s3://bucket/data"
    if form == "alone":
        return _channel(source, case)
    names = source.sample(["train", "test", "validation", "extra"], source.randrange(1, 4))
    return {name: source.choice([f"s3://bucket/{name}", _channel(source, case)]) for name in names}


def _channel(source: random.Random, case: Case) -> Any:
    from sagemaker.inputs import FileSystemInput, ShuffleConfig, TrainingInput

    has_network = bool(case.arguments.get("subnets"))
    if has_network and source.random() < 0.4:
        kind = source.choice(["EFS", "FSxLustre"])
        return FileSystemInput(
            FILE_SYSTEM, kind, "/data", source.choice(["ro", "rw"]), source.choice([None, "text/csv"])
        )
    more: dict[str, Any] = {
        "distribution": source.choice(["FullyReplicated", "ShardedByS3Key"]),
        "compression": source.choice(["Gzip", "None"]),
        "content_type": source.choice(["application/x-recordio", "text/csv"]),
        "record_wrapping": "RecordIO",
        "input_mode": source.choice(["File", "Pipe", "FastFile"]),
        "attribute_names": ["source-ref", "label"],
        "shuffle_config": ShuffleConfig(source.randrange(1000)),
        "s3_data_type": source.choice(["S3Prefix", "ManifestFile", "AugmentedManifestFile"]),
        "hub_access_config": {"HubContentArn": "arn:aws:sagemaker:us-east-1:123456789012:hub-content/h/Model/m/1"},
        "model_access_config": {"AcceptEula": True},
    }
    if case.groups:
        more["instance_groups"] = case.groups[:1]
    return TrainingInput("s3://bucket/data", **{name: v for name, v in more.items() if source.random() < 0.35})


def _set(**arguments: Any) -> Callable[[Case], None]:
    return lambda case: case.arguments.update(arguments)


def _file_system_without_network(case: Case) -> None:
    from sagemaker.inputs import FileSystemInput

    case.arguments |= {"subnets": None, "security_group_ids": None}
    case.training_job.pop("VpcConfig", None)
    case.inputs = {"train": FileSystemInput(FILE_SYSTEM, "EFS", "/data")}


def _without_role(case: Case) -> None:
    case.arguments.pop("role", None)
    case.training_job.pop("RoleArn", None)


def _spot(**limits: Any) -> Callable[[Case], None]:
    return _set(use_spot_instances=True, **limits)


MISTAKES: list[tuple[str, Callable[[Case], None]]] = [
    ("subnets alone", _set(subnets=["subnet-1"], security_group_ids=None)),
    ("a local output", _set(output_path="file:///tmp/output")),
    ("a number as a variable", _set(environment={"A": 1})),
    ("two profilers", lambda case: case.arguments.update(disable_profiler=True, rules=[None])),
    ("a channel that is a number", lambda case: setattr(case, "inputs", {"train": 5})),
    ("no role", _without_role),
    ("no script", _set(entry_point="missing.py")),
    ("spot without a wait", _spot(max_wait=None)),
    ("spot with a short wait", _spot(max_run=7200, max_wait=3600)),
    ("a file system without a network", _file_system_without_network),
    ("a warm pool for a week", _set(keep_alive_period_in_seconds=604800)),
    ("a name of a job with a blank", _set(base_job_name="my job")),
    ("a variable with a hyphen", _set(environment={"MY-NAME": "1"})),
    ("a long hyperparameter", _set(hyperparameters={"text": "x" * 3000})),
]
