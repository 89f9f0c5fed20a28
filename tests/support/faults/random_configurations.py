"""Configurations drawn at random, the same in every run: about half of them right, the others wrong in one or two ways.

Each is what a notebook gives (distribution, instances, environment) and is judged twice: by the client, and by what
the ranks of such a job ask of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from smp_config.schedules import SCHEDULES

#: The same draw in every run.
SEED = 19

#: Instance types with the GPUs that each has; None for this machine's processes.
GPUS = {
    None: 0,
    "ml.p4d.24xlarge": 8,
    "ml.p3.16xlarge": 8,
    "ml.p3.2xlarge": 1,
    "ml.g5.12xlarge": 4,
    "ml.g4dn.12xlarge": 4,
    "ml.p9.96xlarge": 8,
    "ml.c5.18xlarge": 0,
    "ml.m5.4xlarge": 0,
}


@dataclass
class Drawn:
    """One configuration.

    Attributes:
        instance_type: None for processes of this machine.
        wrong: how it was spoilt, in words; empty for one that was drawn to be right.
    """

    number: int
    instance_type: str | None
    hosts: Any
    mpi: dict[str, Any]
    parameters: Any
    environment: dict[str, str]
    wrong: list[str] = field(default_factory=list)

    @property
    def distribution(self) -> dict[str, Any]:
        """As the estimator gets it."""
        return {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": self.parameters}},
            "mpi": {"enabled": True, **self.mpi},
        }

    @property
    def world(self) -> int:
        """Ranks of the job, where its numbers are numbers."""
        processes = self.mpi.get("processes_per_host", 1)
        return processes * self.hosts if type(processes) is int and type(self.hosts) is int else 0


def drawn(count: int = 500) -> list[Drawn]:
    """The first ``count`` configurations."""
    source = random.Random(SEED)
    made = []
    for number in range(count):
        case = _right(source, number)
        for _ in range(source.choice((0, 0, 0, 1, 1, 2))):
            how, spoil = source.choice(_MISTAKES)
            if isinstance(case.parameters, dict):
                spoil(source, case)
                case.wrong.append(how)
        made.append(case)
    return made


def _right(source: random.Random, number: int) -> Drawn:
    """Degrees that divide what they must, and options that exist, in any combination that no rule forbids."""
    instance_type = source.choice([*[None] * 8, *[name for name in GPUS if name]])
    gpus = GPUS[instance_type]
    hosts = source.choice((1, 1, 1, 2, 3) if instance_type is None else (1, 2, 4))
    most = source.choice((4, 4, 4, 8)) if instance_type is None else 32
    processes = source.choice([n for n in (1, 2, 2, 3, 4, 4, 8) if n * hosts <= most])
    processes = min(processes, gpus) if gpus else processes
    world = processes * hosts
    tensor = source.choice(_divisors(world) + [1, 1])
    pipeline = source.choice(_divisors(world // tensor) + [1])
    replicas = world // (tensor * pipeline)
    shards = source.choice(_divisors(replicas) + [1, 1])
    given: dict[str, Any] = {"ddp": True} if tensor > 1 or shards > 1 or source.random() < 0.7 else {}
    if pipeline > 1 or source.random() < 0.2:
        given[source.choice(("partitions", "pipeline_parallel_degree"))] = pipeline
    if tensor > 1 or source.random() < 0.1:
        given["tensor_parallel_degree"] = tensor
    if tensor > 1 and source.random() < 0.2:
        given["expert_parallel_degree"] = tensor
    if shards > 1 or source.random() < 0.1:
        given["sharded_data_parallel_degree"] = shards
    context = source.choice([*_divisors(replicas), 1, 1, 1, 1])
    if context > 1:
        given |= {"ddp": True, "context_parallel_degree": context}
        if source.random() < 0.3:
            given["context_parallel"] = source.choice(("auto", "ring", "all_gather", "all_to_all"))
    is_shared = shards > 1 or context > 1
    if given.get("tensor_parallel_degree", 1) > 1 and (is_shared or source.random() < 0.5):
        given["prescaled_batch"] = True
    for name, values in _OPTIONS.items():
        if source.random() < 0.12:
            given[name] = source.choice(values)
    if not given.get("ddp"):
        for name in (
            "shard_optimizer_state",
            "tensor_parallel_degree",
            "expert_parallel_degree",
            "sharded_data_parallel_degree",
            "ddp_dist_backend",
        ):
            given.pop(name, None)
    if shards > 1:
        given.pop("shard_optimizer_state", None)
    if given.get("fp16"):
        given.pop("bf16", None)
    if given.get("auto_partition") is False or "default_partition" in given:
        given["default_partition"] = source.randrange(pipeline)
    if "tracing_rank" in given:
        given["tracing_rank"] = source.randrange(pipeline)
    if given.get("ddp_dist_backend") == "nccl" and not gpus:
        given["ddp_dist_backend"] = "gloo"
    if gpus or given.get("ddp_dist_backend") in ("nccl", "smddp"):
        given.pop("host_collectives", None)
    mpi: dict[str, Any] = {"processes_per_host": processes}
    if source.random() < 0.3:
        mpi["custom_mpi_options"] = source.choice(_MPI_OPTIONS)
    environment = dict([source.choice(_VARIABLES)]) if source.random() < 0.2 else {}
    return Drawn(number, instance_type, hosts, mpi, given, environment)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


#: Options that may stand in any job, with values that are right.
_OPTIONS: dict[str, list[Any]] = {
    "microbatches": [1, 2, 4, 4.0],
    "active_microbatches": [1, 2, 8],
    "virtual_stages": [1, 2],
    "pipeline": list(SCHEDULES),
    "optimize": ["memory", "speed"],
    "memory_weight": [0, 0.5, 1.0],
    "placement_strategy": ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"],
    "auto_partition": [True, False],
    "default_partition": [0],
    "ddp_dist_backend": ["auto", "gloo", "nccl", "smddp"],
    "host_collectives": [True, False],
    "ddp_port": [],
    "shard_optimizer_state": [True, True, False],
    "fp16": [True, False],
    "bf16": [True, False],
    "fp16_params": [True, False],
    "offload_activations": [True],
    "activation_loading_horizon": [1, 4],
    "delayed_parameter_initialization": [True],
    "skip_tracing": [True],
    "deterministic_server": [True],
    "deterministic": [True, False],
    "record_numerics": [0, 10],
    "check_invariants": [True, False],
    "sdp_reduce_bucket_size": [5e8, 1000],
    "sdp_param_persistence_threshold": [0, 10],
    "sdp_max_live_parameters": [1e9],
    "sdp_hierarchical_allgather": [True, False],
    "sdp_gradient_clipping": [1, 0.5],
    "contiguous": [True, False],
    "horovod": [False],
    "partition_file": ["partition.json"],
    "fast_mode": [True, False],
    "static_mode": [True],
    "checkpoint_attentions": [True],
    "overlapping_allreduce": [True, False],
    "tracing_rank": [0],
    "_match_weights": [False],
    "_fp32_grad_accumulation": [True],
    "_prescaled_batch": [],
}
_OPTIONS = {name: values for name, values in _OPTIONS.items() if values}

_MPI_OPTIONS = [
    "",
    None,
    "-x NCCL_DEBUG=INFO",
    "-verbose --mca btl_vader_single_copy_mechanism none",
    "--mca btl_vader_single_copy_mechanism none --mca smsc cma",
    "--tag-output -x A=1 -x A=1",
    "-x SMP_TIMEOUT_SECONDS=60",
]

_VARIABLES = [
    ("SMP_TIMEOUT_SECONDS", "120"),
    ("SMP_NCCL_THROTTLE_LIMIT", "-1"),
    ("SMP_TIMELINE", "3"),
    ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "16384"),
    ("MINE", "1"),
]

_WRONG_VALUES = [
    "true",
    "2",
    -1,
    0,
    2.5,
    None,
    [1],
    {"a": 1},
    True,
    False,
    "",
    float("inf"),
    float("nan"),
    10**30,
    b"x",
    {1},
]
_WRONG_MPI = ["-np 4", "-x A=1 -x A=2", "-x", "word", "--mca a", "-x A='1", ["-x"], 5, "--output xml", "-host a:2"]
_WRONG_VARIABLES = [
    ("SMP_TIMEOUT_SECONDS", "soon"),
    ("SMP_TIMEOUT_SECONDS", "nan"),
    ("SMP_NCCL_THROTTLE_LIMIT", "0"),
    ("SMP_TIMELINE", "all"),
    ("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "10000"),
    ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "x"),
]

Spoil = Callable[[random.Random, Drawn], None]


def _set(*pairs: tuple[str, Any]) -> Spoil:
    def spoil(source: random.Random, case: Drawn) -> None:
        case.parameters.update(pairs)

    return spoil


def _a_value(source: random.Random, case: Drawn) -> None:
    case.parameters[source.choice([*_OPTIONS, "ddp", "partitions", "tensor_parallel_degree"])] = source.choice(
        _WRONG_VALUES
    )


def _a_degree(source: random.Random, case: Drawn) -> None:
    degree = source.choice(
        (
            "pipeline_parallel_degree",
            "tensor_parallel_degree",
            "sharded_data_parallel_degree",
            "context_parallel_degree",
        )
    )
    case.parameters[degree] = source.choice((2, 3, 4, 5, 8, 16))


def _an_option(source: random.Random, case: Drawn) -> None:
    name = source.choice(list(_OPTIONS))
    case.parameters[name] = source.choice(_OPTIONS[name])


def _a_name(source: random.Random, case: Drawn) -> None:
    name = source.choice(["microbatch", "tp_degree", "Partitions", "bucket_cap_mb", "sharded", "", 7, "ddp "])
    case.parameters[name] = source.choice((1, 2, True))


def _processes(source: random.Random, case: Drawn) -> None:
    case.mpi["processes_per_host"] = source.choice((0, -1, "2", 2.5, 3, 5, 16, 64, True, None, [2]))


def _hosts(source: random.Random, case: Drawn) -> None:
    case.hosts = source.choice((0, "2", 3, 1.5, True, -2))


def _mpi(source: random.Random, case: Drawn) -> None:
    case.mpi["custom_mpi_options"] = source.choice(_WRONG_MPI)


def _variable(source: random.Random, case: Drawn) -> None:
    name, value = source.choice(_WRONG_VARIABLES)
    case.environment[name] = value


def _instance(source: random.Random, case: Drawn) -> None:
    if case.instance_type is not None:
        case.instance_type = source.choice(("ml.p2.xlarge", "ml.trn1.32xlarge", "ml.c5.18xlarge"))


def _whole(source: random.Random, case: Drawn) -> None:
    case.parameters = source.choice(([1, 2], 5, True, [], "[1]"))


_MISTAKES: list[tuple[str, Spoil]] = [
    *[("a value", _a_value)] * 5,
    *[("a degree", _a_degree)] * 4,
    *[("another option", _an_option)] * 4,
    ("a name", _a_name),
    ("processes", _processes),
    ("hosts", _hosts),
    *[("mpi options", _mpi)] * 2,
    *[("a variable", _variable)] * 2,
    ("the instance", _instance),
    ("no dictionary", _whole),
    ("nccl", _set(("ddp", True), ("ddp_dist_backend", "nccl"))),
    ("shared memory and NCCL", _set(("ddp", True), ("ddp_dist_backend", "nccl"), ("host_collectives", True))),
    ("no ddp", _set(("ddp", False))),
    ("both names", _set(("partitions", 2), ("pipeline_parallel_degree", 4))),
    ("both halves", _set(("fp16", True), ("bf16", True))),
    ("both kinds of sharding", _set(("shard_optimizer_state", True), ("sharded_data_parallel_degree", 2))),
    ("tensor parallel state", _set(("shard_optimizer_state", True), ("tensor_parallel_degree", 2))),
    ("a file that is missing", _set(("load_partition", True), ("partition_file", "/nowhere/partition.json"))),
    ("no file", _set(("load_partition", True))),
    ("a default too large", _set(("auto_partition", False), ("default_partition", 7))),
    ("no default", _set(("auto_partition", False))),
    ("a rank too large", _set(("tracing_rank", 3))),
    ("a port", _set(("ddp_port", 70000))),
]
