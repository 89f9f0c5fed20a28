"""The check of a script that was started by itself, as `python train.py`, although its settings need several ranks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from smp_config import ConfigError
from smp_config.machine.launchers import started_by
from smp_runtime.comm.control_transports import process_group_size

if TYPE_CHECKING:
    from smp_config import ModelParallelParameters


def require_ranks(parameters: ModelParallelParameters) -> None:
    """Raise ConfigError with the command to type if this process is a job of its own and one replica needs several.

    Other launchers set the number of processes, and their settings are checked with the topology.
    """
    needed = parameters.pipeline_parallel_degree * parameters.tensor_parallel_degree
    if needed == 1 or process_group_size() > 1 or _has_launcher():
        return
    script = os.path.basename(sys.argv[0]) if sys.argv[:1] != [""] else ""
    name = script if script.endswith(".py") else "train.py"
    raise ConfigError(
        f"one replica needs {needed} processes (pipeline_parallel_degree {parameters.pipeline_parallel_degree} × "
        f"tensor_parallel_degree {parameters.tensor_parallel_degree} = {needed}), and this script was started as one; start it "
        f"with: smp-launch run --processes {needed} {name}",
        code="SMP102",
    )


def _has_launcher() -> bool:
    try:
        return started_by(os.environ) is not None or "SMP_WORLD_SIZE" in os.environ
    except ConfigError:  # half of a launcher's variables are there: the error is about them
        return True
