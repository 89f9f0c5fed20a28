"""Faults on purpose, for drills, from ``SMP_FAULTS="kill@rank=2,step=30,phase=backward;stop@rank=1"``."""

from __future__ import annotations

from dataclasses import dataclass, field

from smp_config.errors import ConfigError
from smp_records import rank_record

#: Faults of a job, separated by semicolons.
VARIABLE = "SMP_FAULTS"

#: Moments of a step in which a fault may happen.
_PHASES = (
    rank_record.FORWARD,
    rank_record.BACKWARD,
    rank_record.REDUCTION,
    rank_record.OPTIMIZER,
    rank_record.SAVE,
    "between",
)

KINDS = {
    "raise": "raises InjectedFault",
    "kill": "kills itself with SIGKILL",
    "stop": "stops itself with SIGSTOP",
    "exit": "ends with exit code 7, without a word",
    "hang": "sleeps in the script's own thread, for ever",
    "spin": "computes in the script's own thread, for ever",
    "lose_connection": "cuts its connections to all other ranks",
    "slow_link": "sends after `seconds`, in this phase and from then on",
    "disk_full": "may write no file beyond `bytes` from then on",
}

_NUMBERS = {"rank": int, "step": int, "restart": int, "seconds": float, "bytes": int}

#: Shown in error messages.
_EXAMPLE = "kill@rank=2,step=30,phase=backward"


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: a key of the table above.
        rank: of the job; None for every rank.
        step: counted from 1.
        phase: empty for the step's begin.
        restart: how often the job's ranks were started before: a fault happens in one of the starts.
        seconds: of a slow link's delay.
        size: bytes that a file may have when the disk is full.
    """

    kind: str
    rank: int | None = None
    step: int = 1
    phase: str = rank_record.FORWARD
    restart: int = 0
    seconds: float = 0.05
    size: int = 0
    is_over: bool = field(default=False, compare=False)


def parse(text: str) -> list[Fault]:
    """Parse faults.

    Raises:
        ConfigError: some words mean no fault.
    """
    return [_one(words.strip()) for words in text.split(";") if words.strip()]


def _one(words: str) -> Fault:
    kind, _, rest = words.partition("@")
    if kind not in KINDS:
        raise ConfigError(
            f"{VARIABLE}: {words!r} is of no kind among {', '.join(KINDS)}; write it like {_EXAMPLE}", code="SMP106"
        )
    fault = Fault(kind)
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        name, _, value = pair.partition("=")
        if name == "phase":
            if value not in _PHASES:
                raise ConfigError(
                    f"{VARIABLE}: {pair!r} of {words!r} is no phase; use {', '.join(_PHASES)}", code="SMP106"
                )
            fault.phase = rank_record.BETWEEN if value == "between" else value
            continue
        if name not in _NUMBERS:
            raise ConfigError(
                f"{VARIABLE}: {pair!r} of {words!r} is nothing that a fault has; use phase, {', '.join(_NUMBERS)}, "
                f"as in {_EXAMPLE}",
                code="SMP106",
            )
        try:
            number = _NUMBERS[name](value)
        except ValueError:
            number = -1
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{VARIABLE}: {pair!r} of {words!r} needs a number from 0", code="SMP106")
        setattr(fault, "size" if name == "bytes" else name, number)
    return fault
