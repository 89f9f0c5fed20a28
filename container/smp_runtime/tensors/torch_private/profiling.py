"""What PyTorch keeps private of its profiler, and of what holds a GPU's memory."""

# ruff: noqa: SLF001 - this folder is the place for private names

from __future__ import annotations

import os
from typing import Any

import torch


def of_all_threads() -> Any:
    """Return the profiler's configuration to record all threads but no allocations; None if this release has none."""
    profiler = getattr(torch._C, "_profiler", None)
    try:
        return profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[union-attr]  # a release without it
    except (AttributeError, TypeError):
        return None


def record_memory_history() -> None:
    """Let the allocator record which lines of code hold the GPU's memory, if this release can."""
    if (record := getattr(torch.cuda.memory, "_record_memory_history", None)) is not None:
        record(max_entries=100_000)  # the newest ones are kept


def write_memory_history(path: str | os.PathLike[str]) -> None:
    """Write the recorded memory history for pytorch.org/memory_viz, and stop recording, if this release can."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if dump is not None:
        dump(os.fspath(path))
        torch.cuda.memory._record_memory_history(enabled=None)
