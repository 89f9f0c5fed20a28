"""What ranks tell in their output, one JSON object on a line behind a prefix.

How far the job is, what a rank has used when it ends, and why one failed.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from smp_config.error_codes import code_of

#: A log line of this prefix is a progress record, which rank 0 prints and ``fit()`` reads, wherever the job runs.
PROGRESS_PREFIX = "smp-progress "

#: The same for a pace record, which every rank prints now and then where it is asked to.
PACE_PREFIX = "smp-pace "

#: The same for a usage record, which every rank prints when it leaves the job.
USAGE_PREFIX = "smp-usage "

#: A line of this prefix on a rank's standard error is a failure record, for the launcher.
FAILURE_PREFIX = "smp-failure "

#: First characters of ``/opt/ml/output/failure`` that become the job's ``FailureReason``; the platform's limit.
FAILURE_CHARACTERS = 1024

#: A line longer than a pipe's atomic write could be mixed with another rank's.
_LINE_BYTES = 4000


_Record = TypeVar("_Record", bound=BaseModel)

#: A count that others compute with; whatever a script prints behind the prefix, no larger one is taken for a record.
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _parsed(kind: type[_Record], line: str, prefix: str) -> _Record | None:
    """What stands behind ``prefix``, wherever that is in the line; None when it is no such record, or was cut."""
    _, found, text = line.partition(prefix)
    try:
        return kind.model_validate(json.loads(text)) if found else None
    except (ValueError, RecursionError):  # no JSON, no such record, too many digits, too deep
        return None


class ProgressRecord(BaseModel):
    """How far a job is.

    ``samples_per_second`` counts samples of the global batch; ``memory_bytes`` is the peak of rank 0 (device
    memory on GPU, resident memory on CPU).
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: _Count
    total_steps: _Count | None = None
    loss: float | None = None
    eval_loss: float | None = None
    samples_per_second: _Finite | None = None
    elapsed_seconds: _Finite | None = None
    memory_bytes: _Count | None = None
    learning_rate: _Finite | None = None
    gradient_norm: float | None = None
    loss_scale: _Finite | None = None
    tokens_per_second: _Finite | None = None
    mfu: _Finite | None = None
    idle_share: _Finite | None = None
    checkpoint_seconds: _Finite | None = None
    values: dict[str, float] | None = None


def format_progress(record: ProgressRecord) -> str:
    """One line of text, without the line break."""
    return PROGRESS_PREFIX + record.model_dump_json(exclude_none=True)


def parse_progress(line: str) -> ProgressRecord | None:
    """Read a log line; None when it is not a progress record (also when a launcher cut it)."""
    return _parsed(ProgressRecord, line, PROGRESS_PREFIX)


class UsageRecord(BaseModel):
    """What a rank has used from ``smp.init()`` to its end.

    ``memory_bytes`` is its peak, as in a progress record; ``cpu_cores`` is processor time per second, threads and
    ended child processes included, so that 1.0 is one core that was always busy.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: _Count
    memory_bytes: _Count
    cpu_cores: _Finite | None = None


def format_usage(record: UsageRecord) -> str:
    """One line of text, without the line break."""
    return USAGE_PREFIX + record.model_dump_json(exclude_none=True)


def parse_usage(line: str) -> UsageRecord | None:
    """Read a log line; None when it is not a usage record."""
    return _parsed(UsageRecord, line, USAGE_PREFIX)


class PaceRecord(BaseModel):
    """What a rank spent ``seconds`` on, in which it began ``steps`` steps.

    ``collectives`` are seconds in which it waited for the end of collectives, which is sending and waiting for others together;
    ``waiting`` those without work in its pipeline and those of other waits. ``compute`` is what it did itself in steps and updates,
    ``data`` what the script did between them, ``saving`` is checkpoints.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: _Count
    stage: _Count = 0
    host: str = ""
    step: _Count
    steps: _Count
    seconds: _Seconds
    compute: _Seconds
    collectives: _Seconds
    waiting: _Seconds
    data: _Seconds
    saving: _Seconds
    memory_bytes: _Count | None = None
    cpu_cores: _Finite | None = None
    gpu_share: _Finite | None = None


def format_pace(record: PaceRecord) -> str:
    """One line of text, without the line break."""
    return PACE_PREFIX + record.model_dump_json(exclude_none=True)


def parse_pace(line: str) -> PaceRecord | None:
    """Read a log line; None when it is not a pace record."""
    return _parsed(PaceRecord, line, PACE_PREFIX)


class FailureRecord(BaseModel):
    """Why a rank failed; ``when`` is seconds since the epoch, so that the first cause can be told.

    ``code`` is that of :mod:`smp_config.error_codes`, empty for errors of others.

    ``accused`` are ranks that this one holds to be the cause, as when a connection to them has ended: what one of them tells
    itself counts more.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: _Count
    host: str = ""
    error_type: str
    message: str
    traceback: str = ""
    when: _Finite = 0.0
    accused: tuple[int, ...] = ()
    code: str = ""

    @classmethod
    def of(cls, rank: int, host: str, error: BaseException, traceback: str) -> FailureRecord:
        """A record of ``error``, raised now on ``rank``, unless it stands for that of another rank, whose record it has."""
        told = getattr(error, "failure", None)
        if isinstance(told, cls):
            # Where ranks have agreed that one has failed, all raise the same, at the same place of the script.
            return told if told.traceback else told.model_copy(update={"traceback": traceback})
        return cls(
            rank=rank,
            host=host,
            error_type=_writable(type(error).__name__),
            message=text_of(error),
            traceback=_writable(traceback),
            when=time.time(),
            accused=tuple(getattr(error, "accused", ())),
            code=code_of(error) or "",
        )

    def headline(self) -> str:
        """``rank 1 (algo-1): ValueError: boom``."""
        where = f" ({self.host})" if self.host else ""
        return f"rank {self.rank}{where}: {self.error_type}: {self.message}"


def text_of(error: BaseException) -> str:
    """Return the text of an error, as it can be written: half characters are escaped, and its own ``__str__`` may fail."""
    try:
        return _writable(str(error))
    except Exception as second:  # of the script's class
        return f"(its text cannot be told: __str__ of {type(error).__name__} raised {type(second).__name__})"


def _writable(text: str) -> str:
    """Escape lone surrogates, which no encoding has."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
    return _parsed(FailureRecord, line, FAILURE_PREFIX)
