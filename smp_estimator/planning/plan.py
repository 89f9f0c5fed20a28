"""``plan()``: will this model train with these settings on these instances, and where does the memory go?"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smp_config import ConfigError, Group, ModelParallelParameters, Topology, smddp
from smp_config.buffers import BufferSizes
from smp_config.instances import Instance, instance
from smp_estimator.planning.batches import Batches, batches_of
from smp_estimator.planning.memory import StageMemory, memory
from smp_estimator.planning.model_shape import ModelShape
from smp_estimator.planning.network import Traffic, traffic
from smp_estimator.planning.pipeline import idle_fraction
from smp_estimator.planning.workload import Workload

#: Above this part of a GPU's memory a plan is tight: the driver's own use, NCCL's buffers, kernel workspaces and the
#: allocator's fragmentation are not counted in a plan.
TIGHT_ABOVE = 0.85

#: The rule of thumb for mixed precision with Adam that keeps an fp32 copy of the gradients: 2 + 2 + 8 + 4 + 4.
RULE_OF_20 = 20
RULE_OF_16 = 16


class Verdict(enum.Enum):
    """What a plan says."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown (the memory of the device is not known)"

    @property
    def feasible(self) -> bool:
        """Fits, perhaps with little to spare."""
        return self in (Verdict.FITS, Verdict.TIGHT)


@dataclass(frozen=True)
class Request:
    """Everything a plan is made from, so that it can be made again with one thing changed."""

    shape: ModelShape
    instance_type: str
    instance_count: int
    processes_per_host: int
    parameters: ModelParallelParameters
    workload: Workload
    gpu_memory_bytes: int | None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def world(self) -> int:
        """Processes of the job."""
        return self.instance_count * self.processes_per_host

    def changed(self, settings: Mapping[str, Any] | None = None, **fields: Any) -> Request:
        """The same request with other ``settings`` (of mp_parameters) and other fields of request or workload."""
        parameters = self.parameters
        if settings:
            given = parameters.model_dump(by_alias=True, exclude_unset=True)
            parameters = ModelParallelParameters.from_mp_parameters({**given, **settings})
        own = {name: value for name, value in fields.items() if name in Request.__dataclass_fields__}
        script = {name: value for name, value in fields.items() if name not in own}
        workload = dataclasses.replace(self.workload, **script)
        return dataclasses.replace(self, **{"parameters": parameters, "workload": workload, **own})


@dataclass(frozen=True)
class Plan:
    """The answer to a request; ``print(plan)`` shows it as a table.

    Attributes:
        request: what was asked.
        topology: the degrees over all processes.
        batches: the batch arithmetic.
        stages: memory of a GPU in each pipeline stage.
        traffic: lower bound of the bytes that a rank of the fullest stage sends in one optimizer step.
    """

    request: Request
    topology: Topology
    batches: Batches
    stages: tuple[StageMemory, ...]
    traffic: Traffic

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total_bytes(self) -> int:
        """Bytes on the fullest GPU."""
        return self.worst.total

    @property
    def fraction(self) -> float | None:
        """Part of the device's memory; None when that is unknown."""
        size = self.request.gpu_memory_bytes
        return self.worst.total / size if size else None

    @property
    def verdict(self) -> Verdict:
        """Fits, tight above 85 % of the device's memory, or does not fit."""
        fraction = self.fraction
        if fraction is None:
            return Verdict.UNKNOWN
        if fraction > 1:
            return Verdict.DOES_NOT_FIT
        return Verdict.TIGHT if fraction > TIGHT_ABOVE else Verdict.FITS

    @property
    def idle(self) -> float:
        """Part of a step that a pipeline stage waits."""
        return idle_fraction(self.request.parameters.pipeline_parallel_degree, self.batches.microbatches)

    @property
    def instance(self) -> Instance | None:
        """The instance, when the catalogue has it."""
        return instance(self.request.instance_type)

    @property
    def offloaded_host_bytes(self) -> int:
        """Activations that wait in the memory of one host."""
        return self.worst.activations.offloaded * self.request.processes_per_host

    @cached_property
    def changes(self) -> tuple[Any, ...]:
        """What to change when the plan does not fit, or is tight: each alone, with the result it would have."""
        from smp_estimator.planning.advice import changes

        return changes(self)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What is worth knowing besides the memory."""
        from smp_estimator.planning.advice import notes

        return notes(self)

    @cached_property
    def smaller_clusters(self) -> tuple[Any, ...]:
        """The same job on 1/2, 1/4, … of the instances."""
        from smp_estimator.planning.advice import smaller_clusters

        return smaller_clusters(self)

    def changed(self, settings: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
        """The plan with something else: settings of mp_parameters, or keywords of :func:`plan`.

        Raises:
            ConfigError: the degrees no longer fit.
        """
        return make(self.request.changed(settings, **fields))

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain Python values, sizes in bytes."""
        request = self.request
        return {
            "model": {
                "parameters": request.shape.parameters,
                "shape": str(request.shape),
                "source": request.shape.source,
            },
            "instance_type": request.instance_type,
            "instance_count": request.instance_count,
            "processes_per_host": request.processes_per_host,
            "mp_parameters": request.parameters.to_mp_parameters(),
            "workload": dataclasses.asdict(request.workload),
            "verdict": self.verdict.name.lower(),
            "gpu_memory_bytes": request.gpu_memory_bytes,
            "total_bytes": self.total_bytes,
            "fraction": self.fraction,
            "stages": [
                {"stage": s.stage, "layers": s.layers, "total": s.total, **{k.value: v for k, v in s.kinds.items()}}
                for s in self.stages
            ],
            "global_batch": self.batches.global_batch,
            "tokens_per_step": self.batches.tokens,
            "pipeline_idle": self.idle,
            "bytes_sent_per_rank": self.traffic.total,
            "rule_of_16_bytes": RULE_OF_16 * request.shape.parameters,
            "rule_of_20_bytes": RULE_OF_20 * request.shape.parameters,
            "changes": [str(change) for change in self.changes],
            "smaller_clusters": [str(smaller) for smaller in self.smaller_clusters],
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        from smp_estimator.planning.table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=116).print(self)
        return text.getvalue().rstrip()


def make(request: Request) -> Plan:
    """Compute a plan.

    Raises:
        ConfigError: degrees that do not fit the processes, or microbatches that do not divide the batch.
    """
    parameters = request.parameters
    topology = parameters.topology(request.world)
    batch = batches_of(
        parameters,
        request.world,
        request.workload.batch,
        sequence=request.shape.sequence,
        accumulation=request.workload.accumulation,
    )
    stages = memory(request.shape, parameters, topology, request.workload, batch, smddp=_smddp(request))
    worst = max(stages, key=lambda stage: stage.total)
    sent = traffic(request.shape, parameters, topology, request.workload, batch, worst)
    return Plan(request, topology, batch, tuple(stages), sent)


def plan(
    model: Any,
    instance_type: str,
    instance_count: int = 1,
    parameters: ModelParallelParameters | Mapping[str, Any] | str | None = None,
    batch: int = 1,
    *,
    sequence: int | None = None,
    processes_per_host: int | None = None,
    gpu_memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    **workload: Any,
) -> Plan:
    """Say whether a model trains on a cluster, and where the memory goes.

    Args:
        model: an ``nn.Module`` (the meta device is enough), a :class:`ModelShape`, the name of a published shape, or
            a number of parameters.
        instance_type: such as ``"ml.p4d.24xlarge"``.
        instance_count: instances.
        parameters: ``mp_parameters``; None means a single copy of the model on each GPU with ``ddp``.
        batch: samples that a rank reads at a time; with ``prescaled_batch`` that a tensor parallel group reads.
        sequence: tokens per sample; default: the shape's.
        processes_per_host: default: the GPUs of the instance.
        gpu_memory_bytes: memory of one GPU; default: the catalogue's.
        environment: of the job; sizes of the SMDDP buffers are read from it.
        workload: fields of :class:`~smp_estimator.planning.workload.Workload`: ``activation_checkpointing``,
            ``fused_attention``, ``dropout``, ``optimizer``, ``accumulation``, …

    Raises:
        ConfigError: settings that cannot work.
    """
    request = request_for(
        model,
        instance_type,
        instance_count,
        parameters,
        sequence=sequence,
        processes_per_host=processes_per_host,
        gpu_memory_bytes=gpu_memory_bytes,
        environment=environment,
        workload=_workload({"batch": batch, **workload}),
    )
    return make(request)


def request_for(
    model: Any,
    instance_type: str,
    instance_count: int,
    parameters: ModelParallelParameters | Mapping[str, Any] | str | None,
    *,
    sequence: int | None,
    processes_per_host: int | None,
    gpu_memory_bytes: int | None,
    environment: Mapping[str, str] | None,
    workload: Workload,
) -> Request:
    """Settle the arguments of :func:`plan`.

    Raises:
        ConfigError: an argument that cannot be used.
    """
    if isinstance(instance_count, bool) or not isinstance(instance_count, int) or instance_count < 1:
        raise ConfigError(f"instance_count is {instance_count!r}; it is a number of instances: set it to 1 or more")
    known = instance(instance_type)
    if processes_per_host is None:
        if known is None:
            raise ConfigError(
                f"instance_type {instance_type!r} is not in the catalogue of GPU instances, so its number of GPUs is "
                "unknown; give processes_per_host (and gpu_memory_bytes for a verdict)"
            )
        processes_per_host = known.gpus
    elif processes_per_host < 1 or (known is not None and processes_per_host > known.gpus):
        have = f"{instance_type} has {known.gpus} GPUs" if known else "every host starts at least one"
        raise ConfigError(
            f"processes_per_host is {processes_per_host}, but {have} and each process needs its own; set it to "
            f"{known.gpus if known else 1}"
        )
    if gpu_memory_bytes is None:
        gpu_memory_bytes = known.gpu_memory_bytes if known else None
    elif isinstance(gpu_memory_bytes, bool) or not 0 < gpu_memory_bytes < math.inf:
        otherwise = f"the catalogue's {known.gpu_memory_bytes}" if known else "a plan without a verdict"
        raise ConfigError(
            f"the memory of a GPU is {gpu_memory_bytes} bytes; the plan is compared with what a GPU has: give more than 0, "
            f"or leave it out for {otherwise}"
        )
    if not isinstance(parameters, ModelParallelParameters):
        parameters = ModelParallelParameters.from_mp_parameters({"ddp": True} if parameters is None else parameters)
    return Request(
        shape=shape_of(model, sequence),
        instance_type=instance_type,
        instance_count=instance_count,
        processes_per_host=processes_per_host,
        parameters=parameters,
        workload=workload,
        gpu_memory_bytes=gpu_memory_bytes,
        environment=tuple(sorted((environment or {}).items())),
    )


def shape_of(model: Any, sequence: int | None = None) -> ModelShape:
    """A model given in any of the ways of :func:`plan`, as a shape."""
    if isinstance(model, ModelShape):
        shape = model
    elif isinstance(model, str):
        shape = ModelShape.named(model)
    elif isinstance(model, int | float):
        return ModelShape.from_parameter_count(model, sequence=sequence or 2048)
    else:
        return ModelShape.from_module(model, sequence=sequence)
    return shape.with_sequence(sequence)


def _workload(fields: Mapping[str, Any]) -> Workload:
    from smp_config.errors import suggest

    known = Workload.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"plan() has no argument {name!r}{suggest(name, known)}; the script is described with {', '.join(known)}"
            )
    return Workload(**fields)


def uses_smddp(request: Request) -> bool:
    """Whether the SMDDP all-gather is used: asked for, or automatic where the documentation supports it."""
    parameters = request.parameters
    if parameters.sharded_data_parallel_degree == 1:
        return False
    return smddp.is_chosen(parameters, request.instance_type, request.instance_count)


def _smddp(request: Request) -> BufferSizes | None:
    return BufferSizes.from_environment(dict(request.environment)) if uses_smddp(request) else None


def nodes_of(topology: Topology, group: Group, per_node: int) -> int:
    """Most nodes that one group of this kind spreads over, with ``per_node`` consecutive ranks on a node."""
    return max(len({rank // per_node for rank in members}) for members in topology.groups(group))


__all__ = ["TIGHT_ABOVE", "Plan", "Request", "Verdict", "make", "nodes_of", "plan", "shape_of", "uses_smddp"]
