"""``smp-estimator run``: a script as a training job of processes on this machine, without writing Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from smp_config import ConfigError
from smp_config.error_codes import append_code
from smp_config.errors import suggest
from smp_config.formats.values import parse_dictionary
from smp_config.job import SCRIPT_ARGUMENTS_VARIABLE
from smp_config.version2.which_version import OF_VERSION_2, choose_version, find_imports
from smp_estimator.cli.console import make_printable
from smp_estimator.local.bootstrap import is_foreign
from smp_estimator.local.files.uris import address_of
from smp_estimator.sdk.installed import installed_major

#: What sets an argument, as an expression → the option; the longer ones stand first.
_OPTIONS = {
    r'"mpi": \{"enabled": True, "processes_per_host": (\d+)\}': r"--processes \1",
    r"(?<![\w.])(?:mpi\.)?processes_per_host(?!\w)": "--processes",
    r"(?<![\w.])(?:compute\.)?instance_count(?!\w)": "--hosts",
    r"(?<![\w.])(?:distribution smdistributed\.modelparallel|ModelParallel)\.parameters": "--parameters",
    r"(?<![\w.])(?:source_code\.)?entry_(?:point|script)(?!\w)": "SCRIPT",
    r"(?<![\w.])(?:source_code\.)?source_dir(?!\w)": "--source-dir",
}

#: Names the folder of a job's checkpoints; ``--checkpoints`` sets it.
_CHECKPOINTS_VARIABLE = "SMP_CHECKPOINT_DIR"

#: Parameters of a job that gets none, in version 1 of the library.
DEFAULT = '{"ddp": true}'

#: Exit code of a command that Ctrl-C has ended, as a shell has it.
_CTRL_C = 130


def pairs(values: tuple[str, ...], option: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each ``name=value`` of a repeatable option; raises ConfigError for anything else."""
    for value in values:
        name, sign, text = value.partition("=")
        is_complete = bool(name and sign)
        if not is_complete:
            raise ConfigError(
                f"{option} is {value!r}; it has a name and a value: write {option} name=value", code="SMP108"
            )
        yield name, text


def _value(text: str) -> Any:
    """Parse a hyperparameter's value: as JSON if it is valid JSON (300, 0.1, true), else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class _RunCommand(click.Command):
    """Command that explains, on an unknown option, where the script's own arguments belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = suggest(error.option_name, [option for each in self.params for option in each.opts])
            raise click.UsageError(
                f"run has no option {error.option_name}{near or ';'} if it is meant for the script, write it behind --: "
                f"run SCRIPT -- {error.option_name} …",
                ctx,
            ) from None


@click.command(cls=_RunCommand)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="Processes of each host.")
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="Simulated hosts.")
@click.option("--hyperparameter", multiple=True, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="Of every rank's environment; may be repeated.")
@click.option("--channel", multiple=True, metavar="NAME=DIR", help="Input data; may be repeated.")
@click.option(
    "--parameters",
    metavar="JSON|FILE",
    help=f"mp_parameters: a dictionary or its file; default: {DEFAULT}, none for a script of version 2.",
)
@click.option("--source-dir", type=click.Path(exists=True, file_okay=False), help="Shipped whole; SCRIPT lies in it.")
@click.option("--output", type=click.Path(file_okay=False), help="Where model.tar.gz goes.")
@click.option(
    "--checkpoints", type=click.Path(file_okay=False), help="SMP_CHECKPOINT_DIR of every host; outlives the job."
)
def run(
    script: str,
    arguments: tuple[str, ...],
    source_dir: str | None,
    output: str | None,
    checkpoints: str | None,
    **given: Any,
) -> None:
    """Run SCRIPT as a training job of processes on this machine. Exit code 1 if it fails.

    ARGUMENTS, after --, are the script's own, after its hyperparameters: run train.py --processes 2 -- --lr 0.1

    The ranks have this shell's environment, except for the variables that the launcher sets. A parameter that only one version
    of the library has (hybrid_shard_degree: version 2) decides how SCRIPT is started; else its imports do.
    """
    path = Path(script).absolute()
    if source_dir and Path(source_dir).absolute() not in path.parents:
        raise ConfigError(
            f"SCRIPT {path} does not lie in --source-dir {source_dir}; give the folder that holds it", code="SMP108"
        )
    environment = dict(_environment(given["env"]))
    is_2, parameters = _choose(given["parameters"], path)
    settings: dict[str, Any] = {
        "entry_point": str(path.relative_to(Path(source_dir).absolute())) if source_dir else str(path),
        "instance_type": "local",
        "instance_count": given["hosts"],
        "hyperparameters": {name: _value(text) for name, text in pairs(given["hyperparameter"], "--hyperparameter")},
        "distribution": {
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
            "torch_distributed" if is_2 else "mpi": {
                "enabled": True,
                "processes_per_host": given["processes"],
            },
        },
    }
    if source_dir:
        settings["source_dir"] = str(Path(source_dir).absolute())
    if output:
        settings["output_path"] = address_of(output)
    if checkpoints:
        settings["checkpoint_s3_uri"] = address_of(checkpoints)
    _report_shell_variables(has_checkpoints=bool(checkpoints))
    if arguments:
        environment[SCRIPT_ARGUMENTS_VARIABLE] = json.dumps(arguments)
    if environment:
        settings["environment"] = environment
    channels = dict(_channels(given["channel"]))

    try:
        _train(settings, channels)
    except ConfigError as error:
        raise click.ClickException(make_printable(append_code(_in_words_of_options(str(error)), error))) from None
    except KeyboardInterrupt:  # the session has stopped the job, and reported it
        raise click.exceptions.Exit(_CTRL_C) from None


def _choose(given: str | None, script: Path) -> tuple[bool, dict[str, Any]]:
    """Return whether a job is one of version 2 of the library, and its parameters; a line says so where they do not show it."""
    if given is None:
        is_2 = find_imports(script) == {OF_VERSION_2}
        return is_2, {} if is_2 else parse_dictionary(DEFAULT, "--parameters")
    parameters = parse_dictionary(given, "--parameters")
    choice = choose_version(parameters, script)
    if choice.reason is not None:
        click.echo(choice.reason, err=True)
    return choice.is_2, parameters


def _in_words_of_options(sentence: str) -> str:
    """Replace an estimator's or trainer's arguments in a sentence by the options of ``run`` that set them."""
    for argument, option in _OPTIONS.items():
        sentence = re.sub(argument, option, sentence)
    return sentence


def _train(settings: dict[str, Any], channels: dict[str, str]) -> None:
    """Run the job with the SDK that is installed; the last line of its log has the address of the model."""
    if installed_major() == 3:
        _train_with_sdk_3(settings, channels)
        return
    from smp_estimator import SMPEstimator

    estimator = SMPEstimator(**settings)
    try:
        estimator.fit(channels or None)
    except ValueError as error:  # the job failed; the message holds the rank and its exception
        raise _job_failed(error) from None


def _job_failed(error: Exception) -> click.ClickException:
    """Return the end of the command for a job's failure, which the terminal's "Error:" introduces."""
    return click.ClickException(make_printable(str(error)).removeprefix("Error for "))


def _train_with_sdk_3(settings: dict[str, Any], channels: dict[str, str]) -> None:
    from smp_estimator.model_trainer import ModelParallel, ModelTrainer
    from smp_estimator.sdk_v3.sdk import (
        CheckpointConfig,
        Compute,
        FailedStatusError,
        OutputDataConfig,
        SourceCode,
    )

    with tempfile.TemporaryDirectory() as alone:
        folder, script = settings.get("source_dir"), settings["entry_point"]
        if folder is None:  # the script travels alone; the SDK knows folders only
            folder, script = alone, Path(shutil.copy2(script, alone)).name
        records: dict[str, Any] = {
            "source_code": SourceCode(source_dir=folder, entry_script=script),
            "compute": Compute(instance_type="local", instance_count=settings["instance_count"]),
            "distributed": ModelParallel.from_distribution(settings["distribution"]),
            "hyperparameters": settings["hyperparameters"],
            "environment": settings.get("environment") or {},
        }
        if output := settings.get("output_path"):
            records["output_data_config"] = OutputDataConfig(s3_output_path=output)
        if checkpoints := settings.get("checkpoint_s3_uri"):
            records["checkpoint_config"] = CheckpointConfig(s3_uri=checkpoints)
        trainer = ModelTrainer(**records)
        try:
            trainer.train(channels or None)
        except FailedStatusError as error:
            raise _job_failed(error) from None


def _channels(values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, folder in pairs(values, "--channel"):
        if not Path(folder).is_dir():
            raise ConfigError(
                f"--channel {name} is {folder!r}, which is no directory ({Path(folder).absolute()}): correct it",
                code="SMP108",
            )
        yield name, address_of(folder)


def _environment(values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, text in pairs(values, "--env"):
        is_own = name.startswith("SMP_LAUNCH_") or not name.startswith("SMP_")
        is_of_launcher = not is_own and is_foreign(name)
        if is_of_launcher:
            remedy = ", and give --checkpoints DIR" if name == _CHECKPOINTS_VARIABLE else ""
            raise ConfigError(
                f"--env {name} is {text!r}, and the launcher sets {name} in every rank itself: leave it out{remedy}",
                code="SMP108",
            )
        yield name, text


def _report_shell_variables(*, has_checkpoints: bool) -> None:
    """Report which ``SMP_*`` variables of the shell the job does not get; it gets all others."""
    left_out = {name for name in os.environ if name.startswith("SMP_") and is_foreign(name)}
    if has_checkpoints:
        left_out.discard(_CHECKPOINTS_VARIABLE)
    if not left_out:
        return
    them = "them" if len(left_out) > 1 else "it"
    names = ", ".join(sorted(left_out))
    line = f"not taken from this shell, since the launcher sets {them}: {names}"
    if _CHECKPOINTS_VARIABLE in left_out:
        line += "; --checkpoints DIR names the folder"
    click.echo(line)
