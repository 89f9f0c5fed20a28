"""``smp-estimator diff`` and ``verify``: where two trainings part, and whether a script trains the same at other degrees."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from smp_config import ConfigError
from smp_config.formats.values import parse_dictionary
from smp_estimator.cli.console import console
from smp_estimator.numerics.comparison import Comparison, compare
from smp_estimator.numerics.plain_verification import PlainVerification
from smp_estimator.numerics.recorded_run import RecordedRun
from smp_estimator.numerics.verification import Verification, loss_of

if TYPE_CHECKING:  # the command imports NumPy when it runs: what is installed without extras has none
    from smp_estimator.numerics.bisection import Saved


def add_commands(main: click.Group) -> None:
    """Add both to ``smp-estimator``."""
    main.add_command(diff)
    main.add_command(verify)


@click.command()
@click.argument("one", type=click.Path(file_okay=False))
@click.argument("other", type=click.Path(file_okay=False))
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw how the error grows; .svg, .png or .pdf.")
@click.option("--dark", is_flag=True, help="Draw it for a dark background.")
@click.option(
    "--bisect", is_flag=True, help="Repeat both up to there, and look at the module's tensors element by element."
)
@click.option("--command-one", default="", help="With --bisect: what starts ONE again; default: as it was started.")
@click.option("--command-other", default="", help="With --bisect: what starts OTHER again; default: as it was started.")
@click.option("--folder", type=click.Path(file_okay=False), help="With --bisect: keep numbers, tensors and logs there.")
def diff(
    one: str,
    other: str,
    picture: str | None,
    dark: bool,
    bisect: bool,
    command_one: str,
    command_other: str,
    folder: str | None,
) -> None:
    """Find the first difference between two recorded training runs.

    ONE and OTHER are folders that jobs with SMP_RECORD_NUMERICS have written, of any degrees. Exit code 1 if rounding does
    not explain a difference.

    --bisect runs both scripts again on this machine. They start from the newest checkpoint before the step in which the runs
    differ, else from the beginning. It then reports which elements of the first tensor differ, and which ranks' shards hold
    them.
    """
    if not bisect and (command_one or command_other or folder):
        raise ConfigError(
            "--command-one, --command-other and --folder say how to repeat the runs: give --bisect too", code="SMP119"
        )
    found = compare(RecordedRun.read(one), RecordedRun.read(other))
    if bisect:
        with tempfile.TemporaryDirectory(prefix="smp-bisect-") as alone:
            _bisect(found, (command_one, command_other), _empty(folder, alone))
    _show(found, picture, dark=dark)


def _bisect(found: Comparison, commands: tuple[str, str], folder: Path) -> None:
    from smp_estimator.numerics.bisection import Bisection

    planned = Bisection.plan(found, commands, folder, _checkpoints_in)
    if planned is None:
        return
    out = console()
    begin = f"from the checkpoint of step {planned.begin}" if planned.checkpoints else "from the start"
    name = planned.suspect.module or "the model"
    out.print(
        f"both run again {begin} up to step {planned.suspect.step}, with the tensors of {escape(name)} whole",
        soft_wrap=True,
    )
    _, said = planned.run()
    for sentence in said:
        out.print(escape(sentence), soft_wrap=True, highlight=False)


def _checkpoints_in(folder: Path) -> list[Saved]:
    try:
        from smp_runtime.checkpoint.files.manifest import whole_checkpoints
    except ImportError:  # without PyTorch no checkpoint was written here
        return []
    from smp_estimator.numerics.bisection import Saved

    return [
        Saved(found.manifest.steps, found.folder) for found in whole_checkpoints(folder) if found.manifest is not None
    ]


def _empty(folder: str | None, otherwise: str) -> Path:
    """Return the folder that the runs write to: the user's, which must be empty, or the default.

    Raises:
        ConfigError: the user's folder contains files.
    """
    place = Path(folder) if folder else Path(otherwise)
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(
            f"--folder {folder} is not empty; the runs would read each other's files: name a new folder", code="SMP119"
        )
    return place


@click.command(context_settings={"allow_interspersed_args": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.option("--parameters", metavar="JSON|FILE", help="mp_parameters: the degrees to be verified.")
@click.option("--plain", is_flag=True, help="SCRIPT trains without smp: with DDP, FSDP2 or its own collectives.")
@click.option(
    "--batches", metavar="NAME", help="With --plain: SCRIPT's function that returns a batch, if it has no DataLoader."
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Default: as few as the degrees need, two replicas with ddp; 2 with --plain.",
)
@click.option("--steps", type=click.IntRange(1), help="Updates that are compared.  [default: 3; 4 with --plain]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the generators when training begins.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=1800,
    show_default=True,
    help="Seconds after which a run is ended.",
)
@click.option(
    "--folder", type=click.Path(file_okay=False), help="Keep both runs' numbers and logs there; default: removed."
)
@click.option("--picture", type=click.Path(dir_okay=False), help="Draw how the error grows; .svg, .png or .pdf.")
@click.option("--dark", is_flag=True, help="Draw it for a dark background.")
def verify(
    script: str,
    words: tuple[str, ...],
    parameters: str | None,
    folder: str | None,
    picture: str | None,
    *,
    plain: bool,
    dark: bool,
    **given: Any,
) -> None:
    """Run SCRIPT at the wanted degrees and in one process, and compare.

    Both run on this machine's CPU for a few updates. The single process trains on the batches that the ranks have read, as one
    batch each. WORDS, after --, are the script's own. Exit code 1 if rounding does not explain a difference.

    --plain verifies a torchrun script without smp: with DDP, FSDP2 or collectives of its own. It also finds a missing
    DistributedSampler.set_epoch, broken ties and wrong accumulation.
    """
    if plain == (parameters is not None):
        raise ConfigError(
            "verify takes either --parameters, the degrees of a script with smp, or --plain, for a script without it: give one",
            code="SMP119",
        )
    with tempfile.TemporaryDirectory(prefix="smp-verify-") as alone:
        place = _empty(folder, alone)
        planned = _planned(script, words, parameters, place, **given)
        out = console()
        out.print(f"{escape(script)}: {planned.title}", soft_wrap=True)
        found = planned.run()
        for run in (found.other, found.one):
            losses = ", ".join(f"{loss:.7g}" for loss in loss_of(run))
            out.print(f"losses of {escape(run.name)}: {losses}", soft_wrap=True)
        _show(found, picture, dark=dark)


def _planned(
    script: str,
    words: tuple[str, ...],
    parameters: str | None,
    folder: Path,
    *,
    processes: int | None,
    steps: int | None,
    seed: int,
    timeout: float,
    batches: str | None,
) -> Verification | PlainVerification:
    if parameters is None:
        return PlainVerification(script, words, processes or 2, steps or 4, seed, folder, timeout, batches or "")
    if batches is not None:
        raise ConfigError(
            "--batches names a function of a script without smp, and --parameters is of a script with smp: its batches are those "
            "that its functions with @smp.step get; leave --batches out",
            code="SMP119",
        )
    given = parse_dictionary(parameters, "--parameters")
    planned = Verification.plan(script, words, given, processes, steps or 3, seed, folder)
    return replace(planned, timeout=timeout)


def _show(found: Comparison, picture: str | None, *, dark: bool) -> None:
    # rich is imported with them
    from smp_estimator.figures.error_growth import save_picture
    from smp_estimator.figures.matplotlib_figure import DARK, LIGHT
    from smp_estimator.numerics.report import phase_table, write_verdict

    out = console()
    for run in (found.one, found.other):
        out.print(f"{escape(run.name)}: {run.title}", soft_wrap=True, highlight=False)
    out.print(phase_table(found))
    for note in found.notes:
        out.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True, highlight=False)
    if found.alone:
        names = sorted({f"{key.phase} of {key.name or 'the model'}" for key in found.alone})
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        out.print(
            f"not compared, since only one run has them whole: {escape('; '.join(names[:5]))}{more}", soft_wrap=True
        )
    if picture:
        try:
            out.print(f"picture: {escape(str(save_picture(found, picture, DARK if dark else LIGHT)))}", soft_wrap=True)
        except OSError as error:
            raise ConfigError(
                f"{picture} cannot be written: {error.strerror}; name a file in a folder that exists", code="SMP119"
            ) from None
    first, *more_said = write_verdict(found)
    colour = "green" if found.is_equal and found.compared else "red"
    out.print(f"[{colour}]{escape(first)}[/{colour}]", soft_wrap=True, highlight=False)
    for sentence in more_said:
        out.print(escape(sentence), soft_wrap=True, highlight=False)
    if not (found.is_equal and found.compared):
        raise click.exceptions.Exit(1)
