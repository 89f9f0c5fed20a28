"""``smp-estimator rehearse``: a script of a large job, tried on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from smp_config import ConfigError
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
@click.option(
    "--steps", type=click.IntRange(2), default=3, show_default=True, help="After which the script is stopped."
)
@click.option("--verbose", is_flag=True, help="Show what the script prints.")
@click.option("--json", "file", type=click.Path(dir_okay=False), help="Write all that was counted into this file.")
def rehearse(script: str, arguments: tuple[str, ...], file: str | None, **given: Any) -> None:
    """Run a few steps of SCRIPT as it would run on a cluster, without the cluster.

    One process stands for all ranks of a pipeline stage. Tensors have shapes but no memory, collectives count what they would send.
    ARGUMENTS, behind --, are the script's own. Exit code 1 when a stage does not fit or the script fails.
    """
    from smp_estimator.planning import Verdict
    from smp_estimator.rehearsal import rehearse as run

    found = run(script, arguments, **given)
    if file is not None:
        try:
            Path(file).write_text(found.rehearsal.model_dump_json(indent=2), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written: {error.strerror}; --json names a file in a folder that exists"
            ) from None
    console().print(found)
    if found.verdict is Verdict.DOES_NOT_FIT:
        raise click.exceptions.Exit(1)
