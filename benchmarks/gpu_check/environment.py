"""The checkout that checks run in, and the environment variables that control checks.

| variable | |
|---|---|
| ``SMPCHECK_TINY`` | ``1``: tiny models and few steps, as with ``--tiny`` |
| ``SMPCHECK_EMULATE`` | ``checked``: emulated devices whose streams are checked, instead of a GPU |
| ``SMPCHECK_NCCL`` | ``newer``: the check ``nccl_matrix`` preloads the NCCL in ``.gpu/nccl`` |
| ``SMPCHECK_BUDGET`` | seconds for all checks, the default of ``--budget`` |
| ``SMPCHECK_DEADLINE`` | set by the driver: time at which it ends a check |
| ``SMPCHECK_MARK`` | set by the driver: marks the processes that a check has started |
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

#: This package, as Python runs it.
PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
#: Folders from which the project is imported: libraries, training scripts, and what tests share.
PATHS = [str(ROOT / folder) for folder in ("container", ".", "entrypoints", "tests", "benchmarks")]
#: Names that a launcher sets for its ranks. A program that a check starts must not inherit them.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def extend_path() -> None:
    """Put the project's folders in front of Python's path."""
    for path in reversed(PATHS):
        if path not in sys.path:
            sys.path.insert(0, path)


def make_program_environment() -> dict[str, str]:
    """Return the environment of a program that imports the project and is no rank yet."""
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
    return environ


def is_tiny() -> bool:
    """Return whether models are tiny and steps few."""
    return os.environ.get("SMPCHECK_TINY") == "1"


def is_emulated() -> bool:
    """Return whether emulated devices take the place of a GPU."""
    return os.environ.get("SMPCHECK_EMULATE") == "checked"


def count_seconds_left() -> float:
    """Return the seconds until the driver ends this check; 300 without a driver."""
    now = time.time()
    return float(os.environ.get("SMPCHECK_DEADLINE", now + 300)) - now


def find_free_port() -> int:
    """Return a port that is free now.

    It is below the range from which the system picks ports for connections, so that none of them takes it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 31000)
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port


def kill_marked(mark: str) -> int:
    """Kill every process whose environment contains ``mark``; return their number.

    Ranks of a launcher have sessions of their own. Killing the check's process group would leave them on the GPU.
    """
    killed = 0
    processes = [entry for entry in os.listdir("/proc") if entry.isdigit()] if os.path.isdir("/proc") else []
    for entry in processes:
        if int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in Path("/proc", entry, "environ").read_bytes():
                os.kill(int(entry), signal.SIGKILL)
                killed += 1
    return killed
