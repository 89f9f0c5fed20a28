"""Records that ranks print in their output, one JSON object on a line behind a prefix.

They report the progress of the job, the resources that a rank has used when it ends, and why a rank failed.
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

#: The same for a pace record, which every rank prints now and then if it is configured to.
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
    """Parse the record behind ``prefix``, anywhere in the line; return None if it is no such record, or was cut."""
    _, found, text = line.partition(prefix)
    try:
        return kind.model_validate(json.loads(text)) if found else None
    except (ValueError, RecursionError):  # no JSON, no such record, too many digits, too deep
        return None


class ProgressRecord(BaseModel):
    """The progress of a job.

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
    """Return the record as one line of text, without the line break."""
    return PROGRESS_PREFIX + record.model_dump_json(exclude_none=True)


def parse_progress(line: str) -> ProgressRecord | None:
    """Parse a log line; return None if it is not a progress record (also if a launcher cut it)."""
    return _parsed(ProgressRecord, line, PROGRESS_PREFIX)


class UsageRecord(BaseModel):
    """The resources that a rank has used from ``smp.init()`` to its end.

    ``memory_bytes`` is its peak, as in a progress record; ``cpu_cores`` is processor time per second, threads and
    ended child processes included, so that 1.0 is one core that was always busy.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: _Count
    memory_bytes: _Count
    cpu_cores: _Finite | None = None


def format_usage(record: UsageRecord) -> str:
    """Return the record as one line of text, without the line break."""
    return USAGE_PREFIX + record.model_dump_json(exclude_none=True)


def parse_usage(line: str) -> UsageRecord | None:
    """Parse a log line; return None if it is not a usage record."""
    return _parsed(UsageRecord, line, USAGE_PREFIX)


class PaceRecord(BaseModel):
    """The times of a rank in a period of ``seconds``, in which it began ``steps`` steps.

    ``collectives`` are seconds in which it waited for the end of collectives, which is sending and waiting for others
    together. ``waiting`` are seconds without work in its pipeline and those of other waits. ``compute`` is the rank's own
    work in steps and updates, ``data`` the script's work between them, and ``saving`` is checkpoints.
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
    """Return the record as one line of text, without the line break."""
    return PACE_PREFIX + record.model_dump_json(exclude_none=True)


def parse_pace(line: str) -> PaceRecord | None:
    """Parse a log line; return None if it is not a pace record."""
    return _parsed(PaceRecord, line, PACE_PREFIX)


class FailureRecord(BaseModel):
    """The failure of a rank; ``when`` is seconds since the epoch, so that the first cause can be found.

    ``code`` is that of :mod:`smp_config.error_codes`, empty for errors of others.

    ``accused`` are the ranks that this one holds to be the cause, for example when a connection to them has ended.
    A report by one of them about itself counts more.
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
        """Return a record of ``error``, raised now on ``rank``.

        If the error stands for the failure of another rank, return that rank's record, which the error has.
        """
        told = getattr(error, "failure", None)
        if isinstance(told, cls):
            # If ranks have agreed that one has failed, all raise the same error at the same place of the script.
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
        """Return one line for people, as in ``rank 1 (algo-1): ValueError: boom``."""
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
    """Return the record as one line of at most 4,000 bytes.

    The traceback loses its beginning first, then the message its end.
    """
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
    """Return the largest number of characters that still fits. Characters differ in how many bytes they take."""
    return max(0, bisect.bisect_left(range(length + 1), True, key=lambda n: not fits(n)) - 1)


def parse_failure(line: str) -> FailureRecord | None:
    """Parse a line; return None if it is not a failure record."""
    return _parsed(FailureRecord, line, FAILURE_PREFIX)
