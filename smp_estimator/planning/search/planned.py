"""The search with a plan's arithmetic: a configuration is evaluated by a plan, and bounds are the plan's terms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_config.schedules import DEFAULT_SCHEDULE, DOCUMENTED
from smp_estimator.planning.forecast import TIGHT_ABOVE, Verdict
from smp_estimator.planning.memory.device_memory import is_half, summed_bytes
from smp_estimator.planning.plan import Plan
from smp_estimator.planning.request import OPTIMIZER_BYTES
from smp_estimator.planning.search.bounds import Needs
from smp_estimator.planning.search.branch_and_bound import Evaluated, Found, Search, SearchRegion
from smp_estimator.planning.search.heuristic_steps import has_room
from smp_estimator.planning.search.space import MEMORIES, Configuration, Space
from smp_estimator.planning.step_time import operations_of_rank, unknown_because
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
    shape, schedule = request.shape, request.parameters.pipeline
    return Space(
        world=request.world,
        per_host=request.processes_per_host,
        samples=samples,
        accumulation=request.workload.accumulation,
        layers=max(1, shape.layers),
        heads=shape.heads,
        memories=MEMORIES[: (3 if offloads else 2) if shape.has_layers else 1],
        schedules=DOCUMENTED if schedule == DEFAULT_SCHEDULE else (schedule,),
    )


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
    speed = alone.time.peak * script.utilisation if alone.time is not None else float("inf")
    forward, backward = operations_of_rank(alone.request, alone.batches)
    _, with_again = operations_of_rank(alone.request.changed(activation_checkpointing="each"), alone.batches)
    half = is_half(request.parameters)
    element = 2 if half else 4
    # A layer has four sums in forward and backward, and two more if it is computed again.
    hidden = shape.sequence * shape.hidden * request.activation_element_bytes * shape.layers
    kept = 2 * element
    return Needs(
        forward=forward / speed,
        backward=backward / speed,
        again=(with_again - backward) / speed,
        elements=shape.parameters if shape.is_trained_whole else 0,
        kept_bytes=kept,
        updated_bytes=8 + OPTIMIZER_BYTES[script.optimizer] - kept,
        layers=max(1, shape.layers),
        layer_elements=shape.layer_parameters,
        summed_bytes=summed_bytes(request.parameters),
        element_bytes=element,
        tensor_bytes=4 * hidden,
        tensor_bytes_again=2 * hidden,
    )


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
