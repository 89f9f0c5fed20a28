"""The user's code on this host: downloaded from S3, and what its ``requirements.txt`` names installed."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Mapping

from smp_launch.environment import TrainingEnvironment
from smp_launch.errors import LaunchError, Stopped
from smp_launch.processes import kill_descendants
from smp_launch.signals import StopRequests
from smp_launch.supervise import say
from smp_launch.toolkit import DOWNLOAD, REQUIREMENTS

_REQUIREMENTS_FILE = "requirements.txt"


def prepare_code(training: TrainingEnvironment, stop: StopRequests, environ: Mapping[str, str]) -> None:
    """Put the code folder in order; does nothing where the code is there and needs nothing.

    Raises:
        LaunchError: the archive cannot be fetched, or a requirement cannot be installed.
        Stopped: a request to stop came meanwhile.
    """
    code = training.tree.code_dir
    source = training.hyperparameters.get("sagemaker_submit_directory")
    if isinstance(source, str) and source.startswith("s3://"):
        code.mkdir(parents=True, exist_ok=True)
        reason = _run([DOWNLOAD, source, str(code)], stop, environ)
        if reason is not None:
            raise LaunchError(
                f"the code cannot be fetched from {source}: {reason}; host {training.current_host!r} asked for it with the "
                "job's role; let the role read that object, and the container reach S3"
            )
    if (code / _REQUIREMENTS_FILE).is_file():
        say(f"installing {_REQUIREMENTS_FILE}")
        reason = _run([REQUIREMENTS, str(code)], stop, environ)
        if reason is not None:
            raise LaunchError(
                f"{_REQUIREMENTS_FILE} cannot be installed: {reason}; pip ran on host {training.current_host!r} in the code "
                "folder; correct the file, or put what it names into the image"
            )


def _run(task: list[str], stop: StopRequests, environ: Mapping[str, str]) -> str | None:
    """Run the toolkit in a child; None when all went well, else why not."""
    read, write = os.pipe()
    words = [sys.executable, "-m", "smp_launch.toolkit", task[0], str(write), *task[1:]]
    with os.fdopen(read, "rb") as report, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(
            words, env=dict(environ), stdin=subprocess.DEVNULL, pass_fds=[write], start_new_session=True
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
        return None
    return reason or f"the training toolkit ended with code {process.returncode}; its messages are in the log"
