"""Jobs that run on this machine now, found by their ranks' environment; asked where they are without being disturbed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config.errors import ConfigError
from smp_launch.sagemaker.environment import JOB_NAME_VARIABLE
from smp_launch.watch.hang_timeout import HangTimeout
from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.verdict import HangVerdict, find
from smp_launch.watch.watch import HangWatch
from smp_records.rank_record import FOLDER_VARIABLE

if TYPE_CHECKING:
    from smp_launch.watch.position import RankPosition

#: Seconds without a sign of life after which a rank is reported as standing still, on request.
_STILL_SECONDS = 2.0


@dataclass(frozen=True)
class RunningJob:
    """A job of this user's on this machine.

    Attributes:
        name: name of the job; empty if it has none.
        folder: folder of its ranks' records.
    """

    name: str
    folder: Path


def running_jobs() -> list[RunningJob]:
    """Return all jobs with ranks that this user may look at, sorted by name."""
    found: dict[Path, RunningJob] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pairs = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        environ = dict(pair.decode("utf-8", "replace").partition("=")[::2] for pair in pairs if b"=" in pair)
        folder = environ.get(FOLDER_VARIABLE)
        if folder and os.path.isdir(folder):
            found[Path(folder)] = RunningJob(environ.get(JOB_NAME_VARIABLE, ""), Path(folder))
    return sorted(found.values(), key=lambda job: (job.name, str(job.folder)))


def find_running_job(name: str) -> RunningJob:
    """Return the running job with this name, or with a name that begins with it.

    If ``name`` is empty, there must be only one job.

    Raises:
        ConfigError: there is none, or there are several.
    """
    jobs = running_jobs()
    chosen = [job for job in jobs if job.name == name]
    if not chosen:
        chosen = [job for job in jobs if job.name.startswith(name)]
    if len(chosen) == 1:
        return chosen[0]
    named = f"{name!r} " if name else ""
    if not jobs:
        raise ConfigError(
            f"no job {named}of yours runs as processes of this machine: start one, or give its name", code="SMP205"
        )
    there = ", ".join(job.name or "one without a name" for job in jobs)
    if not chosen:
        raise ConfigError(
            f"no job {name!r} of yours runs as processes of this machine; there are: {there}", code="SMP205"
        )
    raise ConfigError(
        f"{len(chosen)} running jobs have names that begin with {name!r}; say which: {there}", code="SMP205"
    )


def positions_of(job: RunningJob) -> tuple[dict[int, RankPosition], HangVerdict | None]:
    """Return where each rank is now, and the verdict on those that stand still.

    The verdict is None if all ranks go on.
    """
    watch = HangWatch([LocalRanks(job.folder)], HangTimeout(given=_STILL_SECONDS))
    positions = watch.positions()
    still = watch.standing_still(positions)
    return positions, find(still, max(p.seconds for p in still.values())) if still else None
