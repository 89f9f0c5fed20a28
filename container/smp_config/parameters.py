"""``mp_parameters``: every setting of the model parallel library, typed.

The notebook's ``distribution["smdistributed"]["modelparallel"]["parameters"]`` and what a rank reads from the
hyperparameter ``mp_parameters`` are the same class, so what the client accepted is what the ranks build.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from smp_config.errors import ConfigError, show_value, suggest
from smp_config.formats import strict_json
from smp_config.formats.numbers_given import Real, Whole  # noqa: TC001 - pydantic reads the types
from smp_config.formats.values import why_no_path
from smp_config.limits import MOST_EVERY
from smp_config.machine import collective_backends
from smp_config.schedules import DEFAULT_SCHEDULE, Schedule, default_active, describe
from smp_config.topology import Topology
from smp_config.version1.warnings import find_warnings

#: Arguments of ``smp.DistributedModel``, which are no settings of the job, and a value to show.
_MODEL_ARGUMENTS = {
    "trace_device": '"cpu"',
    "trace_execution_times": "True",
    "trace_memory_usage": "True",
    "backward_passes_per_step": "2",
    "average_grads_across_microbatches": "False",
    "bucket_cap_mb": "25",
    "broadcast_buffers": "False",
    "gradient_as_bucket_view": "True",
    "find_unused_parameters": "True",
}

#: Settings that only version 2 of the library has (``smp_config.version2``), and what does the same in version 1.
VERSION_2 = {
    "hybrid_shard_degree": '"ddp": True and "sharded_data_parallel_degree"',
    "fsdp_cache_flush_warnings": "torch.cuda.memory_stats() in the script",
    "allow_empty_shards": '"sdp_param_persistence_threshold", below which parameters stay whole,',
    "sm_activation_offloading": '"offload_activations"',
    "random_seed": "torch.manual_seed(…) in the script",
}


class ModelParallelParameters(BaseModel):
    """All settings of the model parallel library, with the documented names, defaults and bounds.

    Degrees count processes; sizes of buckets and thresholds count elements. Attributes that were not given hold
    their resolved default (``active_microbatches`` and ``memory_weight`` depend on other fields).

    Raises:
        ConfigError: from :meth:`from_mp_parameters`; pydantic's ``ValidationError`` when constructed directly.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    pipeline_parallel_degree: Whole = Field(
        1, ge=1, description="Stages a model replica is split into (old name: partitions)."
    )
    tensor_parallel_degree: Whole = Field(
        1, ge=1, description="Processes that share each distributed layer; above 1 needs ddp."
    )
    expert_parallel_degree: Whole = Field(
        1,
        ge=1,
        description="Processes that share whole experts of a mixture out: all of a tensor parallel group; 1 splits each expert.",
    )
    sharded_data_parallel_degree: Whole = Field(
        1, ge=1, description="Processes that share parameters, gradients and optimizer state; 1 turns sharding off."
    )
    context_parallel_degree: Whole = Field(
        1, ge=1, description="Processes that share each sequence out, and read the same batch; above 1 needs ddp."
    )
    context_parallel: Literal["auto", "ring", "all_gather", "all_to_all"] = Field(
        "auto", description="How keys and values travel in attention; auto: in the way that sends the fewest bytes."
    )
    microbatches: Whole = Field(1, ge=1, description="Slices of a batch that run through the pipeline; 1 means none.")
    active_microbatches: Whole | None = Field(
        None,
        ge=1,
        description="Most microbatches in flight at once; default: stages + 2, twice the stages with virtual_stages.",
    )
    virtual_stages: Whole = Field(
        1, ge=1, description="Pieces of the model that each pipeline stage owns: more idle less and send more."
    )
    pipeline: Schedule = Field(
        DEFAULT_SCHEDULE,
        description=describe(),
    )
    compile: StrictBool = Field(False, description="Compile the repeated blocks of each rank with torch.compile.")
    compile_backend: str = Field("inductor", min_length=1, description="The backend of torch.compile.")
    optimize: Literal["memory", "speed"] = Field(
        "memory", description="Tensor parallelism: less activation memory, or less communication."
    )
    memory_weight: Real | None = Field(
        None, ge=0.0, le=1.0, description="Balance of memory (1) against time (0); default 0.2 for speed, else 0.8."
    )
    placement_strategy: str = Field(
        "cluster", description="cluster (DPT), spread (TPD) or any permutation of D, P, T; right-most varies fastest."
    )
    auto_partition: StrictBool = Field(True, description="Split the model automatically.")
    default_partition: Whole | None = Field(
        None, ge=0, description="Stage of modules outside every smp.partition; required when auto_partition is off."
    )
    ddp: StrictBool = Field(False, description="Data parallelism with gradient all-reduce.")
    ddp_dist_backend: collective_backends.Backend = Field(
        collective_backends.AUTOMATIC, description=collective_backends.describe()
    )
    host_collectives: StrictBool | None = Field(
        None,
        description="Ranks of one host reduce and gather through memory that they share, on CPUs; default: true in process mode, "
        "else false.",
    )
    ddp_port: Whole | None = Field(None, ge=1, le=65535, description="Rendezvous port; default: a free one.")
    prescaled_batch: StrictBool = Field(False, description="Ranks of one tensor parallel group receive the same batch.")
    shard_optimizer_state: StrictBool = Field(
        False, description="Optimizer state sharded over the ranks that hold the same parameters."
    )
    fp16: StrictBool = Field(False, description="Train in float16 with fp32 master weights and loss scaling.")
    bf16: StrictBool = Field(False, description="Train in bfloat16 with fp32 master weights.")
    fp8: StrictBool = Field(
        False,
        description="Linear layers multiply numbers of 8 bits, with delayed scales; sharded weights are gathered in 8 bits.",
    )
    fp16_params: StrictBool = Field(False, description="Initialise distributed modules in float16.")
    offload_activations: StrictBool = Field(False, description="Checkpointed activations wait in CPU memory.")
    activation_loading_horizon: Whole = Field(
        4, ge=1, description="Pipeline tasks before its use at which an offloaded activation is loaded back."
    )
    delayed_parameter_initialization: StrictBool = Field(
        False, description="Parameters stay on the meta device until the model is partitioned."
    )
    skip_tracing: StrictBool = Field(False, description="Partition without the tracing step.")
    deterministic_server: StrictBool = Field(False, description="Same order of requests on all data parallel ranks.")
    deterministic: StrictBool = Field(
        False, description="Runs at the same degrees are equal in every bit; what prevents it is an error or a warning."
    )
    record_numerics: Whole = Field(
        0,
        ge=0,
        le=MOST_EVERY,
        description="Updates from one step recorded for smp-estimator diff to the next; 0: none.",
    )
    check_invariants: StrictBool = Field(
        True,
        description="Compare copies of parameters after the first update and every 1,000, compare parts with the whole at "
        "wrapping, and look for NaN in the first steps.",
    )
    sdp_reduce_bucket_size: Whole = Field(500_000_000, ge=1, description="Elements per gradient bucket.")
    sdp_param_persistence_threshold: Whole = Field(
        1_000_000, ge=0, description="Parameters with fewer elements stay replicated; 0 shards everything."
    )
    sdp_max_live_parameters: Whole = Field(1_000_000_000, ge=1, description="Most gathered elements at once.")
    sdp_hierarchical_allgather: StrictBool = Field(True, description="All-gather in phases inside and between nodes.")
    sdp_gradient_clipping: Real = Field(1.0, gt=0.0, description="L2 norm to which the global gradient is clipped.")
    contiguous: StrictBool = Field(
        True, description="Accepted for old scripts: the automatic partition gives every stage neighbouring modules."
    )
    horovod: StrictBool = Field(False, description="Only false: Horovod belongs to TensorFlow.")
    load_partition: StrictBool = Field(False, description="Read the partition decision from partition_file.")
    partition_file: str | None = Field(
        None,
        description="File with a partition decision, read or written; relative: with the job's output and checkpoints.",
    )
    fast_mode: StrictBool = Field(
        True,
        description="Calls of modules on other stages return at once, with results shaped as in earlier calls; false: each "
        "call waits for its result, which is slower, but models need it whose output shapes depend on values.",
    )
    step_program: StrictBool = Field(
        False,
        description="Stages keep the requests of planned steps, and send each other only tensors while the model's calls stay "
        "the same.",
    )
    static_mode: StrictBool = Field(False, description="Accepted for old scripts; recorded order is always replayed.")
    checkpoint_attentions: StrictBool = Field(False, description="Checkpoint the attentions of distributed layers.")
    overlapping_allreduce: StrictBool = Field(True, description="Reduce gradients while backward still runs.")
    tracing_rank: Whole | None = Field(None, ge=0, description="Pipeline rank that traces the model; default 0.")
    match_weights: StrictBool = Field(
        False,
        alias="_match_weights",
        description="Accepted for old scripts; distributed modules keep the original's weights.",
    )
    fp32_grad_accumulation: StrictBool = Field(
        False, alias="_fp32_grad_accumulation", description="Accumulate half precision gradients in fp32."
    )

    @model_validator(mode="before")
    @classmethod
    def _names(cls, data: Any) -> Any:
        """Settle the old names; unknown keys name the nearest known key."""
        if not isinstance(data, Mapping):
            raise ValueError(f"the parameters must be a dictionary, got {type(data).__name__}")
        given = dict(data)
        for old, new in _OLD_NAMES.items():
            if old not in given:
                continue
            value = given.pop(old)
            if new in given and given[new] != value:
                raise ValueError(
                    f"{old} is {show_value(value)} but {new} is {show_value(given[new])}; they are two names of one setting: "
                    f"keep only {new}"
                )
            given[new] = value
        for key in given:
            if key not in _KNOWN_KEYS:
                argument = str(key).strip("_")
                if argument in _MODEL_ARGUMENTS:
                    raise ValueError(
                        f"unknown parameter {key!r}: {argument} is no setting of the job but an argument of the script's model; "
                        f"remove it and write smp.DistributedModel(model, {argument}={_MODEL_ARGUMENTS[argument]})"
                    )
                if key in VERSION_2:
                    raise ValueError(
                        f"unknown parameter {key!r}: it belongs to version 2 of the model parallel library (scripts that import "
                        f"torch.sagemaker), and these settings are of version 1; for version 2 start the job with "
                        f'"torch_distributed": {{"enabled": True}} in place of "mpi"; in version 1 use {VERSION_2[key]} instead'
                    )
                raise ValueError(
                    f"unknown parameter {show_value(key)}{suggest(str(key), _KNOWN_KEYS) or '; see the documented names'}"
                )
        return given

    @model_validator(mode="after")
    def _placement(self) -> ModelParallelParameters:
        if sorted(self.placement) != ["D", "P", "T"]:
            raise ValueError(
                f"placement_strategy is {show_value(self.placement_strategy)}; it must be 'cluster', 'spread' or a "
                "permutation of the letters D, P and T, for example 'DPT'"
            )
        return self

    @model_validator(mode="after")
    def _data_parallel(self) -> ModelParallelParameters:
        if self.horovod:
            raise ValueError("horovod is true, but it belongs to TensorFlow; remove it and set ddp to true instead")
        needs = {
            f"tensor_parallel_degree is {self.tensor_parallel_degree}": self.tensor_parallel_degree > 1,
            f"context_parallel_degree is {self.context_parallel_degree}": self.context_parallel_degree > 1,
            f"sharded_data_parallel_degree is {self.sharded_data_parallel_degree}": self.sharded_data_parallel_degree
            > 1,
            "shard_optimizer_state is true": self.shard_optimizer_state,
            f"ddp_port is {self.ddp_port}": self.ddp_port is not None,
            f"ddp_dist_backend is {self.ddp_dist_backend!r}": self.ddp_dist_backend != collective_backends.AUTOMATIC,
        }
        for what, needed in needs.items():
            if needed and not self.ddp:
                how = "is false" if "ddp" in self.model_fields_set else "was not given (its default is false)"
                raise ValueError(f'{what}, which needs data parallelism, but ddp {how}; set "ddp": True')
        return self

    @model_validator(mode="after")
    def _shared_memory(self) -> ModelParallelParameters:
        stood_in_for = (collective_backends.AUTOMATIC, collective_backends.HOST_BACKEND)
        if self.host_collectives and self.ddp_dist_backend not in stood_in_for:
            raise ValueError(
                f"host_collectives is true and ddp_dist_backend is {self.ddp_dist_backend!r}; collectives through shared memory "
                "stand in for those of gloo, on CPUs: remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _experts(self) -> ModelParallelParameters:
        degree, tensor = self.expert_parallel_degree, self.tensor_parallel_degree
        if degree not in (1, tensor):
            raise ValueError(
                f"expert_parallel_degree is {degree} and tensor_parallel_degree is {tensor}; experts are shared out over a whole "
                f"tensor parallel group, or each is split over it: set expert_parallel_degree to {tensor} or to 1"
                if tensor > 1
                else f"expert_parallel_degree is {degree}, but tensor_parallel_degree is 1, and experts are shared out over a "
                f"tensor parallel group: set tensor_parallel_degree to {degree} too, and ddp to true"
            )
        return self

    @model_validator(mode="after")
    def _context(self) -> ModelParallelParameters:
        degree = self.context_parallel_degree
        if degree == 1:
            return self
        if self.tensor_parallel_degree > 1 and not self.prescaled_batch:
            raise ValueError(
                f"context_parallel_degree is {degree} and tensor_parallel_degree is {self.tensor_parallel_degree}; together they "
                'need every tensor parallel group to read one batch: set "prescaled_batch": True'
            )
        for name, why in (
            ("compile", "blocks are not compiled for slices of sequences"),
            ("fp8", "the scales of 8 bits are those of whole sequences"),
        ):
            if getattr(self, name):
                raise ValueError(
                    f"context_parallel_degree is {degree} and {name} is true, but {why}: remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _precision(self) -> ModelParallelParameters:
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both true; training has one half precision: keep one of them")
        return self

    @model_validator(mode="after")
    def _eight_bits(self) -> ModelParallelParameters:
        if self.fp8 and self.compile:
            raise ValueError(
                "fp8 and compile are both true, and layers that multiply in emulated 8 bits are not compiled: keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _sharding(self) -> ModelParallelParameters:
        degree = self.sharded_data_parallel_degree
        if degree > 1 and self.shard_optimizer_state:
            raise ValueError(
                f"sharded_data_parallel_degree is {degree} and shard_optimizer_state is true; sharded data "
                "parallelism already shards the optimizer state: remove shard_optimizer_state"
            )
        if degree > 1 and self.tensor_parallel_degree > 1 and not self.prescaled_batch:
            raise ValueError(
                f"sharded_data_parallel_degree is {degree} and tensor_parallel_degree is "
                f"{self.tensor_parallel_degree}; together they need every tensor parallel group to read one batch: "
                'set "prescaled_batch": True'
            )
        return self

    @model_validator(mode="after")
    def _partitioning(self) -> ModelParallelParameters:
        stages = self.pipeline_parallel_degree
        if not self.auto_partition and self.default_partition is None:
            raise ValueError(
                "auto_partition is false and default_partition is missing; modules outside every smp.partition "
                f"context need a stage: set default_partition to a number from 0 to {stages - 1}"
            )
        if self.default_partition is not None and self.default_partition >= stages:
            raise ValueError(
                f"default_partition is {self.default_partition}, but pipeline_parallel_degree is {stages}, so stages "
                f"are numbered 0 to {stages - 1}; use one of these"
            )
        if self.load_partition and not self.partition_file:
            raise ValueError("load_partition is true but partition_file is missing; name the file to read")
        why = why_no_path(self.partition_file) if self.partition_file else None
        if why is not None:
            raise ValueError(f"partition_file {why}")
        if self.tracing_rank is not None and self.tracing_rank >= stages:
            raise ValueError(
                f"tracing_rank is {self.tracing_rank}, but pipeline_parallel_degree is {stages}; "
                f"use a pipeline rank from 0 to {stages - 1}"
            )
        return self

    @model_validator(mode="after")
    def _resolved_defaults(self) -> ModelParallelParameters:
        active = self.active_microbatches or default_active(self.pipeline_parallel_degree, self.virtual_stages)
        memory_weight = self.memory_weight
        if memory_weight is None:
            memory_weight = 0.2 if self.optimize == "speed" else 0.8
        # Written past pydantic so that a default stays out of model_fields_set, hence out of mp_parameters.
        self.__dict__.update(
            active_microbatches=active,
            memory_weight=memory_weight,
            default_partition=self.default_partition or 0,
        )
        return self

    @property
    def partitions(self) -> int:
        """Return :attr:`pipeline_parallel_degree`, under its old name."""
        return self.pipeline_parallel_degree

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables for the interpreter of every rank; the user's own values win."""
        return {"PYTHONHASHSEED": "0"} if self.deterministic else {}

    @property
    def placement(self) -> str:
        """Return the placement as letters, right-most varying fastest: ``"DPT"`` for ``"cluster"``."""
        return {"cluster": "DPT", "spread": "TPD"}.get(self.placement_strategy, self.placement_strategy)

    def topology(self, world_size: int) -> Topology:
        """Lay these degrees over ``world_size`` processes; raises ConfigError when they do not fit."""
        return Topology(
            world_size,
            pipeline=self.pipeline_parallel_degree,
            tensor=self.tensor_parallel_degree,
            sharded=self.sharded_data_parallel_degree,
            placement=self.placement,
            context=self.context_parallel_degree,
        )

    def warnings(self) -> list[str]:
        """Return warnings of settings that are allowed but ignored or not recommended, one sentence each."""
        return find_warnings(self)

    @classmethod
    def from_mp_parameters(cls, value: Mapping[str, Any] | str | None) -> ModelParallelParameters:
        """Read the hyperparameter ``mp_parameters``, a dictionary or its JSON text; None means all defaults.

        Raises:
            ConfigError: for text that is not JSON, an unknown key, a bad value or a forbidden combination.
        """
        if isinstance(value, str):
            text = value
            try:
                value = strict_json.parse(text)
            except ValueError as error:
                raise ConfigError(
                    f"mp_parameters is not JSON ({error}); it begins with {text[:60]!r}; "
                    'send a JSON object such as {"ddp": true}',
                    code="SMP101",
                ) from None
        try:
            return cls.model_validate({} if value is None else value)
        except ValidationError as error:
            raise ConfigError(_readable(error), code="SMP101") from None

    def to_mp_parameters(self) -> dict[str, Any]:
        """Return the given settings under their documented names, without defaults.

        The result always has both names of the pipeline parallel degree.
        """
        given = self.model_dump(by_alias=True, exclude_unset=True)
        degree = self.pipeline_parallel_degree
        return {**given, "partitions": degree, "pipeline_parallel_degree": degree}


_OLD_NAMES = {"partitions": "pipeline_parallel_degree", "_prescaled_batch": "prescaled_batch"}

_KNOWN_KEYS = set(ModelParallelParameters.model_fields) | {
    field.alias for field in ModelParallelParameters.model_fields.values() if field.alias
}

#: Every key that ``mp_parameters`` may have, old names included.
KEYS = frozenset(_KNOWN_KEYS | set(_OLD_NAMES))


def _readable(error: ValidationError) -> str:
    """Turn Pydantic's list of errors into sentences that name the field, the value and the bound."""
    sentences = []
    for item in error.errors():
        message = str(item["msg"]).removeprefix("Value error, ")
        field = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function-"))
        if not field:
            sentences.append(message)
        elif message.startswith("must be"):
            sentences.append(f"{field} {message}")
        else:
            detail = message[0].lower() + message[1:]
            description = (
                ModelParallelParameters.model_fields[field].description
                if field in ModelParallelParameters.model_fields
                else ""
            )
            sentences.append(f"{field} is {show_value(item['input'])}: {detail}. {description}".rstrip())
    return "; ".join(sentences)


def are_of_version_2(given: Any) -> bool:
    """Return whether parameters without a launcher beside them are of version 2 of the library: it alone has one of them."""
    return isinstance(given, Mapping) and not VERSION_2.keys().isdisjoint(given)
