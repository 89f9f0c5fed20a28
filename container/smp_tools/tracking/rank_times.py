"""The time use of ranks, as they report it: a line of the log at intervals, and values for trackers."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smp_config import Group
from smp_config.machine.processes import memory_of
from smp_records import rank_record, time_breakdown
from smp_records.rank_record import current_record, read_glance
from smp_records.records import format_pace
from smp_runtime.comm.devices import peak_memory_bytes
from smp_runtime.job.progress import processor_seconds
from smp_tools.tracking.tracker import idle_share

if TYPE_CHECKING:
    from smp_records.time_breakdown import TimeReading
    from smp_runtime.job.session import Session
    from smp_runtime.job.trained import TrainedOptimizer

#: Seconds between two times at which a rank notes the memory of its GPU.
_MEMORY_SECONDS = 1.0


class RankTimes:
    """The time use of this rank.

    Args:
        every: seconds from one line of the log to the next; None for no lines.
    """

    outlives_regrouping = True

    def __init__(self, session: Session, every: float | None) -> None:
        self._session, self._every = session, every
        self._read, self._processor = current_record().pace.read(), processor_seconds()
        self._noted = float("-inf")
        session.after_update.append(self.updated)
        session.at_close.append(self.close)

    def updated(self, optimizer: TrainedOptimizer) -> None:
        """Report the rank's memory after an optimizer update, and log a line if it is time for one."""
        del optimizer
        now = time.monotonic()
        if now - self._noted >= _MEMORY_SECONDS:
            self._noted, device = now, self._session.ranks.device
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            current_record().pace.tell(stage=self._session.ranks.rank_in(Group.PP), device_bytes=held)
        if self._every is not None and now - self._read.when >= self._every:
            self._print()

    def close(self) -> None:
        """Log the time since the last line when the job ends."""
        if self._every is not None:
            self._print()

    def _print(self) -> None:
        read, used, ranks = current_record().pace.read(), processor_seconds(), self._session.ranks
        seconds = read.when - self._read.when
        more = {
            "host": os.environ.get("SMP_HOST") or os.environ.get("SM_CURRENT_HOST") or socket.gethostname(),
            "memory_bytes": peak_memory_bytes(ranks.device),
            "cpu_cores": (used - self._processor) / seconds if seconds > 0 else None,
            "gpu_share": _gpu_share(ranks.device),
        }
        record = time_breakdown.record_between(self._read, read, ranks.rank).model_copy(update=more)
        self._read, self._processor = read, used
        sys.stdout.write(format_pace(record) + "\n")
        sys.stdout.flush()


def _gpu_share(device: torch.device) -> float | None:
    """Return the fraction of the last second in which the GPU was busy, or None if it is not known."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # the package that asks the driver is missing, or the driver does not answer
        return None


class HostValues:
    """Memory and idle share of each rank of this machine, for trackers; one thread calls it at intervals.

    Args:
        environ: names the folder where ranks keep their records.
        rank: this rank, for values even if no records are kept.
    """

    def __init__(self, environ: Mapping[str, str], rank: int) -> None:
        self._folder = environ.get(rank_record.FOLDER_VARIABLE, "")
        self._rank = rank
        self._before: dict[int, TimeReading] = {}

    def __call__(self) -> dict[str, float]:
        """Return the values by name, such as ``memory_gib/rank0`` and ``idle_share/rank0``."""
        found: dict[str, float] = {}
        for rank, (pid, read) in sorted(self._ranks().items()):
            used_bytes = read.device_bytes or memory_of(pid)
            found[f"memory_gib/rank{rank}"] = used_bytes / 2**30
            before = self._before.get(rank)
            # A share of no step has no meaning: the time counts from the last record with fewer steps.
            if before is not None and read.steps <= before.steps:
                continue
            if before is not None:
                found[f"idle_share/rank{rank}"] = idle_share(time_breakdown.record_between(before, read, rank))
            self._before[rank] = read
        return found

    def _ranks(self) -> dict[int, tuple[int, TimeReading]]:
        found = {self._rank: (os.getpid(), current_record().pace.read())}
        names = os.listdir(self._folder) if self._folder else []
        # The name of a rank's file is its number.
        for name in filter(str.isdecimal, names):
            seen = read_glance(Path(self._folder, name))
            if seen is not None and seen.pace is not None:
                found[int(name)] = seen.pid, seen.pace
        return found
