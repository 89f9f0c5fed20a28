"""``smp-estimator images``: the stock images of the table, and which of them a job gets that names none."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING

import click
from rich.table import Table

from smp_config import ConfigError
from smp_config.machine.instances import instance
from smp_estimator.cli.console import console
from smp_estimator.cloud import image_table
from smp_estimator.cloud import images as known
from smp_estimator.cloud.image_choice import choose_pytorch
from smp_estimator.sdk.installed import SDKMissing, installed_version

if TYPE_CHECKING:
    from smp_estimator.cloud.image_table import TrainingImage


@click.command()
@click.option("--patched", is_flag=True, help="Only those that are still patched.")
@click.option("--on", "day", type=click.DateTime(["%Y-%m-%d"]), help="The day of the job; default: today.")
@click.option("--region", help="Region of the job; default: any.")
@click.option("--instance-type", help="Type of the job's instances, whose GPUs not every image has code for.")
def images(patched: bool, day: datetime | None, region: str | None, instance_type: str | None) -> None:
    """Show the stock training images in which the runtime runs, and until when each is patched.

    Below the table: the one that a job without image_uri gets, with the SageMaker SDK that is installed.
    """
    on = day.date() if day is not None else known.today()
    gpu = _gpu(instance_type)
    rows = [
        row
        for row in image_table.images()
        if row.is_in(region) and not known.is_too_new(row.cuda, gpu) and not (patched and row.has_ended(on))
    ]
    out = console()
    out.print(_table(rows, on))
    for name, said in image_table.sources().items():
        out.print(f"{name}: {said['what']} at {said['at']}, {said['date']}", highlight=False)
    out.print(_default(on, region, gpu), highlight=False)


def _gpu(instance_type: str | None) -> str | None:
    """Return the GPU model of an instance type.

    Raises:
        ConfigError: the catalogue does not have the instance type.
    """
    if instance_type is None:
        return None
    found = instance(instance_type)
    if found is None:
        raise ConfigError(
            f"--instance-type is {instance_type}, which the catalogue of GPU instances does not have, so it is not known "
            "which images have code for it; leave it out to see all",
            code="SMP108",
        )
    return found.gpu


def _table(rows: list[TrainingImage], day: date) -> Table:
    table = Table(title=f"{len(rows)} of {len(image_table.images())} images, on {day}")
    for column in ("image", "PyTorch", "Python", "CUDA", "patched until", "mpi4py", "SMDDP"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.name, *cells(row), style="dim" if row.has_ended(day) else "")
    return table


def cells(row: TrainingImage) -> list[str]:
    """Return an image's table cells after its name: PyTorch, Python, CUDA, end of patches, mpi4py, SMDDP."""
    python = f"{row.python[2]}.{row.python[3:]}" if row.python else "?"
    return [row.torch, python, row.cuda or "–", row.until.removeprefix("until "), _yes(row.mpi4py), _yes(row.smddp)]


def _yes(has: bool | None) -> str:
    return {True: "yes", False: "no", None: "?"}[has]


def _default(day: date, region: str | None, gpu: str | None) -> str:
    """Return a sentence about the image of a job that does not set one."""
    try:
        chosen = choose_pytorch(None, None, day=day, region=region, gpus=() if gpu is None else (gpu,))
    except SDKMissing:
        return "default: the SageMaker SDK is not installed, and registries are known from it"
    row = chosen.image.rows.get("gpu")
    if row is None:
        name, ended = f"PyTorch {chosen.framework_version}", None
    else:
        name, ended = row.name, known.patches_ended(row, day, gpu=gpu)
    text = f"default with SageMaker SDK {installed_version()}: {name}"
    if not chosen.image.of_sdk:
        text += ", which the SDK itself does not know"
    return f"{text}; {ended}" if ended else text
