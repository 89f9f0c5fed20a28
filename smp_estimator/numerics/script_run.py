"""A script that runs on this machine to record numbers: its command, its log, and its errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_config import ConfigError
from smp_estimator.numerics.recorded_run import RecordedRun

#: Lines of a run that failed that are shown.
_LINES = 25


def launch_command(script: str, words: Sequence[str], processes: int, parameters: Mapping[str, Any]) -> list[str]:
    """Return the command that starts a script with ``processes`` ranks on this machine."""
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(processes)]
    return [*command, "--parameters", json.dumps(parameters), script, *words]


def run_recorded(
    name: str, command: Sequence[str], record: Path, environment: Mapping[str, str], directory: str | None = None
) -> RecordedRun:
    """Run a command to its end and read the numbers that its ranks recorded; the log is beside their folder.

    Args:
        record: folder that the ranks record to; ``environment`` must name it.

    Raises:
        ConfigError: the command failed, with the end of its output; or it recorded nothing.
    """
    log = record.parent / f"{record.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            code = subprocess.run(
                command,
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            ).returncode
    except OSError as error:
        raise ConfigError(
            f"run {name!r} cannot be started in {directory or Path.cwd()} by {shlex.join(command)} ({error.strerror or error}); "
            "it must be run on a machine that has its script and folder"
        ) from None
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        raise ConfigError(
            f"the run {name!r}, {shlex.join(command)}, ended with exit code {code}; the end of {log}:\n"
            + "\n".join(said)
        )
    if not record.is_dir():
        raise ConfigError(
            f"the run {name!r}, {shlex.join(command)}, has recorded nothing: it never called smp.init(), or no step; the script "
            "must train with smdistributed.modelparallel.torch"
        )
    return RecordedRun.read(str(record))
