"""``smp-estimator``: check a configuration, plan a job, draw its groups, run it here, see how busy it was, and more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from smp_config import ConfigError, Group, JobSettings, Topology
from smp_config.error_codes import append_code
from smp_config.errors import kind_of
from smp_config.formats.values import parse_literal as _literal
from smp_config.machine.instances import instance
from smp_config.parameters import KEYS
from smp_config.version2.which_version import choose_version
from smp_estimator.cli.calibrate import calibrate
from smp_estimator.cli.commands.checkpoint import checkpoint
from smp_estimator.cli.commands.images import images
from smp_estimator.cli.commands.init import init
from smp_estimator.cli.commands.migrate import migrate
from smp_estimator.cli.commands.models import models
from smp_estimator.cli.commands.numerics import add_commands as add_numerics
from smp_estimator.cli.commands.planning import plan, suggest
from smp_estimator.cli.commands.profile import profile
from smp_estimator.cli.commands.rehearse import rehearse
from smp_estimator.cli.commands.reshape import reshape
from smp_estimator.cli.commands.run import run
from smp_estimator.cli.commands.top import top
from smp_estimator.cli.commands.where import where
from smp_estimator.cli.console import console, make_printable
from smp_estimator.cli.help import completion, explain
from smp_estimator.cli.manifest import manifest
from smp_estimator.sdk.installed import SDKMissing

#: Instance types that stand for this machine.
LOCAL_TYPES = ("local", "local_gpu")

#: Blocks of different hosts are not compared more finely than this part of a step without a word of caution.
_CLOCK_TOLERANCE = 0.01


#: The commands, as ``--help`` lists them.
GROUPS = {
    "Begin": ("init", "doctor", "run", "migrate"),
    "Before a job": (
        "validate",
        "plan",
        "rehearse",
        "suggest",
        "calibrate",
        "topology",
        "models",
        "images",
        "manifest",
    ),
    "A job that runs or has run": ("where", "top", "reshape", "timeline", "profile", "checkpoint"),
    "Whether numbers agree": ("verify", "diff"),
    "Help": ("explain", "completion"),
}


class _ErrorReportingGroup(click.Group):
    """Command group that turns the package's errors into one readable line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):  # RuntimeErrors too, but not ours
            raise
        except (ConfigError, RuntimeError, SDKMissing) as error:
            raise click.ClickException(make_printable(append_code(str(error), error))) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by topic, in the order in which users need them."""
        for title, names in GROUPS.items():
            rows = [(name, self.commands[name].get_short_help_str(80)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(cls=_ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="smp-estimator")
def main() -> None:
    """Train with the SageMaker model parallel library: check, plan, run."""


main.add_command(checkpoint)
main.add_command(completion)
main.add_command(explain)
main.add_command(images)
main.add_command(init)
main.add_command(manifest)
main.add_command(migrate)
main.add_command(models)
main.add_command(plan)
main.add_command(suggest)
main.add_command(profile)
main.add_command(rehearse)
main.add_command(calibrate)
main.add_command(run)
main.add_command(where)
main.add_command(top)
main.add_command(reshape)
add_numerics(main)


# -- validate ----------------------------------------------------------------------------------------------


@main.command()
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--instance-type", "--instance", help="Default: what FILE says, else ml.p4d.24xlarge.")
@click.option("--instance-count", "--count", type=click.IntRange(1), help="Default: what FILE says, else 1.")
def validate(file: Any, instance_type: str | None, instance_count: int | None) -> None:
    """Check a distribution. FILE holds JSON or a Python literal.

    It is the estimator's distribution, or {"distribution": …, "instance_type": …, "instance_count": …}, or
    mp_parameters alone, which run with one process per GPU. A parameter that only version 2 of the library has, or
    torch_distributed, makes it a job of version 2. Nothing is sent anywhere. Exit code 1 when refused.
    """
    found = _literal(file.read(), str(getattr(file, "name", "FILE")))
    if not isinstance(found, dict):
        raise ConfigError(f"the file holds {kind_of(found)}; a distribution is a dictionary", code="SMP108")
    distribution, said_type, said_count = _parted(found)
    kind = instance_type or said_type or "ml.p4d.24xlarge"
    hosts = instance_count or said_count or 1
    known = instance(kind)
    launchers: dict[str, Any] = {}
    choice = choose_version(distribution, None)
    if choice.is_2:
        launchers = {"torch_distributed": {"enabled": True}}
    elif set(distribution) & KEYS:
        launchers = {"mpi": {"enabled": True, "processes_per_host": known.gpus if known else 1}}
    if launchers:
        distribution = {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": distribution}},
            **launchers,
        }
    settings, said = _checked(distribution, kind, hosts)
    said += [choice.reason] if choice.reason is not None else []
    if known is None and kind not in LOCAL_TYPES:
        said.append(f"no instance type {kind} is known here, so nothing that depends on its GPUs was checked")
    out = console()
    per_host = settings.mpi.processes_per_host if settings.mpi else None
    if settings.version_2 is not None:
        out.print(f"[green]valid[/green] on {hosts} × {kind}, for version 2 of the library (import torch.sagemaker)")
    elif settings.model_parallel is not None and per_host is not None:
        topology = settings.model_parallel.topology(per_host * hosts)
        out.print(f"[green]valid[/green] on {hosts} × {kind}: {escape(_degrees(topology))}")
    else:
        out.print(f"[green]valid[/green] on {hosts} × {kind}")
    for warning in said:
        out.print(f"[yellow]warning[/yellow] {escape(warning)}")


def _parted(found: dict[str, Any]) -> tuple[dict[str, Any], str | None, int | None]:
    """Return a file's distribution (or parameters), instance type and instance count.

    Raises:
        ConfigError: the instance type or the count has a value of the wrong type.
    """
    kind, hosts = found.get("instance_type"), found.get("instance_count")
    if not isinstance(kind, str | None):
        raise ConfigError(
            f"instance_type is {kind!r}, {kind_of(kind)}; it names one type of instance: write "
            '"instance_type": "ml.p4d.24xlarge"',
            code="SMP108",
        )
    if hosts is not None and (isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1):
        raise ConfigError(
            f"instance_count is {hosts!r}, {kind_of(hosts)}; it is a number of instances: write "
            '"instance_count": 1 or more, without quotes',
            code="SMP108",
        )
    rest = {name: value for name, value in found.items() if name not in ("instance_type", "instance_count")}
    distribution = rest.get("distribution", rest)
    if not isinstance(distribution, dict):
        raise ConfigError(
            f"distribution is {distribution!r}; strategies are read from its keys: write a dictionary such as "
            '{"smdistributed": {"modelparallel": {"enabled": true}}, "mpi": {"enabled": true, "processes_per_host": 8}}',
            code="SMP108",
        )
    return distribution, kind, hosts


def _checked(distribution: Any, kind: str, hosts: int) -> tuple[JobSettings, list[str]]:
    """Run the estimator's own checks and return the settings and the warnings."""
    from smp_estimator.settings.distribution import read

    said: list[str] = []
    found = read(distribution, instance_type=kind, hosts=hosts, process_mode=kind in LOCAL_TYPES, say=said.append)
    return found.settings, [warning.removeprefix("distribution: ") for warning in said]


def _degrees(topology: Topology) -> str:
    context = f"context {topology.context} × " if topology.context > 1 else ""
    return (
        f"{topology.world_size} processes = pipeline {topology.pipeline} × tensor {topology.tensor} × {context}"
        f"{topology.size(Group.BATCH_RDP)} replicas, sharded over {topology.sharded}, placement {topology.placement}"
    )


# -- topology ----------------------------------------------------------------------------------------------


@main.command()
@click.option("--world", type=click.IntRange(1), required=True, help="Processes of the job.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="pipeline_parallel_degree")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="tensor_parallel_degree")
@click.option("--sdp", type=click.IntRange(1), default=1, show_default=True, help="sharded_data_parallel_degree")
@click.option("--cp", type=click.IntRange(1), default=1, show_default=True, help="context_parallel_degree")
@click.option("--placement", default="cluster", show_default=True, help="cluster, spread or a permutation of DPT.")
@click.option("--per-node", type=click.IntRange(1), default=8, show_default=True, help="Processes of a host.")
@click.option("--png", type=click.Path(dir_okay=False, writable=True), help="Draw the groups into this file.")
def topology(world: int, pp: int, tp: int, sdp: int, cp: int, placement: str, per_node: int, png: str | None) -> None:
    """Show the groups of processes, as text and as a picture."""
    from smp_estimator.figures.topology import group_text, save_png

    letters = {"cluster": "DPT", "spread": "TPD"}.get(placement, placement)
    grid = Topology(world, pipeline=pp, tensor=tp, sharded=sdp, placement=letters, context=cp)
    out = console()
    out.print(group_text(grid))
    if png:
        out.print(f"picture: {save_png(grid, png, per_node=per_node)}")


# -- timeline ----------------------------------------------------------------------------------------------


@main.command()
@click.argument("job_output")
@click.option(
    "--step",
    "number",
    type=int,
    help="Show, trace and draw this step; default: draw the median training step, trace all.",
)
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw one step; .png, .svg or .pdf.")
@click.option("--dark", is_flag=True, help="Draw it for a dark background.")
def timeline(job_output: str, number: int | None, trace: str | None, picture: str | None, dark: bool) -> None:
    """Show how busy the ranks of a pipeline were.

    JOB_OUTPUT is the job's output: its path or folder, or output.tar.gz. Ranks record with
    environment={"SMP_TIMELINE": "10"}, the number of newest steps to keep.
    """
    from smp_estimator.figures.matplotlib_figure import DARK, LIGHT
    from smp_estimator.timeline import read_timeline
    from smp_estimator.timeline.views import chrome_trace, rank_table, save_picture, step_table

    found = read_timeline(job_output)
    step = found.step(number)
    out = console()
    if number is None:
        out.print(step_table(found))
    out.print(rank_table(step))
    expected = f"{step.expected_idle:.1%} for {step.stages} equal stages and {step.microbatches} microbatches"
    out.print(f"{step.title}: {step.idle:.1%} idle; (p − 1)/(m + p − 1) = {expected}")
    if number is None and step is not found.steps[-1]:
        training, newest = sum(one.trains for one in found.steps), found.steps[-1]
        out.print(
            f"{step.title} is the median of {training} training steps; the newest is {newest.title}: --step {newest.number}"
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
            out.print(f"picture: {escape(str(save_picture(step, picture, DARK if dark else LIGHT)))}", soft_wrap=True)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be written: {error.strerror}; --trace and --picture name files in folders that exist",
            code="SMP108",
        ) from None


# -- doctor ------------------------------------------------------------------------------------------------


@main.command()
@click.option("--mode", type=click.Choice(["process", "docker", "cloud"]), multiple=True, help="Default: all three.")
@click.option("--role", metavar="ARN", help="Role whose permissions are asked for; default: the caller's.")
def doctor(mode: tuple[str, ...], role: str | None) -> None:
    """Report what this machine lacks for each way to run a job.

    Exit code 1 if a mode that was requested with --mode is not ready.
    """
    from smp_estimator.cli.commands.doctor import cloud_findings, docker_findings, machine_findings, process_findings

    findings = []
    wanted = mode or ("process", "docker", "cloud")
    if "process" in wanted:
        findings += [*process_findings(), *machine_findings()]
    if "docker" in wanted:
        findings += docker_findings()
    if "cloud" in wanted:
        findings += cloud_findings(role)
    table = Table()
    for column in ("mode", "needs", "", "found"):
        table.add_column(column, overflow="fold")
    sign = {True: "[green]ok[/green]", False: "[red]missing[/red]", None: "[yellow]unknown[/yellow]"}
    for found in findings:
        remedy = f" → {found.remedy}" if found.remedy and not found.ok else ""
        table.add_row(found.mode, found.what, sign[found.ok], escape(found.detail + remedy))
    console().print(table)
    lacks_something = any(found.ok is False for found in findings)
    if mode and lacks_something:
        raise click.exceptions.Exit(1)
