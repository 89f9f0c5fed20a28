"""Configurations that people write and that are wrong, each with what the message must say.

The right ones are in :mod:`support.faults.right_configurations`.

Arguments are merged over those of a job that is in order: two ml.p4d.24xlarge (8 GPUs each), a custom image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Probe:
    """One configuration.

    Attributes:
        name: what it shows.
        arguments: of the estimator; a function where they must be made anew (pipeline variables).
        wrong: regular expressions that the refusal must contain; empty means right.
        warned: regular expressions among the warnings of a right one; empty means: no warnings at all.
    """

    name: str
    arguments: dict[str, Any] | Callable[[], dict[str, Any]]
    wrong: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    def made(self) -> dict[str, Any]:
        """The arguments."""
        made = self.arguments() if callable(self.arguments) else self.arguments
        return {**made, **self.more}


def smp(processes: Any = 8, *, mpi: Any = None, enabled: Any = True, **parameters: Any) -> dict[str, Any]:
    """A distribution, as the argument ``distribution``."""
    return {
        "distribution": {
            "smdistributed": {"modelparallel": {"enabled": enabled, "parameters": parameters}},
            "mpi": {"enabled": True, "processes_per_host": processes} if mpi is None else mpi,
        }
    }


def options(text: str, **parameters: Any) -> dict[str, Any]:
    """A distribution with ``custom_mpi_options``."""
    parameters.setdefault("ddp", True)
    return smp(mpi={"enabled": True, "processes_per_host": 8, "custom_mpi_options": text}, **parameters)


def without(*path: str, **parameters: Any) -> dict[str, Any]:
    """A distribution that lacks one key."""
    made = smp(ddp=True, **parameters)
    inner = made["distribution"]
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return made


def _variable_inside() -> dict[str, Any]:
    from sagemaker.workflow.parameters import ParameterInteger

    return smp(ddp=True, microbatches=ParameterInteger("Microbatches", 4))


def _variable_as_switch() -> dict[str, Any]:
    from sagemaker.workflow.parameters import ParameterBoolean

    return smp(ddp=True, enabled=ParameterBoolean(name="Enabled", default_value=True))


P3 = {"instance_type": "ml.p3.16xlarge"}
ONE = {"instance_count": 1}

WRONG = [
    # the switch
    Probe("enabled as text", smp(ddp=True, enabled="true"), (r"\"enabled\": 'true', a str", r"True or False without")),
    Probe("enabled as number", smp(ddp=True, enabled=1), (r"\"enabled\": 1, an int", r"only a boolean")),
    Probe(
        "enabled missing",
        without("smdistributed", "modelparallel", "enabled"),
        (r"modelparallel has no \"enabled\"", r"add \"enabled\": True"),
    ),
    Probe("mpi missing", without("mpi"), (r"mpi is missing", r"\"processes_per_host\": 8")),
    Probe("mpi disabled", smp(mpi={"enabled": False, "processes_per_host": 8}), (r"mpi is disabled", r"add \"mpi\"")),
    Probe("mpi enabled as text", smp(mpi={"enabled": "True", "processes_per_host": 8}), (r"distribution mpi has",)),
    Probe("mpi without enabled", without("mpi", "enabled"), (r"distribution mpi has no \"enabled\"",)),
    # names
    Probe("misspelt parameter", smp(microbatch=4), (r"unknown parameter 'microbatch', did you mean 'microbatches'",)),
    Probe("misspelt strategy", {"distribution": {"smdistribute": {}}}, (r"did you mean 'smdistributed'",)),
    Probe(
        "misspelt library",
        {"distribution": {"smdistributed": {"model_parallel": {"enabled": True}}}},
        (r"unknown key 'model_parallel'", r"did you mean 'modelparallel'"),
    ),
    Probe(
        "misspelt mpi key",
        smp(mpi={"enabled": True, "process_per_host": 8}),
        (r"unknown key 'process_per_host'", r"did you mean 'processes_per_host'"),
    ),
    Probe(
        "parameters beside enabled",
        {"distribution": {"smdistributed": {"modelparallel": {"enabled": True, "partitions": 2}}}},
        (r"unknown key 'partitions'", r"known are enabled, parameters"),
    ),
    # processes and degrees
    Probe("more processes than GPUs", smp(16, ddp=True), (r"is 16, but ml\.p4d\.24xlarge has 8 GPUs", r"at most 8")),
    Probe(
        "more processes than GPUs of a g instance",
        {**smp(8, ddp=True), "instance_type": "ml.g5.12xlarge"},
        (r"is 8, but ml\.g5\.12xlarge has 4 GPUs", r"at most 4"),
    ),
    Probe("no processes", smp(0, ddp=True), (r"processes_per_host is 0", r"1 or more")),
    Probe("processes as text", smp("8", ddp=True), (r"processes_per_host", r"whole number, got '8'")),
    Probe("half a process", smp(2.5, ddp=True), (r"processes_per_host", r"whole number, got 2\.5")),
    Probe("processes missing", without("mpi", "processes_per_host"), (r"is missing", r"\"processes_per_host\": 8")),
    Probe(
        "tp does not divide",
        smp(tensor_parallel_degree=3, ddp=True),
        (r"= 3 processes, which is no divisor of", r"16 processes = mpi\.processes_per_host 8 × instance_count 2"),
    ),
    Probe(
        "pp × tp above the world",
        smp(partitions=8, tensor_parallel_degree=4, ddp=True),
        (r"8 × tensor_parallel_degree 4 = 32 processes, which is more than", r"16 processes"),
    ),
    Probe("pp above the world", smp(partitions=32), (r"= 32 processes", r"more than the 16 processes")),
    Probe(
        "sharding does not divide",
        smp(sharded_data_parallel_degree=5, ddp=True),
        (r"sharded_data_parallel_degree is 5", r"16 data parallel ranks", r"use one of 1, 2, 4, 8, 16"),
    ),
    Probe(
        "sharding above the reduced degree",
        smp(sharded_data_parallel_degree=16, tensor_parallel_degree=4, ddp=True, prescaled_batch=True),
        (r"there are 4 data parallel ranks", r"use one of 1, 2, 4"),
    ),
    Probe("tp without ddp", smp(tensor_parallel_degree=2), (r"ddp was not given", r"set \"ddp\": True")),
    Probe("sharding without ddp", smp(sharded_data_parallel_degree=4, ddp=False), (r"ddp is false",)),
    Probe(
        "optimizer sharding without ddp", smp(shard_optimizer_state=True), (r"shard_optimizer_state is true", r"ddp")
    ),
    Probe(
        "both kinds of sharding",
        smp(sharded_data_parallel_degree=4, shard_optimizer_state=True, ddp=True),
        (r"remove shard_optimizer_state",),
    ),
    Probe(
        "sharding with tp without prescaled batch",
        smp(sharded_data_parallel_degree=4, tensor_parallel_degree=4, ddp=True),
        (r"set \"prescaled_batch\": True",),
    ),
    Probe(
        "experts over a part of a group",
        smp(expert_parallel_degree=2, tensor_parallel_degree=4, ddp=True),
        (r"expert_parallel_degree is 2 and tensor_parallel_degree is 4", r"set expert_parallel_degree to 4 or to 1"),
    ),
    Probe(
        "both names, two values",
        smp(partitions=2, pipeline_parallel_degree=4),
        (r"partitions is 2 but pipeline_parallel_degree is 4", r"keep only"),
    ),
    Probe(
        "degree 0", smp(pipeline_parallel_degree=0), (r"pipeline_parallel_degree is 0", r"greater than or equal to 1")
    ),
    Probe("degree as text", smp(partitions="2"), (r"pipeline_parallel_degree", r"whole number, got '2' \(str\)")),
    Probe("degree as boolean", smp(tensor_parallel_degree=True, ddp=True), (r"whole number, got True",)),
    # values
    Probe("microbatches 0", smp(microbatches=0), (r"microbatches is 0",)),
    Probe("active microbatches 0", smp(active_microbatches=0), (r"active_microbatches is 0",)),
    Probe("unknown schedule", smp(pipeline="1f1b"), (r"pipeline is '1f1b'", r"interleaved")),
    Probe("unknown optimize", smp(optimize="latency"), (r"optimize is 'latency'", r"memory")),
    Probe("memory weight above 1", smp(memory_weight=1.5), (r"memory_weight is 1\.5", r"less than or equal to 1")),
    Probe("unknown placement", smp(placement_strategy="DDP"), (r"placement_strategy is 'DDP'", r"'DPT'")),
    Probe("lower case placement", smp(placement_strategy="dpt"), (r"placement_strategy is 'dpt'", r"permutation")),
    Probe(
        "auto off without default",
        smp(auto_partition=False, partitions=2),
        (r"default_partition is missing", r"0 to 1"),
    ),
    Probe(
        "default partition too large",
        smp(auto_partition=False, default_partition=2, partitions=2),
        (r"default_partition is 2", r"0 to 1"),
    ),
    Probe(
        "default partition too large, other name",
        smp(auto_partition=False, default_partition=4, pipeline_parallel_degree=4),
        (r"default_partition is 4", r"0 to 3"),
    ),
    Probe("ddp as text", smp(ddp="true"), (r"ddp is 'true'", r"boolean")),
    Probe("backend without ddp", smp(ddp_dist_backend="nccl"), (r"ddp_dist_backend is 'nccl'", r"set \"ddp\": True")),
    Probe("unknown backend", smp(ddp=True, ddp_dist_backend="mpi"), (r"ddp_dist_backend is 'mpi'", r"nccl")),
    Probe("shared memory as a number", smp(host_collectives=1), (r"host_collectives is 1", r"boolean")),
    Probe(
        "shared memory and NCCL",
        smp(ddp=True, ddp_dist_backend="nccl", host_collectives=True),
        (r"host_collectives is true and ddp_dist_backend is 'nccl'", r"remove one"),
    ),
    Probe("port without ddp", smp(ddp_port=1234), (r"ddp_port is 1234",)),
    Probe("port too large", smp(ddp=True, ddp_port=70000), (r"ddp_port is 70000", r"65535")),
    Probe("horovod", smp(horovod=True), (r"horovod is true", r"set ddp to true")),
    Probe("fp16 and bf16", smp(fp16=True, bf16=True), (r"fp16 and bf16 are both true", r"keep one")),
    Probe("loading horizon 0", smp(offload_activations=True, activation_loading_horizon=0), (r"horizon is 0",)),
    Probe(
        "bucket size 0", smp(ddp=True, sharded_data_parallel_degree=2, sdp_reduce_bucket_size=0), (r"bucket_size is 0",)
    ),
    Probe(
        "clipping 0",
        smp(ddp=True, sharded_data_parallel_degree=2, sdp_gradient_clipping=0),
        (r"gradient_clipping is 0",),
    ),
    Probe("partition file missing", smp(load_partition=True), (r"partition_file is missing",)),
    Probe("tracing rank too large", smp(tracing_rank=2, partitions=2), (r"tracing_rank is 2", r"0 to 1")),
    Probe("too long", smp(partition_file="x" * 2600, ddp=True), (r"characters as JSON, but the service accepts 2500",)),
    # other strategies beside it
    Probe(
        "both libraries",
        {
            "distribution": {
                "smdistributed": {"modelparallel": {"enabled": True}, "dataparallel": {"enabled": True}},
                "mpi": {"enabled": True, "processes_per_host": 8},
            }
        },
        (r"both modelparallel and dataparallel", r"remove one"),
    ),
    Probe(
        "torchrun",
        {"distribution": {**smp(ddp=True)["distribution"], "torch_distributed": {"enabled": True}}},
        (r"'ddp': it belongs to version 1", r"remove it"),
    ),
    # mpirun
    Probe(
        "contradicting options", options("--bind-to none --bind-to core"), (r"'--bind-to none' and '--bind-to core'",)
    ),
    Probe("number of processes in options", options("-np 4"), (r"-np", r"processes_per_host")),
    Probe("open quote", options("-x A='1"), (r"cannot be split", r"close the quote")),
    Probe("word of no option", options("NCCL_DEBUG=INFO"), (r"belongs to no option",)),
    Probe(
        "options as a list",
        smp(mpi={"enabled": True, "processes_per_host": 8, "custom_mpi_options": ["-x"]}),
        (r"custom",),
    ),
    # SMDDP buffers
    Probe(
        "buffer of an odd size",
        {**smp(ddp=True), "environment": {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "10000"}},
        (r"is 10000", r"1 × 8192 \+ 1808", r"8192 or 16384"),
    ),
    Probe(
        "buffer in two places",
        {
            **options("-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8192"),
            "environment": {"SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "16384"},
        },
        (r"'16384' in environment and '8192' in custom_mpi_options", r"remove one"),
    ),
    # pipelines
    Probe(
        "variable inside the parameters",
        _variable_inside,
        (r"\['microbatches'\] is the pipeline variable", r"one JSON text"),
    ),
    Probe("variable as switch", _variable_as_switch, (r"\['enabled'\] is the pipeline variable Parameter Enabled",)),
    # instances
    Probe("Neuron devices", {**smp(ddp=True), "instance_type": "ml.trn1.32xlarge"}, (r"Neuron", r"ml\.p4d\.24xlarge")),
    Probe(
        "Neuron devices of the second generation",
        {**smp(ddp=True), "instance_type": "ml.trn2.48xlarge"},
        (r"ml\.trn2\.48xlarge, whose accelerators are AWS Neuron devices", r"ml\.p4d\.24xlarge"),
    ),
    Probe(
        "GPUs that PyTorch has left",
        {**smp(8, ddp=True), "instance_type": "ml.p2.8xlarge"},
        (r"K80 GPUs have compute capability 3\.7", r"'ml\.g5\.12xlarge'"),
    ),
    Probe(
        "NCCL without GPUs",
        {**smp(8, ddp=True, ddp_dist_backend="nccl"), "instance_type": "ml.c5.18xlarge"},
        (r"\"nccl\".*but ml\.c5\.18xlarge has none", r"use \"auto\""),
    ),
    Probe(
        "shared memory of GPUs",
        {**smp(8, ddp=True, host_collectives=True), "instance_type": "ml.p4d.24xlarge"},
        (r"host_collectives is true.*ml\.p4d\.24xlarge has 8 GPUs", r"remove host_collectives"),
    ),
    Probe("time limit", {**smp(8, ddp=True), "environment": {"SMP_TIMEOUT_SECONDS": "soon"}}, (r"'soon'", r"above 0")),
    Probe("throttle", options("-x SMP_NCCL_THROTTLE_LIMIT=0"), (r"is '0'", r"-1 for no limit")),
    Probe("watch", options("-x SMP_HANG_SECONDS=soon"), (r"is 'soon'", r"or 0 for no watch")),
    Probe("restarts", options("-x SMP_MAX_RESTARTS=some"), (r"is 'some'", r"a whole number from 0")),
    Probe("memory", options("-x SMP_MEMORY_CHECKPOINT=yes"), (r"is 'yes'", r"set 1, or 0")),
    Probe("drill", options("-x SMP_FAULTS=kill@rank=one"), (r"'rank=one'", r"a number from 0")),
    Probe("hosts as text", {**smp(ddp=True), "instance_count": "2"}, (r"instance_count is '2'",)),
    Probe("no hosts", {**smp(ddp=True), "instance_count": 0}, (r"instance_count is 0",)),
    # images
    Probe(
        "old PyTorch",
        {**smp(ddp=True), "image_uri": None, "framework_version": "1.13.1", "py_version": "py39"},
        (
            r"framework_version is 1\.13\.1",
            r"needs PyTorch 2\.4 or newer",
            r"'2\.4\.0', py_version='py311', the nearest",
        ),
    ),
    Probe(
        "old stock image",
        {
            **smp(ddp=True),
            "image_uri": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:1.13.1-gpu-py39",
        },
        (
            r"image_uri is .*pytorch-training:1\.13\.1-gpu-py39, a stock image with PyTorch 1\.13\.1",
            r"needs PyTorch 2\.4 or newer",
            r"leave image_uri out, or name a newer one, such as pytorch:2\.14",
        ),
    ),
    Probe(
        "PyTorch without an image",
        {**smp(ddp=True), "image_uri": None, "framework_version": "2.4.7"},
        (r"no training image of it", r"set framework_version='2\.4\.0', or give"),
    ),
    Probe(
        "Python of another image",
        {**smp(ddp=True), "image_uri": None, "framework_version": "2.4", "py_version": "py39"},
        (r"py_version is py39", r"'py311'"),
    ),
    Probe(
        "switch missing and no versions",
        {**without("smdistributed", "modelparallel", "enabled"), "image_uri": None},
        (r"modelparallel has no \"enabled\"", r"add \"enabled\": True"),
    ),
    Probe(
        "no strategy and no versions",
        {"image_uri": None},
        (r"framework_version and py_version are missing", r"give for example framework_version='2\.", r"or image_uri"),
    ),
    # arguments
    Probe(
        "misspelt argument",
        {"instance_cont": 2},
        (r"SMPEstimator got instance_cont=2, did you mean 'instance_count'\?",),
    ),
    Probe(
        "two misspelt arguments",
        {"hyperparamters": {}, "max_runs": 5},
        (r"hyperparamters=\{\}, did you mean 'hyperparameters'\?; max_runs=5, did you mean 'max_run'\?",),
    ),
    Probe("argument of nobody", {"zzz": 1}, (r"got zzz=1; the SDK would drop",)),
    Probe(
        "two names of one argument", {"train_max_run": 5, "max_run": 5}, (r"train_max_run and max_run are two names",)
    ),
    Probe("misspelt machine", {"instance_type": "locl"}, (r"'locl', did you mean 'local'\?", r"begin with \"ml\.\"")),
    Probe("EC2's name", {"instance_type": "p4d.24xlarge"}, (r"did you mean 'ml\.p4d\.24xlarge'\?",)),
    Probe("no machine", {"instance_type": None}, (r"instance_type is missing", r"\"local\" starts processes")),
    # the service
    Probe(
        "spot without a limit",
        {**smp(ddp=True), "use_spot_instances": True},
        (r"max_wait is missing", r"max_wait=86400"),
    ),
    Probe(
        "spot with a limit too short",
        {**smp(ddp=True), "use_spot_instances": True, "max_run": 7200, "max_wait": 3600},
        (r"max_wait is 3600", r"7200 or more"),
    ),
    Probe("warm for ever", {**smp(ddp=True), "keep_alive_period_in_seconds": 10**6}, (r"is 1000000", r"0 to 21600")),
    Probe(
        "long hyperparameter", {**smp(ddp=True), "hyperparameters": {"a": "x" * 2500}}, (r"'a' takes 2502 characters",)
    ),
    Probe("variable name", {**smp(ddp=True), "environment": {"MY-VAR": "1"}}, (r"'MY-VAR'", r"write 'MY_VAR'")),
    Probe("variable as number", {**smp(ddp=True), "environment": {"A": 1}}, (r"'A' is 1, an int", r"write '1'")),
]
