"""A job's folder in its host's shared memory, in which ranks keep their state between two starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from smp_config.recovery import FOLDER_VARIABLE, MEMORY_VARIABLE, SHARED_MEMORY, wants_memory
from smp_launch.machine.locked_folders import private_dir
from smp_launch.supervision.supervise import write_own_line


@contextmanager
def memory_folder(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Make a private folder in shared memory for the block, and yield the ranks' variables for it.

    The variables are empty if no memory checkpoints are wanted, or if shared memory cannot be written to.

    Raises:
        ConfigError: the variables of memory checkpoints are invalid.
    """
    if not wants_memory(environ):
        yield {}
        return
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        write_own_line(f"{MEMORY_VARIABLE}=1 has no effect: this machine has no {SHARED_MEMORY} that can be written to")
        yield {}
        return
    with private_dir(SHARED_MEMORY) as folder:
        yield {FOLDER_VARIABLE: str(folder)}
