"""The progress line: one JSON object that rank 0 prints and ``fit()`` reads, wherever the job runs."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict, ValidationError

#: A log line of this prefix is a progress record.
PROGRESS_PREFIX = "smp-progress "


class ProgressRecord(BaseModel):
    """How far a job is.

    ``samples_per_second`` counts samples of the global batch; ``memory_bytes`` is the peak of rank 0 (device
    memory on GPU, resident memory on CPU).
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    samples_per_second: float | None = None
    elapsed_seconds: float | None = None
    memory_bytes: int | None = None


def format_progress(record: ProgressRecord) -> str:
    """One line of text, without the line break."""
    return PROGRESS_PREFIX + record.model_dump_json(exclude_none=True)


def parse_progress(line: str) -> ProgressRecord | None:
    """Read a log line; None when it is not a progress record (also when a launcher cut it)."""
    at = line.find(PROGRESS_PREFIX)
    if at < 0:
        return None
    try:
        return ProgressRecord.model_validate(json.loads(line[at + len(PROGRESS_PREFIX) :]))
    except (json.JSONDecodeError, ValidationError):
        return None
