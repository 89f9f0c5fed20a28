"""The user's code on this host: downloaded from S3, and what its ``requirements.txt`` names installed."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from smp_launch.errors import LaunchError, Stopped
from smp_launch.processes import kill_descendants
from smp_launch.toolkit import DOWNLOAD, REQUIREMENTS, REQUIREMENTS_FILE

if TYPE_CHECKING:
    from smp_launch.environment import TrainingEnvironment
    from smp_launch.signals import StopRequests


def prepare_code(training: TrainingEnvironment, stop: StopRequests, environ: Mapping[str, str]) -> None:
    """Put the code folder in order; does nothing where the code is there and needs nothing.

    Raises:
        LaunchError: the archive cannot be fetched, or a requirement cannot be installed.
        Stopped: a request to stop came meanwhile.
    """
    code = training.tree.code_dir
    source = training.hyperparameters.get("sagemaker_submit_directory")
    remote = [source] if isinstance(source, str) and source.startswith("s3://") else []
    if not remote and not (code / REQUIREMENTS_FILE).is_file():
        return
    code.mkdir(parents=True, exist_ok=True)
    failed, reason = _run([str(code), *remote], stop, environ)
    host = training.current_host
    if failed == DOWNLOAD:
        raise LaunchError(
            f"the code cannot be fetched from {source}: {reason}; host {host!r} asked for it with the job's role; "
            "let the role read that object, and the container reach S3"
        )
    if failed == REQUIREMENTS:
        raise LaunchError(
            f"{REQUIREMENTS_FILE} cannot be installed: {reason}; pip ran on host {host!r} in the code folder; "
            "correct the file, or put what it names into the image"
        )
    if failed:
        raise LaunchError(
            f"the training toolkit failed: {reason}; it was to put the code folder {code} of host {host!r} in order; "
            "its messages are in the log; see that the image has sagemaker-training"
        )


def _run(words: list[str], stop: StopRequests, environ: Mapping[str, str]) -> tuple[str, str]:
    """Run the toolkit in a child; gives what failed (empty when nothing did) and why."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "smp_launch.toolkit", str(write), *words]
    with os.fdopen(read, "rb") as report, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, pass_fds=[write], start_new_session=True
        )
        os.close(write)
        selector.register(stop, selectors.EVENT_READ)
        # The end of the child makes `stop` readable too; pip has its own timeouts, and the platform its maximum.
        while process.poll() is None:
            selector.select()
            names = stop.read()
            if names:
                kill_descendants()
                process.wait()
                raise Stopped(names[0])
        reason = report.read().decode("utf-8", "replace").strip()
    if process.returncode == 0:
        return "", ""
    failed, _, said = reason.partition("\n")
    return failed or "toolkit", said or f"it ended with code {process.returncode}"
