"""``smp-estimator timeline``: when each rank of a pipeline computed what."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.markup import escape

from smp_config import ConfigError
from smp_estimator.cli.console import console

#: Blocks of different hosts are not compared more finely than this part of a step without a word of caution.
_CLOCK_TOLERANCE = 0.01


@click.command()
@click.argument("job_output")
@click.option(
    "--step",
    "number",
    type=int,
    help="Show, trace and draw this step; default: draw the newest training step, trace all.",
)
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw one step; .png, .svg or .pdf.")
def timeline(job_output: str, number: int | None, trace: str | None, picture: str | None) -> None:
    """Show how busy the ranks of a pipeline were.

    JOB_OUTPUT is what a job left: its output path or folder, or output.tar.gz. Ranks record with
    environment={"SMP_TIMELINE": "10"}, the number of newest steps to keep.
    """
    from smp_estimator.timeline import read_timeline
    from smp_estimator.timeline.chrome import chrome_trace
    from smp_estimator.timeline.picture import save_picture
    from smp_estimator.timeline.table import rank_table, step_table

    found = read_timeline(job_output)
    step = found.step(number)
    out = console()
    if number is None:
        out.print(step_table(found))
    out.print(rank_table(step))
    expected = f"{step.expected_idle:.1%} for {step.stages} equal stages and {step.microbatches} microbatches"
    out.print(f"{step.title}: {step.idle:.1%} idle; (p − 1)/(m + p − 1) = {expected}")
    if number is None and step is not found.steps[-1]:
        newest = found.steps[-1]
        out.print(
            f"{step.title} is the newest training step; the newest of all is {newest.title}: --step {newest.number}"
        )
    if found.missing:
        ranks = ", ".join(map(str, found.missing[:16]))
        out.print(f"[yellow]warning[/yellow] no file of rank {ranks}: idle times and stages are those of the others")
    if found.clock_error > _CLOCK_TOLERANCE * step.makespan:
        out.print(
            f"[yellow]warning[/yellow] clocks of the hosts are known to ±{found.clock_error * 1e3:.2g} ms: makespan and idle "
            "fractions are no better"
        )
    try:
        if trace:
            made = chrome_trace(found, step if number is not None else None)
            Path(trace).write_text(json.dumps(made), encoding="utf-8")
            out.print(f"trace: {escape(trace)} (open it in ui.perfetto.dev)", soft_wrap=True)
        if picture:
            out.print(f"picture: {escape(str(save_picture(step, picture)))}", soft_wrap=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be written: {error.strerror}; --trace and --picture name files in folders that exist"
        ) from None
