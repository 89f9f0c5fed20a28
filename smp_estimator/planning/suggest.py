"""``suggest()``: degrees for a model and a cluster, tried in the order of the best practices.

The order of the public page "Distributed Model Parallelism Best Practices": large instances (given), optimizer state
sharding, activation checkpointing, tensor parallelism inside a node in powers of two, pipeline parallelism across
nodes, offloading. Data parallelism alone comes first, since more features than needed do not improve performance.
Sharded data parallelism, whose page says "start with a small number, and gradually increase it", is searched beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from smp_config import ConfigError, ModelParallelParameters
from smp_config.instances import instance
from smp_estimator.planning.advice import GB, amount, microbatches_for
from smp_estimator.planning.batches import batch_for
from smp_estimator.planning.forecast import Verdict
from smp_estimator.planning.plan import Plan
from smp_estimator.planning.request import Request, request_for
from smp_estimator.planning.table import COLOURS, as_text, labelled

#: GPUs without bfloat16 arithmetic.
_NO_BFLOAT16 = ("K80", "V100", "T4")


@dataclass(frozen=True)
class Step:
    """One configuration that was tried."""

    what: str
    plan: Plan


@dataclass(frozen=True)
class Suggestion:
    """The chosen configuration.

    Attributes:
        plan: its plan; look at ``plan.verdict``, since the best that was found may still not fit.
        tried: everything that was tried up to it, in order.
        alternative: the smallest sharded data parallelism that fits, when it was not chosen itself.
    """

    plan: Plan
    tried: tuple[Step, ...]
    alternative: Step | None

    @property
    def parameters(self) -> dict[str, Any]:
        """``mp_parameters`` for ``distribution``, with the degree under its documented name only."""
        given = self.plan.request.parameters.to_mp_parameters()
        given.pop("partitions")
        return {name: value for name, value in given.items() if value is True or (value is not False and value != 1)}

    @property
    def batch(self) -> int:
        """The batch size for the script."""
        return self.plan.request.workload.batch

    def __rich__(self) -> Group:
        """What was tried, in order, and the plan that was chosen."""
        table = Table(title="tried in the order of the best practices", title_justify="left")
        for column in ("configuration", "per GPU", "verdict"):
            table.add_column(column, justify="right" if column == "per GPU" else "left")
        for step in self.tried:
            chosen = " ← chosen" if step.plan is self.plan else ""
            verdict = Text(step.plan.verdict.value + chosen, style=COLOURS[step.plan.verdict])
            table.add_row(step.what, f"{step.plan.total_bytes / GB:.1f} GB", verdict)
        other, script = self.alternative, self.plan.request.workload
        chosen_lines = labelled(
            [
                ("instead", [f"{other.what}: {amount(other.plan)}"] if other else []),
                ("parameters", [str(self.parameters)]),
                ("script", [f"batch {script.batch}, activation checkpointing {script.activation_checkpointing}"]),
            ]
        )
        return Group(table, chosen_lines, Text(""), self.plan)

    def __str__(self) -> str:
        return as_text(self)


def suggest(
    model: Any,
    instance_type: str,
    instance_count: int = 1,
    batch: int = 1,
    *,
    global_batch: int | None = None,
    precision: str = "auto",
    sequence: int | None = None,
    processes_per_host: int | None = None,
    gpu_memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    **workload: Any,
) -> Suggestion:
    """Pick degrees for a model and a cluster.

    The first configuration that fits wins; without one the first that is tight, else the one that comes nearest.

    Args:
        model: as for :func:`~smp_estimator.planning.plan.plan`.
        instance_type: the instances that there are.
        batch: samples per GPU and step; the global batch is this times the processes, whatever the degrees.
        global_batch: samples per optimizer step, instead of ``batch``.
        precision: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"auto"``: bf16 where the GPU has it, else fp16.
        sequence, processes_per_host, gpu_memory_bytes, environment, workload: as for ``plan``.

    Raises:
        ConfigError: arguments that cannot be used.
    """
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise ConfigError(
            f"precision is {precision!r}; parameters are kept in one of auto, bf16, fp16, fp32: use one of these"
        )
    if precision == "auto":
        known = instance(instance_type)
        precision = "fp16" if known is not None and known.gpu in _NO_BFLOAT16 else "bf16"
    base: dict[str, Any] = {"ddp": True} | ({precision: True} if precision != "fp32" else {})
    request = request_for(
        model,
        instance_type,
        instance_count,
        base,
        sequence=sequence,
        processes_per_host=processes_per_host,
        gpu_memory_bytes=gpu_memory_bytes,
        environment=environment,
        workload={"batch": batch, **workload},
    )
    samples = global_batch or batch * request.world * request.workload.accumulation
    if request.gpu_memory_bytes is None:
        raise ConfigError(
            f"the memory of {instance_type!r} is unknown, so nothing can be said to fit; give gpu_memory_bytes, for "
            "example 40 * 2**30"
        )

    tried: list[Step] = []
    chosen: Step | None = None
    for step in _plans(_ladder(request), request, samples):
        tried.append(step)
        if step.plan.verdict is Verdict.FITS:
            chosen = step
            break
    sharded = list(_plans(_sharded(request), request, samples))
    alternative = next((step for step in sharded if step.plan.verdict is Verdict.FITS), None)
    if chosen is None:
        tried += sharded
        if not tried:
            raise ConfigError(
                f"no degrees give a global batch of {samples} samples on {request.world} processes; each process, or group "
                f"of processes, reads whole samples: use a global batch of {request.world}"
            )
        tight = [step for step in tried if step.plan.verdict is Verdict.TIGHT]
        chosen = alternative or (tight[0] if tight else min(tried, key=lambda step: step.plan.total_bytes))
    if chosen.plan.request.parameters.sharded_data_parallel_degree > 1:
        alternative = None
    return Suggestion(chosen.plan, tuple(tried), alternative)


_Candidate = tuple[str, dict[str, Any], str | None]


def _ladder(request: Request) -> Iterator[_Candidate]:
    """What to add, one after the other; each rung keeps the ones below it."""
    own = request.workload.activation_checkpointing
    yield "data parallelism", {}, own
    settings: dict[str, Any] = {"shard_optimizer_state": True} if request.world > 1 else {}
    if settings:
        yield "+ sharded optimizer state", dict(settings), own
    each = own or "each"
    if own is None:
        yield "+ activation checkpointing of each layer", dict(settings), each
    tensor = 1
    for degree in _powers(request.processes_per_host):
        if request.shape.heads % degree == 0:
            tensor = degree
            yield f"+ tensor parallelism {degree}", settings | _tensor(degree), each
    last = settings | _tensor(tensor)
    for stages in _powers(request.world // tensor):
        if stages <= request.shape.layers:
            last = settings | _tensor(tensor) | {"pipeline_parallel_degree": stages}
            yield f"+ tensor parallelism {tensor} + pipeline {stages}", last, each
    yield "+ activations offloaded", last | {"offload_activations": True}, each


def _sharded(request: Request) -> Iterator[_Candidate]:
    """Sharded data parallelism, from a small degree up; then with tensor parallelism, then offloading."""
    each = request.workload.activation_checkpointing or "each"
    for degree in _powers(request.world):
        yield f"sharded data parallelism {degree}", {"sharded_data_parallel_degree": degree}, each
    for tensor in _powers(request.processes_per_host):
        degree = request.world // tensor
        if degree > 1 and request.shape.heads % tensor == 0:
            settings = _tensor(tensor) | {"sharded_data_parallel_degree": degree}
            yield f"sharded data parallelism {degree} + tensor parallelism {tensor}", settings, each
    yield (
        f"sharded data parallelism {request.world}, activations offloaded",
        {"sharded_data_parallel_degree": request.world, "offload_activations": True},
        each,
    )


def _powers(limit: int) -> Iterator[int]:
    """2, 4, 8, … up to ``limit``, those that divide it."""
    degree = 2
    while degree <= limit:
        if limit % degree == 0:
            yield degree
        degree *= 2


def _tensor(degree: int) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, "prescaled_batch": True} if degree > 1 else {}


def _plans(candidates: Iterator[_Candidate], request: Request, samples: int) -> Iterator[Step]:
    """The plans of the candidates that can be laid over the processes, all with the same global batch."""
    for what, settings, checkpointing in candidates:
        try:
            given = {**request.parameters.model_dump(by_alias=True, exclude_unset=True), **settings}
            parameters = ModelParallelParameters.from_mp_parameters(given)
            topology = parameters.topology(request.world)
            batch = batch_for(
                topology, samples, prescaled=parameters.prescaled_batch, accumulation=request.workload.accumulation
            )
            stages = parameters.pipeline_parallel_degree
            changed = {**settings, "microbatches": microbatches_for(stages, batch)} if stages > 1 else settings
            yield Step(what, Plan.of(request.changed(changed, batch=batch, activation_checkpointing=checkpointing)))
        except ConfigError:
            continue  # these degrees do not divide the processes or the batch
