"""A plan on the screen."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from smp_estimator.planning.advice import GB, Change, SmallerCluster, amount, rule_line
from smp_estimator.planning.forecast import Forecast, Verdict

COLOURS = {Verdict.FITS: "green", Verdict.TIGHT: "yellow", Verdict.DOES_NOT_FIT: "red", Verdict.UNKNOWN: "blue"}


def plan_table(
    plan: Forecast, changes: Sequence[Change], fewer: Sequence[SmallerCluster], notes: Sequence[str]
) -> Group:
    """The plan as a table of kinds by stage, with what to change and what to know below it."""
    request, shape = plan.request, plan.request.shape
    known = plan.instance
    table = Table(title=None, title_justify="left")
    table.add_column("memory of one GPU (GB = 10⁹ bytes)")
    for stage in plan.stages:
        layers = f"{stage.layers} layer{'s' if stage.layers != 1 else ''}"
        table.add_column(f"stage {stage.stage}, {layers}" if len(plan.stages) > 1 else layers, justify="right")
    for kind in plan.worst.kinds:
        if any(stage.kinds[kind] for stage in plan.stages):
            table.add_row(kind.value, *(f"{stage.kinds[kind] / GB:.2f}" for stage in plan.stages))
    table.add_section()
    table.add_row("total", *(f"{stage.total / GB:.2f}" for stage in plan.stages), style="bold")
    cluster = f"{request.instance_count} × {request.instance_type}"
    cluster += f" ({known.gpus} × {known.gpu}), " if known else ", "
    above = labelled(
        [
            ("model", [str(shape), shape.source]),
            ("cluster", [cluster + f"{request.world} processes"]),
            ("degrees", [_degrees_line(plan)]),
            ("batch", [_batch_line(plan)]),
        ]
    )
    network = (
        f"each rank sends at least {plan.traffic.total / GB:.2f} GB per step: data parallel {plan.traffic.data / GB:.2f}, "
        f"tensor parallel {plan.traffic.tensor / GB:.2f}, pipeline {plan.traffic.pipeline / GB:.2f}"
    )
    idle = [f"idle {plan.idle:.0%} of a step: (p − 1) / (m + p − 1)"] if len(plan.stages) > 1 else []
    to_change = [str(change) for change in changes]
    if plan.verdict is Verdict.DOES_NOT_FIT and not to_change:
        to_change = ["no single change is enough; suggest() looks for a combination"]
    below = labelled(
        [
            ("verdict", [Text(amount(plan), style=f"bold {COLOURS[plan.verdict]}")]),
            ("rules", [rule_line(plan)]),
            ("network", [network]),
            ("pipeline", idle),
            ("to change", to_change),
            ("fewer GPUs", [str(smaller) for smaller in fewer]),
            ("notes", notes),
        ]
    )
    return Group(above, table, below)


def _degrees_line(plan: Forecast) -> str:
    """``"pipeline 1, tensor 4, 32 replicas, optimizer state sharded, fp16, checkpointing each"``."""
    parameters, workload = plan.request.parameters, plan.request.workload
    parts = [
        f"pipeline {parameters.pipeline_parallel_degree}",
        f"tensor {parameters.tensor_parallel_degree}",
        f"{plan.topology.rdp_size} replica{'s' if plan.topology.rdp_size != 1 else ''}",
    ]
    if parameters.sharded_data_parallel_degree > 1:
        parts.append(f"sharded over {parameters.sharded_data_parallel_degree}")
    if parameters.shard_optimizer_state:
        parts.append("optimizer state sharded")
    parts.append("fp16" if parameters.fp16 else "bf16" if parameters.bf16 else "fp32")
    parts.append(f"checkpointing {workload.activation_checkpointing or 'off'}")
    if parameters.offload_activations:
        parts.append("offloaded")
    return ", ".join(parts)


def _batch_line(plan: Forecast) -> str:
    batch = plan.batches
    text = f"{batch.readers} reader{'s' if batch.readers != 1 else ''} × {batch.batch}"
    if batch.accumulation > 1:
        text += f" × {batch.accumulation} accumulation steps"
    text += f" = {batch.global_batch} samples = {batch.tokens:,} tokens per step"
    if batch.microbatches > 1:
        text += f"; {batch.microbatches} microbatches of {batch.microbatch}"
    return text


def labelled(rows: list[tuple[str, Sequence[str | Text]]]) -> Table:
    """Labels on the left, each with one or several lines of text; rows without lines are left out."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, lines in rows:
        for number, line in enumerate(lines):
            grid.add_row(label if number == 0 else "", line if isinstance(line, Text) else Text(line))
    return grid


def as_text(shown: Any) -> str:
    """What a rich renderable shows, as plain text of 116 columns."""
    text = io.StringIO()
    Console(file=text, width=116).print(shown)
    return text.getvalue().rstrip()
