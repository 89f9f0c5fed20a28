"""The failure line: what a failing rank tells the launcher before it ends the job."""

from __future__ import annotations

import json
import time

from pydantic import BaseModel, ConfigDict, ValidationError

#: A line of this prefix on a rank's standard error is a failure record.
FAILURE_PREFIX = "smp-failure "

#: A line longer than a pipe's atomic write could be mixed with another rank's.
_LINE_BYTES = 4000


class FailureRecord(BaseModel):
    """Why a rank failed; ``when`` is seconds since the epoch, so that the first cause can be told."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: int
    host: str = ""
    error_type: str
    message: str
    traceback: str = ""
    when: float = 0.0

    @classmethod
    def of(cls, rank: int, host: str, error: BaseException, traceback: str) -> FailureRecord:
        """A record of ``error``, raised now on ``rank``."""
        return cls(
            rank=rank,
            host=host,
            error_type=type(error).__name__,
            message=str(error),
            traceback=traceback,
            when=time.time(),
        )

    def headline(self) -> str:
        """``rank 1 (algo-1): ValueError: boom``."""
        where = f" ({self.host})" if self.host else ""
        return f"rank {self.rank}{where}: {self.error_type}: {self.message}"


def format_failure(record: FailureRecord) -> str:
    """One line of at most 4,000 bytes; the traceback loses its oldest part first, then the message its end."""
    line = FAILURE_PREFIX + record.model_dump_json()
    if len(line.encode()) <= _LINE_BYTES:
        return line
    over = len(line.encode()) - _LINE_BYTES
    # JSON escapes can double a character, so cut generously and try again.
    if record.traceback:
        keep = max(0, len(record.traceback) - over - 64)
        return format_failure(record.model_copy(update={"traceback": record.traceback[-keep:] if keep else ""}))
    keep = max(0, min(len(record.message) - over - 64, len(record.message) // 2 + 512))
    return format_failure(record.model_copy(update={"message": record.message[:keep] + "…"}))


def parse_failure(line: str) -> FailureRecord | None:
    """Read a line; None when it is not a failure record."""
    at = line.find(FAILURE_PREFIX)
    if at < 0:
        return None
    try:
        return FailureRecord.model_validate(json.loads(line[at + len(FAILURE_PREFIX) :]))
    except (json.JSONDecodeError, ValidationError):
        return None
