"""``smp-estimator rehearse``: a script of a large job, tried on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from smp_config import ConfigError
from smp_estimator.cli.commands.run import pairs
from smp_estimator.cli.console import console


@click.command()
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--instance-type", "--instance", default="ml.p4d.24xlarge", show_default=True)
@click.option("--instance-count", "--count", type=click.IntRange(1), default=1, show_default=True)
@click.option("--processes", "processes_per_host", type=click.IntRange(1), help="Of each instance; default: its GPUs.")
@click.option(
    "--parameters", help="mp_parameters: a dictionary or its file; default: what the script hands to smp.init()."
)
@click.option("--steps", type=click.IntRange(1), help="Of the whole training, for its hours and price.")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), help="Instead of --steps: passes through the data.")
@click.option("--samples", type=click.IntRange(1), help="Of the data set; default: as many as the script's loader has.")
@click.option(
    "--rehearsed", "rehearsed_steps", type=click.IntRange(2), default=3, show_default=True, help="Steps to rehearse."
)
@click.option(
    "--measured", type=click.Path(), help="The output of a job with a timeline: what modules took there, they take."
)
@click.option("--rates", type=click.Path(), help="A rate card of your own; default: the instance's stated rates.")
@click.option("--channel", "channels", multiple=True, metavar="NAME=DIR", help="Input data; may be repeated.")
@click.option(
    "--input-shape",
    "shapes",
    multiple=True,
    metavar="NAME=SIZES[:TYPE]",
    help="A tensor of batches that stand for data which is not here, as input_ids=-1,1024:int64; may be repeated.",
)
@click.option(
    "--only-first-ranks",
    is_flag=True,
    help="Do not compare the calls of the last rank of each stage with the first one's.",
)
@click.option("--verbose", is_flag=True, help="Show what the script prints.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Write all that was counted into this file.")
@click.option("--timeline", "timeline", type=click.Path(file_okay=False), help="Write a timeline into this folder.")
@click.option("--pictures", type=click.Path(file_okay=False), help="Draw memory, timeline and links into this folder.")
@click.option("--memory-picture", type=click.Path(dir_okay=False), help="Draw the memory of each stage over a step.")
@click.option("--link-picture", type=click.Path(dir_okay=False), help="Draw the bytes between stages and groups.")
def rehearse(
    script: str,
    arguments: tuple[str, ...],
    file: str | None,
    channels: tuple[str, ...],
    shapes: tuple[str, ...],
    timeline: str | None,
    pictures: str | None,
    memory_picture: str | None,
    link_picture: str | None,
    only_first_ranks: bool,
    **given: Any,
) -> None:
    """Run a few steps of SCRIPT as it would run on a cluster, without the cluster.

    One process represents all ranks of a pipeline stage. Tensors have shapes but no memory; collectives count the bytes that
    they would send. ARGUMENTS, after --, are the script's own. Exit code 1 if a stage does not fit or the script fails.
    """
    from smp_estimator.planning import Verdict
    from smp_estimator.rehearsal import rehearse as run
    from smp_estimator.rehearsal.figures import save_all, save_links, save_memory
    from smp_estimator.rehearsal.timeline import save_timeline

    folders = dict(pairs(channels, "--channel"))
    inputs = dict(pairs(shapes, "--input-shape"))
    found = run(script, arguments, channels=folders, input_shapes=inputs, other_ranks=not only_first_ranks, **given)
    if file is not None:
        try:
            Path(file).write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror}; --json names a file in a folder that exists",
                code="SMP108",
            ) from None
    console().print(found)
    for path, draw in ((memory_picture, save_memory), (link_picture, save_links)):
        if path is not None:
            console().print(f"picture: {escape(str(draw(found, path)))}", soft_wrap=True)
    if timeline is not None:
        save_timeline(found, timeline)
        console().print(f"timeline: smp-estimator timeline {escape(timeline)}", soft_wrap=True)
    for drawn in [] if pictures is None else save_all(found, pictures):
        console().print(f"picture: {escape(str(drawn))}", soft_wrap=True)
    if found.verdict is Verdict.DOES_NOT_FIT:
        raise click.exceptions.Exit(1)
