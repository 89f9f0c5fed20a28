"""``python -m smp_launch``: ``train`` runs on a host of a SageMaker job, ``run`` starts a script anywhere."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import click

from smp_config.error_codes import append_code
from smp_config.errors import ConfigError
from smp_config.job import JobSettings
from smp_config.machine.disk_space import full_disk, no_more_files
from smp_config.recovery import spare_hosts
from smp_config.version import __version__
from smp_launch.anywhere.run_command import run_script
from smp_launch.errors import CANNOT_START, LaunchError, Stopped
from smp_launch.failures.failure import Cause, write_failure
from smp_launch.machine.hosts import SIMULATED_VARIABLE, Layout, ScriptKind
from smp_launch.machine.locked_folders import LeaderStatus, StatusDir
from smp_launch.machine.signals import LIFELINE_VARIABLE, StopRequests
from smp_launch.mpirun.job import Job
from smp_launch.remote.leader import run_job, run_over_hosts
from smp_launch.remote.remaining_hosts import Neighbours
from smp_launch.remote.worker import serve_leader, wait_for_leader
from smp_launch.sagemaker.environment import TrainingEnvironment, gpu_count
from smp_launch.sagemaker.toolkit import prepare_code
from smp_launch.sagemaker.tree import Tree
from smp_launch.supervision.supervise import LAST_RESORT, grace_seconds, stop_code, write_own_line


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Start training jobs: from a SageMaker folder tree, or a script wherever this machine stands."""


@main.command()
def train() -> None:
    """Run the training job of this host's tree (/opt/ml, or the folder in SAGEMAKER_BASE_DIR)."""
    lifeline = os.environ.get(LIFELINE_VARIABLE) == "1"
    with StopRequests(lifeline, patience=grace_seconds(os.environ) + LAST_RESORT) as stop:
        code = run(stop, os.environ)
        # Docker Compose stops all containers when the first has ended; the others' jobs have ended by then, too.
        stop.job_has_ended()
    sys.exit(code)


main.add_command(run_script)


def run(stop: StopRequests, environ: Mapping[str, str]) -> int:
    """Run this host's part of the job, write the failure file if it fails, and return the exit code."""
    tree = Tree.from_environment(environ)
    try:
        code, cause = _run(tree, stop, environ)
    except (ConfigError, LaunchError) as error:
        code, cause = CANNOT_START, Cause(append_code(f"the job cannot start: {error}", error))
    except Stopped as error:
        code, cause = stop_code(error.by), Cause(append_code(str(error), error))
    except OSError as error:
        said = full_disk(error, Path(error.filename if isinstance(error.filename, str) else tempfile.gettempdir()))
        if said is not None:
            code, cause = CANNOT_START, Cause(f"the job cannot go on: {said}; make room there")
        elif (why := no_more_files(error)) is not None:
            code, cause = CANNOT_START, Cause(f"the job cannot go on: {why}")
        else:
            code, cause = _itself(error)
    except Exception as error:  # of this program itself: the job still gets a failure file
        code, cause = _itself(error)
    if cause is not None:
        write_own_line(f"failed: {cause.headline}")
        try:
            write_failure(tree.failure_file, cause)
        except OSError as error:
            write_own_line(f"{tree.failure_file} cannot be written: {error}")
    return code


def _itself(error: Exception) -> tuple[int, Cause]:
    return 1, Cause(f"the launcher itself failed: {type(error).__name__}: {error}", traceback.format_exc())


def _run(tree: Tree, stop: StopRequests, environ: Mapping[str, str]) -> tuple[int, Cause | None]:
    training = TrainingEnvironment.read(tree, environ)
    # ModelTrainer's own scripts have already fetched the code and installed the requested packages.
    if environ.get(SIMULATED_VARIABLE) != "1" and tree.code is None:
        prepare_code(training, stop, environ)
    host = training.current_host
    if host == training.hosts[0]:
        return _lead(training, stop, environ)
    settings, layout = _settings(training, environ)
    if layout.kind is ScriptKind.SCRIPT:
        return run_job(Job.read(training, settings, layout, environ), stop, environ)
    if layout.simulated:
        return wait_for_leader(host, layout.leader, stop, environ)
    return serve_leader(host, layout.leader, stop, environ, layout.processes_per_host)


def _lead(training: TrainingEnvironment, stop: StopRequests, environ: Mapping[str, str]) -> tuple[int, Cause | None]:
    """Be the leader; other hosts of this machine learn how it ends, whatever happens."""
    status_dir = StatusDir.from_environment(environ) if len(training.hosts) > 1 else None
    if status_dir is None:
        settings, layout = _settings(training, environ)
        job = Job.read(training, settings, layout, environ)
        alone = layout.one_machine and not job.spares
        return run_job(job, stop, environ) if alone or layout.simulated else run_over_hosts(job, stop, environ)
    with status_dir.leading():
        try:
            settings, layout = _settings(training, environ)
            job = Job.read(training, settings, layout, environ)
            code, cause = run_job(job, stop, environ, Neighbours.of(job, status_dir))
        except (ConfigError, LaunchError) as error:
            status_dir.publish(LeaderStatus(CANNOT_START, append_code(f"the job cannot start: {error}", error)))
            raise
        status_dir.publish(LeaderStatus(code, cause.headline if cause else ""))
        return code, cause


def _settings(training: TrainingEnvironment, environ: Mapping[str, str]) -> tuple[JobSettings, Layout]:
    settings = JobSettings.from_hyperparameters(training.hyperparameters, are_decoded=True)
    simulated = environ.get(SIMULATED_VARIABLE) == "1"
    hosts = training.hosts
    if settings.uses_mpi:
        hosts = hosts[: len(hosts) - spare_hosts(environ, len(hosts))]
    layout = Layout.of(settings, hosts, training.current_host, gpu_count(environ), simulated)
    return settings, layout


if __name__ == "__main__":
    main()
