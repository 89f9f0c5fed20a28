"""The search with a plan's arithmetic: a configuration is evaluated by a plan, and bounds are the plan's terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_config.machine.instances import instance
from smp_config.schedules import DEFAULT_SCHEDULE, DOCUMENTED, TRAITS
from smp_estimator.planning.forecast import TIGHT_ABOVE, Verdict
from smp_estimator.planning.memory.device_memory import is_half, summed_bytes
from smp_estimator.planning.memory.fsdp2 import FSDP2
from smp_estimator.planning.plan import Plan
from smp_estimator.planning.request import OPTIMIZER_BYTES
from smp_estimator.planning.search.bounds import Needs
from smp_estimator.planning.search.branch_and_bound import Evaluated, Found, Search, SearchRegion
from smp_estimator.planning.search.heuristic_steps import has_room
from smp_estimator.planning.search.space import MEMORIES, Configuration, Space
from smp_estimator.planning.step_time import ASYNC_PART, kernels_of, operations_of_rank, unknown_because
from smp_estimator.planning.timing.kernels import UPDATED_BYTES
from smp_records.rate_card import RateCard

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters
    from smp_estimator.planning.request import Request

#: Default number of seconds that a search over plans may take.
BUDGET_SECONDS = 20.0

#: A configuration that is faster by less is not looked for: a plan is no better than that.
_GAP = 0.005


@dataclass(frozen=True)
class PlannedSearch:
    """The result of a search over plans on one cluster.

    Attributes:
        plan: of the best; None where nothing fits, or no time is known.
        found: all that was looked at.
    """

    plan: Plan | None
    found: Found


def search_plans(
    request: Request, samples: int, *, budget: float = BUDGET_SECONDS, first: Iterable[Configuration] = ()
) -> PlannedSearch:
    """Return the fastest configuration of a cluster with a plan that fits.

    The search covers all degrees and all ways to store state and activations. Offloading is included only if
    nothing else fits: its copies are not in the time of a plan.

    Args:
        request: of the cluster, with the model, the script and the precision; its degrees do not matter.
        samples: of an optimizer step.
        budget: seconds of the search.
        first: configurations to begin with.
    """
    if unknown_because(request) is not None:
        return PlannedSearch(None, Found(None, (), 0.0, 0.0))
    found = Search([region_of(request, samples, offloads=False)], budget=budget, gap=_GAP).run(first)
    if found.best is None:
        found = Search([region_of(request, samples)], budget=budget, gap=_GAP).run(first)
    best = None if found.best is None else plan_of(request, samples, found.best.configuration)
    return PlannedSearch(best, found)


def region_of(request: Request, samples: int, *, offloads: bool = True) -> SearchRegion:
    """Return the configurations of a request's cluster, judged by their plans.

    Raises:
        ConfigError: the step time is unknown there (:func:`~smp_estimator.planning.step_time.unknown_because`).
    """
    why = unknown_because(request)
    if why is not None:
        raise ConfigError(
            f"configurations on {request.instance_type} cannot be compared by their time: {why}; use another instance type",
            code="SMP110",
        )
    space = space_of(request, samples, offloads=offloads)
    memory = request.gpu_memory_bytes

    def evaluate(at: Configuration) -> Evaluated:
        try:
            made = plan_of(request, samples, at)
        except ConfigError as error:
            return Evaluated(None, None, False, str(error))
        seconds = None if made.time is None else made.time.total
        if made.verdict not in (Verdict.FITS, Verdict.UNKNOWN):
            return Evaluated(seconds, made.total_bytes, False, f"{made.verdict.value}: {made.total_bytes / 1e9:.1f} GB")
        room = has_room(made)
        return Evaluated(seconds, made.total_bytes, room, "" if room else "the host has no room for what is offloaded")

    return SearchRegion(
        space=space,
        needs=needs_of(request),
        card=RateCard.of_instance(request.instance_type, processes_per_host=request.processes_per_host),
        evaluate=evaluate,
        device_bytes=None if memory is None else TIGHT_ABOVE * memory,
        name=f"{request.instance_count} × {request.instance_type}",
    )


def space_of(request: Request, samples: int, *, offloads: bool = True) -> Space:
    """Return all configurations of a model of transformer layers on a request's cluster.

    If the request names a schedule, only that one is included.
    """
    shape = request.shape
    return Space(
        world=request.world,
        per_host=request.processes_per_host,
        samples=samples,
        accumulation=request.workload.accumulation,
        layers=max(1, shape.layers),
        heads=shape.heads,
        memories=MEMORIES[: (3 if offloads else 2) if shape.has_layers else 1],
        schedules=_schedules(request),
    )


def _schedules(request: Request) -> tuple[str, ...]:
    """Return the schedules that a search compares; PyTorch's FSDP2 has none that splits backward for stages of one piece."""
    named = request.parameters.pipeline
    if named != DEFAULT_SCHEDULE:
        return (named,)
    if request.workload.engine == FSDP2:
        return tuple(schedule for schedule in DOCUMENTED if not TRAITS[schedule].splits_backward)
    return DOCUMENTED


def plan_of(request: Request, samples: int, at: Configuration) -> Plan:
    """Return the plan of a configuration; raise ConfigError if settings contradict one another."""
    space = space_of(request, samples)
    own = request.workload.activation_checkpointing
    checkpointing = (own or "each") if at.recomputes else None
    return Plan.of(request.changed(at.settings(), batch=space.batch(at), activation_checkpointing=checkpointing))


def configuration_of(request: Request) -> Configuration:
    """Return the configuration of a request's own settings; it may lie outside the space of a search."""
    kept = "kept" if request.workload.activation_checkpointing is None else "again"
    return configuration_of_settings(request.parameters, kept)


def configuration_of_settings(settings: ModelParallelParameters, memory: str) -> Configuration:
    """Return the configuration of ``mp_parameters``.

    Args:
        memory: the treatment of activations, if they are not offloaded.
    """
    refuse_pieces(settings)
    state: str | int = settings.sharded_data_parallel_degree
    if state == 1:
        state = "optimizer" if settings.shard_optimizer_state else "whole"
    stages = settings.pipeline_parallel_degree
    return Configuration(
        pipeline=stages,
        tensor=settings.tensor_parallel_degree,
        state=state,
        memory="offloaded" if settings.offload_activations else memory,
        microbatches=settings.microbatches,
        schedule=settings.pipeline if stages > 1 else DEFAULT_SCHEDULE,
        active=min(settings.active_microbatches or 1, settings.microbatches) if stages > 1 else 1,
        placement=settings.placement,
    )


def refuse_pieces(settings: ModelParallelParameters) -> None:
    """Refuse settings that a search does not compare.

    Raises:
        ConfigError: stages own several pieces, or ranks share sequences out.
    """
    if settings.context_parallel_degree > 1:
        raise ConfigError(
            f"context_parallel_degree is {settings.context_parallel_degree}, and a search compares ranks that have whole "
            "sequences; leave it out of the parameters, and plan or rehearse what is found with it",
            code="SMP110",
        )
    if settings.virtual_stages > 1:
        raise ConfigError(
            f"virtual_stages is {settings.virtual_stages}, and a search compares stages that own one piece; leave it out of the "
            "parameters, and plan or rehearse what is found with it",
            code="SMP110",
        )


def needs_of(request: Request) -> Needs:
    """Return the terms of a plan that no degree removes."""
    shape, script = request.shape, request.workload
    alone = Plan.of(
        request.changed(
            {
                "pipeline_parallel_degree": 1,
                "tensor_parallel_degree": 1,
                "sharded_data_parallel_degree": 1,
                "context_parallel_degree": 1,
                "microbatches": 1,
            },
            instance_count=1,
            processes_per_host=1,
            batch=1,
            accumulation=1,
            activation_checkpointing=None,
        )
    )
    way = script.activation_checkpointing or "each"
    again = alone.request.changed(activation_checkpointing=way)
    forward, backward, with_again, update = _least_seconds_of(alone, again)
    half = is_half(request.parameters)
    element = 2 if half else 4
    # A layer has four sums in forward and backward, and two more if it is computed again.
    hidden = shape.sequence * shape.hidden * request.activation_element_bytes * shape.layers
    kept = 2 * element
    return Needs(
        forward=forward,
        backward=backward,
        again=with_again - backward,
        update=update,
        elements=shape.parameters if shape.is_trained_whole else 0,
        kept_bytes=kept,
        updated_bytes=8 + OPTIMIZER_BYTES[script.optimizer] - kept,
        layers=max(1, shape.layers),
        layer_elements=shape.layer_parameters,
        summed_bytes=summed_bytes(request.parameters),
        element_bytes=element,
        once_in_pipeline=script.engine == FSDP2,
        tensor_bytes=4 * hidden * (ASYNC_PART if script.async_tensor else 1),
        tensor_bytes_again=2 * hidden * (ASYNC_PART if script.async_tensor else 1),
    )


def _least_seconds_of(alone: Plan, again: Request) -> tuple[float, float, float, float]:
    """Return the seconds of forward, backward, backward with checkpointing, and update that no degree removes, on one GPU.

    Args:
        alone: plan of one sample on one GPU, without checkpointing.
        again: the same request with checkpointing.
    """
    known = instance(alone.request.instance_type)
    if alone.time is None or known is None:
        return 0.0, 0.0, 0.0, 0.0
    kernels, rates = kernels_of(alone.request, alone.batches, alone.time.peak, known)
    repeated, _ = kernels_of(again, alone.batches, alone.time.peak, known)
    if kernels is not None and repeated is not None and rates is not None and known.memory_gb_per_s is not None:
        update = UPDATED_BYTES * alone.request.shape.parameters / (known.memory_gb_per_s * 1e9 * rates.memory)
        return kernels.forward, kernels.backward, repeated.backward, update
    speed = alone.time.peak * alone.request.workload.utilisation
    forward, backward = operations_of_rank(alone.request, alone.batches)
    _, with_again = operations_of_rank(again, alone.batches)
    return forward / speed, backward / speed, with_again / speed, 0.0


__all__ = [
    "BUDGET_SECONDS",
    "PlannedSearch",
    "configuration_of",
    "needs_of",
    "plan_of",
    "refuse_pieces",
    "region_of",
    "search_plans",
    "space_of",
]
