"""The user's code on this host, by the training toolkit (``sagemaker-training``): its download and its requirements.

The toolkit runs in a process of its own, ``python -m smp_launch.sagemaker.toolkit``, so that the launcher neither needs it nor
carries what it imports. The rest of what it can do (environment, mpirun) is done by this package.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smp_launch.errors import LaunchError, Stopped
from smp_launch.machine.processes import kill_descendants

if TYPE_CHECKING:
    from smp_launch.machine.signals import StopRequests
    from smp_launch.sagemaker.environment import TrainingEnvironment

#: The two things that it does; a failure's report begins with one of them and a line break.
_DOWNLOAD = "download"
_REQUIREMENTS = "requirements"

#: The packages that the toolkit installs before the script runs.
_REQUIREMENTS_FILE = "requirements.txt"
#: With it the code is a package, which the toolkit installs.
_PACKAGE_FILE = "setup.py"

#: Of the reason for a failure.
_REASON_BYTES = 4000


def prepare_code(training: TrainingEnvironment, stop: StopRequests, environ: Mapping[str, str]) -> None:
    """Put the code folder in order. Do nothing if the code is there and nothing has to be installed.

    Raises:
        LaunchError: the archive cannot be fetched, or a requirement cannot be installed.
        Stopped: a request to stop came meanwhile.
    """
    code = training.tree.code_dir
    source = training.hyperparameters.get("sagemaker_submit_directory")
    remote = [source] if isinstance(source, str) and source.startswith("s3://") else []
    if not remote and not any((code / name).is_file() for name in (_PACKAGE_FILE, _REQUIREMENTS_FILE)):
        return
    code.mkdir(parents=True, exist_ok=True)
    failed, reason = _run([str(code), *remote], stop, environ)
    host = training.current_host
    if failed == _DOWNLOAD:
        raise LaunchError(
            f"the code cannot be fetched from {source}: {reason}; host {host!r} asked for it with the job's role; "
            "let the role read that object, and the container reach S3",
            code="SMP201",
        )
    if failed == _REQUIREMENTS:
        name = _PACKAGE_FILE if (code / _PACKAGE_FILE).is_file() else _REQUIREMENTS_FILE
        raise LaunchError(
            f"{name} cannot be installed: {reason}; pip ran on host {host!r} in the code folder; correct the file, or put what it "
            "names into the image",
            code="SMP201",
        )
    if failed:
        raise LaunchError(
            f"the training toolkit failed: {reason}; it was to put the code folder {code} of host {host!r} in order; "
            "its messages are in the log; see that the image has sagemaker-training",
            code="SMP201",
        )


def _run(words: list[str], stop: StopRequests, environ: Mapping[str, str]) -> tuple[str, str]:
    """Run the toolkit in a child; return the failed task (empty if none failed) and the reason."""
    # A pipe of its own: the toolkit, and pip below it, write what they like to the output.
    read, write = os.pipe()
    command = [sys.executable, "-m", "smp_launch.sagemaker.toolkit", str(write), *words]
    with os.fdopen(read, "rb") as report, selectors.DefaultSelector() as selector:
        # A child, so that this process imports nothing of the toolkit, and a stop can end pip.
        process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, pass_fds=[write], start_new_session=True
        )
        # The child has the only end now, so the report ends with the child.
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


def main() -> None:
    """Take over from the toolkit's own ``train`` program, which ``SAGEMAKER_TRAINING_MODULE`` sends here."""
    os.execv(sys.executable, [sys.executable, "-m", "smp_launch", "train"])


def run_child(arguments: Sequence[str]) -> int:
    """Run as ``REPORT FOLDER [URI]``: fetch the archive ``URI`` into ``FOLDER``, and install its requirements.

    If it is a package, it is installed too. Both happen in one process, because the toolkit takes a second to import.
    ``REPORT`` is the number of a descriptor that gets the reason of a failure; the exit code is then 1.
    """
    report, folder, *uri = arguments
    task = _DOWNLOAD if uri else _REQUIREMENTS
    try:
        from sagemaker_training import files, logging_config, modules

        logging_config.configure_logger(logging.INFO)
        if uri:
            files.download_and_extract(uri[0], folder)
        task = _REQUIREMENTS
        if os.path.isfile(os.path.join(folder, _PACKAGE_FILE)):
            modules.install(folder, capture_error=True)  # the package, and its requirements file too
        elif os.path.isfile(os.path.join(folder, _REQUIREMENTS_FILE)):
            modules.install_requirements(folder, capture_error=True)
    except Exception as error:  # of the platform's code, which may raise anything: the parent reports it with the task
        reason = f"{task}\n{type(error).__name__}: {error}"
        os.write(int(report), reason.encode("utf-8", "replace")[:_REASON_BYTES])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1:]))
