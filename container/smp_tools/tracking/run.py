"""The description of a job for trackers, before its first point: its name, its settings, and its output folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smp_config import Group
from smp_config.formats.secrets import shown_value
from smp_records.tracking import FOLDER_VARIABLE

if TYPE_CHECKING:
    from smp_runtime.job.ranks import Ranks

#: Names the job on the platform; and the project of all runs.
_NAME_VARIABLE = "TRAINING_JOB_NAME"
_PROJECT = "smp"


@dataclass(frozen=True)
class TrackedRun:
    """A job, as trackers see it.

    Attributes:
        folder: for files of trackers that have no server of their own; may not exist yet.
        name: empty where the job has none.
        project: what runs are listed under.
        settings: hyperparameters and degrees, as text, without secrets.
    """

    folder: Path
    name: str
    project: str
    settings: Mapping[str, str]

    @classmethod
    def of(cls, ranks: Ranks, environ: Mapping[str, str]) -> TrackedRun:
        """Return the description of this job."""
        folder = environ.get(FOLDER_VARIABLE) or Path(environ.get("SM_OUTPUT_DATA_DIR", "."), "tracking")
        degrees = {
            "processes": ranks.size(Group.WORLD),
            "pipeline": ranks.size(Group.PP),
            "tensor": ranks.size(Group.TP),
            "replicas": ranks.size(Group.BATCH_RDP),
            "context": ranks.size(Group.CONTEXT),
            "sharded": ranks.size(Group.SHARD),
            "microbatches": ranks.cfg.microbatches,
        }
        settings = {**_hyperparameters(environ), **{f"smp.{name}": str(size) for name, size in degrees.items()}}
        return cls(Path(folder), environ.get(_NAME_VARIABLE, ""), _PROJECT, settings)


def _hyperparameters(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        found = json.loads(environ.get("SM_HPS", "{}"))
    except json.JSONDecodeError:
        return {}  # a tracker must not end a job
    if not isinstance(found, dict):
        return {}
    return {str(name): shown_value(str(name), value) for name, value in found.items() if name != "mp_parameters"}
