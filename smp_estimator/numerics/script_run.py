"""A script that runs on this machine to record numbers: its command, its log, and its errors."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from smp_config import ConfigError
from smp_estimator.numerics.recorded_run import RecordedRun

#: Lines of a run that failed that are shown.
_LINES = 25
#: Seconds for a launcher to end its ranks, before all of them are killed.
_PATIENCE = 15.0
#: The usual reason for a run without numbers.
_NEEDS_LIBRARY = (
    "it never called smp.init(), or no step; the script must train with smdistributed.modelparallel.torch, or be verified with "
    "--plain"
)


def launch_command(
    script: str, words: Sequence[str], processes: int, parameters: Mapping[str, Any] | None
) -> list[str]:
    """Return the command that starts a script with ``processes`` ranks on this machine; a plain script has no parameters."""
    command = [sys.executable, "-m", "smp_launch", "run", "--processes", str(processes)]
    given = [] if parameters is None else ["--parameters", json.dumps(parameters)]
    return [*command, *given, script, *words]


def run_recorded(
    name: str,
    command: Sequence[str],
    record: Path,
    environment: Mapping[str, str],
    directory: str | None = None,
    *,
    timeout: float | None = None,
) -> RecordedRun:
    """Run a command to its end and read the numbers that its ranks recorded; the log is beside their folder.

    Args:
        record: folder that the ranks record to; ``environment`` must name it.
        timeout: seconds after which the command and its ranks are ended; None for the launcher's own watch over hangs.

    Raises:
        ConfigError: the command failed, with the end of its output; it took too long; or it recorded nothing.
    """
    log = record.parent / f"{record.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            code = _wait_for(command, environment, directory, file, timeout)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the run {name!r}, {shlex.join(command)}, was ended after {timeout:g} seconds (--timeout); the end of {log}:\n"
            + _end_of(log),
            code="SMP119",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"run {name!r} cannot be started in {directory or Path.cwd()} by {shlex.join(command)} ({error.strerror or error}); "
            "it must be run on a machine that has its script and folder",
            code="SMP119",
        ) from None
    if code:
        raise ConfigError(
            f"the run {name!r}, {shlex.join(command)}, ended with exit code {code}; the end of {log}:\n" + _end_of(log),
            code="SMP119",
        )
    if not record.is_dir():
        raise ConfigError(
            f"the run {name!r}, {shlex.join(command)}, has recorded nothing: {_NEEDS_LIBRARY}", code="SMP119"
        )
    return RecordedRun.read(str(record))


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])


def _wait_for(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str | None,
    log: IO[bytes],
    timeout: float | None,
) -> int:
    """Run a command with its output in ``log``, and return its exit code; nothing of it outlives this call.

    Raises:
        TimeoutExpired: it took longer.
    """
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # A session of its own, so that all its processes can be ended together.
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except BaseException:  # the timeout, or Ctrl-C
        # SIGTERM first: a launcher then ends its ranks and writes how they ended.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        raise
    finally:
        # Processes that the command has started may still run, also after its own end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_PATIENCE)
