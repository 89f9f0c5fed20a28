"""Configurations to try on a cluster, in the order of the best practices.

The order of the public page "Distributed Model Parallelism Best Practices": large instances (given),
optimizer state sharding, activation checkpointing, tensor parallelism inside a node in powers of two,
pipeline parallelism across nodes, offloading. Data parallelism alone comes first, since more features than
needed do not improve performance. Sharded data parallelism is searched separately; its page advises to "start
with a small number, and gradually increase it".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_config import ConfigError, ModelParallelParameters
from smp_estimator.planning.advice import microbatches_for
from smp_estimator.planning.batches import batch_for
from smp_estimator.planning.forecast import TIGHT_ABOVE, Verdict
from smp_estimator.planning.memory.device_memory import is_half
from smp_estimator.planning.plan import Plan
from smp_estimator.planning.request import OPTIMIZER_BYTES

if TYPE_CHECKING:
    from smp_estimator.planning.request import Request


@dataclass(frozen=True)
class TriedConfiguration:
    """One configuration that was tried."""

    what: str
    plan: Plan


def climb(request: Request, samples: int) -> Iterator[TriedConfiguration]:
    """Return the plans of the ladder that fit the number of processes, with ``samples`` per optimizer step."""
    return _plans(_ladder(request), request, samples)


def sharded_plans(request: Request, samples: int) -> Iterator[TriedConfiguration]:
    """Return the plans with sharded data parallelism, from a small degree up."""
    return _plans(_sharded(request), request, samples)


def first_fit(request: Request, samples: int) -> TriedConfiguration | None:
    """Return the first configuration that fits; None without one.

    Its offloaded activations fit into the host's memory too.
    """
    return next(fitting_plans(request, samples), None)


def fitting_plans(request: Request, samples: int) -> Iterator[TriedConfiguration]:
    """Yield all configurations that fit, those with sharded data parallelism last."""
    for candidates in (_ladder, _sharded):
        for step in _plans(_possible(candidates(request), request), request, samples):
            if step.plan.verdict is Verdict.FITS and has_room(step.plan):
                yield step


def has_room(plan: Plan) -> bool:
    """Return whether offloaded activations fit into the memory of the host."""
    return plan.instance is None or plan.offloaded_host_bytes <= plan.instance.host_memory_bytes


_Candidate = tuple[str, dict[str, Any], str | None]


def _ladder(request: Request) -> Iterator[_Candidate]:
    """Yield the features to add, one after the other; each step keeps the earlier ones."""
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
    above = f"+ tensor parallelism {tensor} " if tensor > 1 else ""
    last, so_far = settings | _tensor(tensor), above
    for stages in _powers(request.world // tensor):
        if stages <= request.shape.layers:
            last = settings | _tensor(tensor) | {"pipeline_parallel_degree": stages}
            so_far = f"{above}+ pipeline {stages} "
            yield so_far.rstrip(), last, each
    yield f"{so_far}+ activations offloaded", last | {"offload_activations": True}, each
    for degree in _powers(request.world):
        yield f"+ context parallelism {degree}", settings | {"context_parallel_degree": degree}, each


def _sharded(request: Request) -> Iterator[_Candidate]:
    """Yield sharded data parallelism, from a small degree up; then with tensor parallelism, then with offloading."""
    each = request.workload.activation_checkpointing or "each"
    degrees = [*_powers(request.world), request.world] if request.world > 1 else []
    for degree in dict.fromkeys(degrees):
        yield f"sharded data parallelism {degree}", {"sharded_data_parallel_degree": degree}, each
    for tensor in _powers(request.processes_per_host):
        degree = request.world // tensor
        if degree > 1 and request.shape.heads % tensor == 0:
            settings = _tensor(tensor) | {"sharded_data_parallel_degree": degree}
            yield f"sharded data parallelism {degree} + tensor parallelism {tensor}", settings, each
    for context in _powers(request.world) if degrees else ():
        settings = {"sharded_data_parallel_degree": request.world, "context_parallel_degree": context}
        yield f"sharded data parallelism {request.world} + context parallelism {context}", settings, each
    if degrees:
        yield (
            f"sharded data parallelism {request.world}, activations offloaded",
            {"sharded_data_parallel_degree": request.world, "offload_activations": True},
            each,
        )


def _possible(candidates: Iterator[_Candidate], request: Request) -> Iterator[_Candidate]:
    """Yield the candidates with evenly divided state that leaves the device not full; others cannot fit."""
    if request.gpu_memory_bytes is None or not request.shape.is_trained_whole:
        yield from candidates
        return
    each = 8 + OPTIMIZER_BYTES[request.workload.optimizer]  # parameter, gradient and master copy, in any precision
    kept = 4 if is_half(request.parameters) else 8  # of these, parameter and gradient in backward
    for what, settings, checkpointing in candidates:
        parts = settings.get("pipeline_parallel_degree", 1) * settings.get("tensor_parallel_degree", 1)
        if shards := settings.get("sharded_data_parallel_degree"):
            state = each / shards
        elif settings.get("shard_optimizer_state"):
            state = kept + (each - kept) / request.world
        else:
            state = float(each)
        # Tensors that are not divided only add to this.
        if request.shape.parameters / parts * state <= TIGHT_ABOVE * request.gpu_memory_bytes:
            yield what, settings, checkpointing


def _powers(limit: int) -> Iterator[int]:
    """Yield 2, 4, 8, … up to ``limit``, if they divide it."""
    degree = 2
    while degree <= limit:
        if limit % degree == 0:
            yield degree
        degree *= 2


def _tensor(degree: int) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, "prescaled_batch": True} if degree > 1 else {}


def _plans(candidates: Iterator[_Candidate], request: Request, samples: int) -> Iterator[TriedConfiguration]:
    """Yield the plans of the candidates that fit the number of processes, all with the same global batch."""
    for what, settings, checkpointing in candidates:
        try:
            given = {**request.parameters.model_dump(by_alias=True, exclude_unset=True), **settings}
            parameters = ModelParallelParameters.from_mp_parameters(given)
            topology = parameters.topology(request.world)
            batch = batch_for(
                topology, samples, prescaled=parameters.prescaled_batch, accumulation=request.workload.accumulation
            )
            stages = parameters.pipeline_parallel_degree
            changed = dict(settings)
            if stages > 1:
                changed["microbatches"] = microbatches_for(stages, batch)
            elif parameters.context_parallel_degree > 1:
                changed["microbatches"] = batch  # a sample at a time: it is the sequence that has no room
            yield TriedConfiguration(
                what, Plan.of(request.changed(changed, batch=batch, activation_checkpointing=checkpointing))
            )
        except ConfigError:
            continue  # these degrees do not divide the processes or the batch
