"""The time that the ranks of this machine spend on each activity, read from their records without disturbing them."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.machine.processes import memory_of, processor_seconds_of
from smp_records.rank_record import read_glance
from smp_records.time_breakdown import record_between

if TYPE_CHECKING:
    from smp_records.records import PaceRecord
    from smp_records.time_breakdown import TimeReading

#: Seconds for an answer of the driver's program.
_GPU_SECONDS = 5.0


@dataclass(frozen=True)
class Seen:
    """A rank at one moment.

    Attributes:
        processor_seconds: processor time of its process.
        memory_bytes: resident memory, or memory on its GPU if it has one.
    """

    pid: int
    reading: TimeReading
    processor_seconds: float
    memory_bytes: int


def read_records(folder: Path) -> dict[int, Seen]:
    """Return, by rank, the ranks that keep records in a folder and are in their job."""
    if not folder.is_dir():
        return {}
    found = {}
    for name in sorted(filter(str.isdecimal, os.listdir(folder)), key=int):
        glance = read_glance(folder / name)
        if glance is None or glance.pace is None or glance.has_left:
            continue
        # The record of a rank that was killed stays.
        if not os.path.isdir(f"/proc/{glance.pid}"):
            continue
        memory = glance.pace.device_bytes or memory_of(glance.pid)
        found[int(name)] = Seen(glance.pid, glance.pace, processor_seconds_of(glance.pid), memory)
    return found


def compare_records(before: dict[int, Seen], after: dict[int, Seen]) -> list[PaceRecord]:
    """Return a record of each rank's work between two looks, without ranks that were started again meanwhile."""
    gpus = gpu_shares({seen.pid for seen in after.values() if seen.reading.device_bytes})
    records = []
    for rank, seen in after.items():
        former = before.get(rank)
        if former is None or former.pid != seen.pid:
            continue
        record = record_between(former.reading, seen.reading, rank)
        used = seen.processor_seconds - former.processor_seconds
        more = {
            "memory_bytes": seen.memory_bytes,
            "cpu_cores": max(0.0, used) / record.seconds if record.seconds else None,
            "gpu_share": gpus.get(seen.pid),
        }
        records.append(record.model_copy(update=more))
    return records


def gpu_shares(pids: Collection[int]) -> dict[int, float]:
    """Return how much of the last moments each process's GPU was busy; empty if the driver's program is missing."""
    if not pids:
        return {}
    busy = {}
    for uuid, share in _asked("--query-gpu=uuid,utilization.gpu"):
        if share.isdigit():
            busy[uuid] = int(share) / 100
    using = {}
    for pid, uuid in _asked("--query-compute-apps=pid,gpu_uuid"):
        if pid.isdigit():
            using[int(pid)] = uuid
    return {pid: busy[using[pid]] for pid in pids if using.get(pid) in busy}


def _asked(query: str) -> Iterator[tuple[str, str]]:
    try:
        # With a deadline: the tool of a broken driver may never return.
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        if len(row) == 2:
            yield row[0].strip(), row[1].strip()
