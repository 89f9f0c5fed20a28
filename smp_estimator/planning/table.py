"""The report of a plan, line by line."""

from __future__ import annotations

from collections.abc import Sequence

from smp_config.machine.instances import price_source
from smp_config.schedules import TRAITS
from smp_estimator.planning.advice import GB, Change, SmallerCluster, format_memory, rule_line
from smp_estimator.planning.batches import idle_fraction
from smp_estimator.planning.forecast import Forecast, Verdict
from smp_estimator.planning.rates.fitted import FITTED
from smp_estimator.planning.report import ColouredText, Grid, Lines, Report
from smp_estimator.planning.request import ENGINES
from smp_estimator.planning.step_time import precision_of, unknown_because


def plan_report(
    plan: Forecast,
    changes: Sequence[Change],
    fewer: Sequence[SmallerCluster],
    notes: Sequence[str],
    *,
    searched: bool = False,
) -> Report:
    """Return the plan as a table of kinds by stage, followed by changes to try and notes.

    Args:
        searched: the plan is the result of a search, so no search is advised.
    """
    request, shape = plan.request, plan.request.shape
    known = plan.instance
    cluster = f"{request.instance_count} × {request.instance_type}"
    cluster += f" ({known.gpus} × {known.gpu}), " if known else ", "
    cluster += f"{request.world} process{'es' if request.world != 1 else ''}"
    above = Lines(
        [
            ("model", [str(shape), shape.source]),
            ("cluster", [cluster]),
            ("degrees", [_degrees_line(plan)]),
            ("batch", [_batch_line(plan)]),
            ("data set", [] if plan.epochs is None else plan.epochs.lines()),
        ]
    )
    network = (
        f"each rank sends at least {plan.traffic.total / GB:.2f} GB per step: data parallel {plan.traffic.data / GB:.2f}, "
        f"tensor parallel {plan.traffic.tensor / GB:.2f}, pipeline {plan.traffic.pipeline / GB:.2f}"
    )
    if plan.traffic.context:
        network += f", context parallel {plan.traffic.context / GB:.2f}"
    idle = [f"idle {plan.idle:.0%} of a step: {_idle_because(plan)}"] if len(plan.stages) > 1 else []
    to_change = [str(change) for change in changes]
    if plan.verdict is Verdict.DOES_NOT_FIT and not to_change and not searched:
        to_change = [
            "no single change is enough; suggest looks for several at once, and for a cluster that is large enough"
        ]
    below = Lines(
        [
            ("verdict", [ColouredText(format_memory(plan), plan.verdict)]),
            ("rules", [rule_line(plan)]),
            ("shared memory", _shared_memory_lines(plan)),
            ("network", [network]),
            ("pipeline", idle),
            ("time", time_lines(plan)),
            ("cost", cost_lines(plan)),
            ("training", [] if plan.training is None else [str(plan.training)]),
            ("with failures", [] if plan.goodput is None else [str(plan.goodput)]),
            ("to change", to_change),
            ("fewer GPUs", [str(smaller) for smaller in _down_to_the_first_that_fails(fewer)]),
            ("notes", notes),
        ]
    )
    return [above, _memory(plan), below]


def _down_to_the_first_that_fails(fewer: Sequence[SmallerCluster]) -> Sequence[SmallerCluster]:
    """Return the clusters down to the first on which the model does not fit; even smaller ones have less memory.

    Each cluster has half the instances of the one before.
    """
    for number, each in enumerate(fewer, 1):
        if each.plan is not None and not each.plan.verdict.feasible:
            return fewer[:number]
    return fewer


def _idle_because(plan: Forecast) -> str:
    """Return the closed form that the idle part follows."""
    settings = plan.request.parameters
    stages, active = settings.pipeline_parallel_degree, settings.active_microbatches or 1
    most = min(active, settings.microbatches)
    again = plan.request.workload.activation_checkpointing is not None
    pieces = settings.virtual_stages
    filled = idle_fraction(stages, settings.microbatches, settings.pipeline, again=again, pieces=pieces)
    parts = ("2" if again else "3") if TRAITS[settings.pipeline].splits_backward else ""
    if pieces > 1:
        parts = f"{pieces} · "
    # Both numbers are rounded, on the ways of two formulas.
    is_filled = plan.idle <= filled * (1 + 1e-9)
    return (
        f"(p − 1) / ({parts}m + p − 1)"
        if is_filled
        else f"with {most} of {settings.microbatches} microbatches in flight"
    )


def _shared_memory_lines(plan: Forecast) -> list[str]:
    """Return a line about the shared memory for memory checkpoints; none without them."""
    size = plan.memory_checkpoint_bytes
    if not size:
        return []
    known = plan.instance
    of = f" of the instance's {known.host_memory_bytes / GB:,.0f} GB" if known else ""
    return [
        f"memory checkpoints take {size / GB:.3g} GB of /dev/shm on a host{of}: two copies of the state, replicas once"
    ]


def time_lines(plan: Forecast) -> list[str]:
    """Return lines about the seconds of a step by kind, and their assumptions; why not, if they are unknown."""
    time, known, precision = plan.time, plan.instance, precision_of(plan.request)
    given, said = plan.request.workload.step_seconds, []
    if given is not None:
        said = [
            f"a step takes {given:.3g} s, as given, {plan.batches.tokens / given:,.0f} tokens per second; the estimate:"
        ]
    if time is None or known is None:
        return [*said, f"unknown: {unknown_because(plan.request)}"]
    parts = {
        "arithmetic": time.arithmetic,
        "tensor parallel": time.tensor,
        "context parallel": time.context,
        "waiting for other stages": time.idle,
        "pipeline": time.pipeline,
        "data parallel": time.data - time.hidden,
        "update": time.update,
    }
    kinds = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in parts.items() if seconds)
    error = "" if time.uncertainty is None else f" ± {time.uncertainty:.0%}"
    hidden = f" (and {time.hidden:.3g} beside the arithmetic)" if time.hidden else ""
    rates = plan.request.workload.rates or FITTED
    assumed = f"assumed: {time.utilisation:.0%} of the peak in {precision} ({known.gpu}: {time.peak / 1e12:g} TFLOP/s)"
    if time.uncertainty is not None:
        assumed += f" by the rates of kernels: {', '.join(rates.sources)}"
    assumed += f", {known.link_gb_per_s:g} GB/s between the GPUs of a host"
    if plan.request.instance_count > 1:
        assumed += f", {known.network_baseline_gbps:g} Gbit/s between hosts"
    offloaded = (
        "; copies of offloaded activations are not counted" if plan.request.parameters.offload_activations else ""
    )
    return [
        *said,
        f"a step takes about {time.total:.3g} s{error}, {time.tokens_per_second:,.0f} tokens per second: {kinds}{hidden}",
        f"{assumed}, no latency{offloaded}",
    ]


def cost_lines(plan: Forecast) -> list[str]:
    """Return lines about the cost of a step and the source of the price; none without a time."""
    cost, request = plan.cost, plan.request
    if plan.step_seconds is None:
        return []
    if cost is None:
        return [f"unknown: no price of {request.instance_type} is known; give it with prices (--price)"]
    source = "as given" if cost.is_given else f"{price_source()}; SageMaker bills a rate of its own"
    return [
        f"{cost.usd_per_million_tokens:.3g} USD per million tokens, {cost.usd_per_step:.3g} per step: "
        f"{request.instance_count} × {cost.usd_per_hour:g} USD per hour ({source})"
    ]


def _memory(plan: Forecast) -> Grid:
    columns = ["memory of one GPU (GB = 10⁹ bytes)"]
    for stage in plan.stages:
        layers = f"{stage.layers} layer{'s' if stage.layers != 1 else ''}"
        columns.append(f"stage {stage.stage}, {layers}" if len(plan.stages) > 1 else layers)
    rows = []
    for kind in plan.worst.kinds:
        sizes = [stage.kinds[kind] for stage in plan.stages]
        if any(sizes):
            shown = map(_gigabytes, sizes)
            rows.append([kind.value, *shown])
    right_aligned = frozenset(range(1, len(columns)))
    return Grid(columns, rows, right_aligned, _memory_totals(plan))


def _memory_totals(plan: Forecast) -> list[list[str]]:
    """Return a row for the backward pass, and one for each other moment that needs memory of its own."""
    moments = {
        "at the loss": [stage.at_loss for stage in plan.stages],
        "in optimizer.step()": [stage.in_update if stage.gradient_copy else 0 for stage in plan.stages],
    }
    others = {name: sizes for name, sizes in moments.items() if any(sizes)}
    title = "total in backward" if others else "total"
    in_backward = [_gigabytes(stage.in_backward) for stage in plan.stages]
    totals = [[title, *in_backward]]
    for name, sizes in others.items():
        shown = [_gigabytes(size) if size else "–" for size in sizes]
        totals.append([name, *shown])
    return totals


def _gigabytes(size: float) -> str:
    return f"{size / GB:,.2f}"


def _degrees_line(plan: Forecast) -> str:
    """Return a line such as ``"pipeline 1, tensor 4, 32 replicas, fp16, checkpointing each"``."""
    parameters, workload = plan.request.parameters, plan.request.workload
    parts = [
        f"pipeline {parameters.pipeline_parallel_degree}",
        f"tensor {parameters.tensor_parallel_degree}",
        f"{plan.batches.replicas} replica{'s' if plan.batches.replicas != 1 else ''}",
    ]
    if parameters.context_parallel_degree > 1:
        parts.insert(2, f"context {parameters.context_parallel_degree}")
    if parameters.sharded_data_parallel_degree > 1:
        parts.append(f"sharded over {parameters.sharded_data_parallel_degree}")
    if parameters.shard_optimizer_state:
        parts.append("optimizer state sharded")
    autocast = f" under autocast in {precision_of(plan.request)}" if workload.autocast else ""
    parts.append("fp16" if parameters.fp16 else "bf16" if parameters.bf16 else f"fp32{autocast}")
    parts.append(f"checkpointing {workload.activation_checkpointing or 'off'}")
    if parameters.offload_activations:
        parts.append("offloaded")
    if workload.engine != ENGINES[0]:
        parts.append(f"engine {workload.engine}")
    parts += ["compiled"] if workload.compiled or parameters.compile else []
    return ", ".join(parts)


def _batch_line(plan: Forecast) -> str:
    batch = plan.batches
    whose = "replica" if batch.readers == batch.replicas else "data parallel rank"
    text = f"{batch.readers} {whose}{'s' if batch.readers != 1 else ''} × {batch.batch}"
    if batch.accumulation > 1:
        text += f" × {batch.accumulation} accumulation steps"
    text += (
        f" = {batch.global_batch:,} sample{'s' if batch.global_batch != 1 else ''} = {batch.tokens:,} tokens per step"
    )
    if batch.microbatches > 1:
        text += f"; {batch.microbatches} microbatches of {batch.microbatch}"
    if plan.request.workload.batch_source:
        text += f"; the batch is {plan.request.workload.batch_source}"
    return text
