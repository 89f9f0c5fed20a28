"""``smp-estimator manifest``: a job for the training operator of SageMaker HyperPod, as a file for ``kubectl``."""

from __future__ import annotations

import json
from typing import Any

import click

from smp_config.formats.values import parse_dictionary
from smp_estimator.cli.commands.run import pairs
from smp_estimator.cloud.hyperpod import HyperPodJob


@click.command()
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--name", required=True, help="Of the job.")
@click.option("--image", required=True, help="With this package, SCRIPT and hyperpod-elastic-agent.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Pods, one on each node.")
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Ranks of each node.")
@click.option(
    "--parameters", default='{"ddp": true}', show_default=True, help="mp_parameters: a dictionary or its file."
)
@click.option("--instance-type", metavar="TYPE", help="Of the nodes; each rank gets a GPU of it.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Of every rank; may be repeated.")
@click.option("--volume", multiple=True, metavar="CLAIM=PATH", help="A persistent volume's claim; may be repeated.")
@click.option("--secret", metavar="NAME", help="A Secret whose key 'secret' is the ranks' SMP_JOB_SECRET.")
@click.option("--namespace", help="Default: kubectl's.")
@click.option("--restarts", type=click.IntRange(0), default=3, show_default=True, help="After a failure or a hang.")
@click.option("--start-seconds", type=click.IntRange(1), default=3600, show_default=True, help="To the first update.")
@click.option("--hang-seconds", type=click.IntRange(60), default=900, show_default=True, help="Between two updates.")
def manifest(script: str, arguments: tuple[str, ...], **given: Any) -> None:
    """Write a HyperPodPyTorchJob that runs SCRIPT, a path in the image, on a HyperPod cluster.

    ARGUMENTS, after --, are the script's own. Nothing is sent: pipe the output into kubectl apply -f -
    """
    job = HyperPodJob(
        script=script,
        words=arguments,
        parameters=parse_dictionary(given.pop("parameters"), "--parameters"),
        environment=dict(pairs(given.pop("env"), "--env")),
        volumes=dict(pairs(given.pop("volume"), "--volume")),
        **given,
    )
    click.echo(as_yaml(job.manifest()))


def as_yaml(value: Any, indent: int = 0) -> str:
    """Return plain data as YAML, with each text as JSON writes it, which YAML reads too."""
    lines = []
    pad = " " * indent
    items = value.items() if isinstance(value, dict) else ((None, each) for each in value)
    for name, each in items:
        mark = "-" if name is None else f"{name}:"
        is_plain = not each or not isinstance(each, (dict, list))
        if is_plain:
            lines.append(f"{pad}{mark} {json.dumps(each, ensure_ascii=False)}")
        elif name is None:  # the first line of an item stands behind its mark
            lines.append(f"{pad}- {as_yaml(each, indent + 2).lstrip()}")
        else:
            lines.append(f"{pad}{mark}\n{as_yaml(each, indent + 2)}")
    return "\n".join(lines)
