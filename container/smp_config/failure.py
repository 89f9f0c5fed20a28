"""The failure line: what a failing rank tells the launcher before it ends the job."""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable

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
        """A record of ``error``, raised now on ``rank``, unless it stands for that of another rank, whose record it has."""
        told = getattr(error, "failure", None)
        if isinstance(told, cls):
            return told
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
    """One line of at most 4,000 bytes: the traceback loses its beginning first, then the message its end."""
    trace, message = record.traceback, record.message
    if not _fits(record):
        kept = _most(len(trace), lambda n: _fits(record.model_copy(update={"traceback": trace[len(trace) - n :]})))
        record = record.model_copy(update={"traceback": trace[len(trace) - kept :]})
    if not _fits(record):
        kept = _most(len(message), lambda n: _fits(record.model_copy(update={"message": message[:n] + "…"})))
        record = record.model_copy(update={"message": message[:kept] + "…"})
    return _line(record)


def _line(record: FailureRecord) -> str:
    return FAILURE_PREFIX + record.model_dump_json()


def _fits(record: FailureRecord) -> bool:
    return len(_line(record).encode()) <= _LINE_BYTES


def _most(length: int, fits: Callable[[int], bool]) -> int:
    """The most characters that still fit; characters differ in how many bytes they take."""
    return max(0, bisect.bisect_left(range(length + 1), True, key=lambda n: not fits(n)) - 1)


def parse_failure(line: str) -> FailureRecord | None:
    """Read a line; None when it is not a failure record."""
    at = line.find(FAILURE_PREFIX)
    if at < 0:
        return None
    try:
        return FailureRecord.model_validate(json.loads(line[at + len(FAILURE_PREFIX) :]))
    except (json.JSONDecodeError, ValidationError):
        return None
