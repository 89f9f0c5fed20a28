"""``smp-launch run``: a script as a job, wherever this machine stands."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from smp_config.error_codes import append_code
from smp_config.errors import ConfigError
from smp_config.formats import strict_json
from smp_config.formats.values import parse_dictionary
from smp_config.job import MP_PARAMETERS, TORCHRUN_ENABLED, decoded_hyperparameter
from smp_config.machine.disk_space import full_disk, no_more_files
from smp_config.parameters import ModelParallelParameters
from smp_config.version2.parameters import Version2Parameters
from smp_config.version2.which_version import choose_version
from smp_launch.anywhere.detect_launcher import DetectedLauncher, LauncherSettings, recognise
from smp_launch.anywhere.local_job import LocalJob, plan
from smp_launch.anywhere.plain_rank import PARAMETERS_VARIABLE
from smp_launch.errors import CANNOT_START, LaunchError, Stopped
from smp_launch.failures.failure import Cause, write_failure
from smp_launch.machine.signals import LIFELINE_VARIABLE, StopRequests
from smp_launch.sagemaker.tree import Tree
from smp_launch.supervision.supervise import LAST_RESORT, grace_seconds, stop_code, write_own_line


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.argument("script")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.option("--processes", type=click.IntRange(1), metavar="N", help="Ranks of each host; default: its GPUs, or 1.")
@click.option(
    "--parameters",
    metavar="JSON|FILE",
    help="mp_parameters, as for smp.init() or tsm.init(); default: SM_HP_MP_PARAMETERS.",
)
@click.option("--hosts", type=click.IntRange(1), metavar="N", help="How many hosts, where nothing here says it.")
@click.option("--host-rank", type=click.IntRange(0), metavar="I", help="Which of them this is, from 0.")
@click.option("--master", metavar="ADDRESS:PORT", help="Where the ranks meet, on host 0.")
@click.option("--failure-file", type=click.Path(dir_okay=False), help="Where the first cause of a failure is written.")
@click.option(
    "--print", "only_print", is_flag=True, help="Say what was recognised and would be started, and start nothing."
)
def run_script(
    script: str,
    words: tuple[str, ...],
    processes: int | None,
    parameters: str | None,
    hosts: int | None,
    host_rank: int | None,
    master: str | None,
    failure_file: str | None,
    only_print: bool,
) -> None:
    """Run SCRIPT, and WORDS as its own command line, on every rank.

    The launcher around this command is detected: SLURM, torchrun, mpirun, Kubernetes' training operator, a SageMaker job.
    Without any of them the ranks run on this machine.

    The exit code is 0 if all ranks ended well, 2 if the job cannot start, else that of the first rank that failed.
    """
    environ = os.environ
    again = [sys.executable, "-m", "smp_launch", *sys.argv[1:]]
    try:
        surroundings = recognise(environ, LauncherSettings(processes, hosts, host_rank, master))
        typed = _parameters(parameters, surroundings, environ, script)
        job = plan(surroundings, script, words, typed, again, environ)
    except ConfigError as error:
        sys.exit(_end(CANNOT_START, Cause(append_code(f"the job cannot start: {error}", error)), failure_file))
    if only_print:
        click.echo("\n".join(job.describe(environ)))
        return
    sys.exit(_run(job, failure_file, environ))


def _run(job: LocalJob, failure_file: str | None, environ: Mapping[str, str]) -> int:
    try:
        if job.surroundings.is_rank or job.surroundings.starter is not None:
            job.become(environ)
        lifeline = environ.get(LIFELINE_VARIABLE) == "1"
        with StopRequests(lifeline, patience=grace_seconds(environ) + LAST_RESORT) as stop:
            code, cause = job.run(stop, environ)
            code = _end(code, cause, failure_file)
            stop.job_has_ended()
            return code
    except (ConfigError, LaunchError) as error:
        return _end(CANNOT_START, Cause(append_code(f"the job cannot start: {error}", error)), failure_file)
    except OSError as error:
        path = Path(error.filename if isinstance(error.filename, str) else tempfile.gettempdir())
        why = full_disk(error, path) or no_more_files(error)
        if why is None:
            raise
        return _end(CANNOT_START, Cause(f"the job cannot go on: {why}"), failure_file)
    except Stopped as error:
        return _end(stop_code(error.by), Cause(append_code(str(error), error)), failure_file)


def _end(code: int, cause: Cause | None, failure_file: str | None) -> int:
    """Report why the job failed, if it did, and return the exit code."""
    if cause is not None:
        write_own_line(f"failed: {cause.headline}")
        if failure_file:
            try:
                write_failure(Path(failure_file), cause)
            except OSError as error:
                write_own_line(f"{failure_file} cannot be written: {error}")
    return code


def _parameters(
    given: str | None, surroundings: DetectedLauncher, environ: Mapping[str, str], script: str
) -> ModelParallelParameters | Version2Parameters | None:
    """Return the parameters of the command line, else of the environment, else of a SageMaker job.

    If they have no parameter that only one version of the library has, the job's launcher decides, else the script's imports.

    Raises:
        ConfigError: the parameters cannot be read, or cannot work.
    """
    found: Any = None
    hyperparameters: Mapping[str, Any] = {}
    if given is not None:
        found = parse_dictionary(given, "--parameters")
    elif text := environ.get(PARAMETERS_VARIABLE):
        try:
            found = strict_json.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"{PARAMETERS_VARIABLE} is no JSON ({error}); it holds the job's mp_parameters: correct or unset it, or give "
                "--parameters",
                code="SMP107",
            ) from None
    elif surroundings.is_platform_job:
        hyperparameters = Tree.from_environment(environ).read_config("hyperparameters")
        found = decoded_hyperparameter(hyperparameters.get(MP_PARAMETERS))
    if found is None:
        return None
    return _typed(found, script, starts_torchrun=decoded_hyperparameter(hyperparameters.get(TORCHRUN_ENABLED)) is True)


def _typed(found: Any, script: str, *, starts_torchrun: bool) -> ModelParallelParameters | Version2Parameters:
    """Return parameters of the version that they are meant for; a line says so where they do not show it."""
    if starts_torchrun:
        return Version2Parameters.from_given(found)
    choice = choose_version(found, script)
    if choice.reason is not None:
        write_own_line(choice.reason)
    return Version2Parameters.from_given(found) if choice.is_2 else ModelParallelParameters.from_mp_parameters(found)
