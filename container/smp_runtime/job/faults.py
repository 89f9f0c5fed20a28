"""Faults on purpose, for drills: ``SMP_FAULTS="kill@rank=2,step=30,phase=backward;stop@rank=1"``.

What a job does when a rank dies, stops or loses its network is known only when it was tried. A fault happens once, where the
rank enters the phase of that step; a job without the variable has nothing of this.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_config import whereabouts
from smp_runtime.errors import ConfigError, SMPRuntimeError

if TYPE_CHECKING:
    from smp_runtime.comm.groups import ProcessGroups

logger = logging.getLogger("smp")

#: Faults of a job, separated by semicolons.
VARIABLE = "SMP_FAULTS"

_PHASES = (
    whereabouts.FORWARD,
    whereabouts.BACKWARD,
    whereabouts.REDUCTION,
    whereabouts.OPTIMIZER,
    whereabouts.SAVE,
    "between",
)

_KINDS = {
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

_NUMBERS = {"rank": int, "step": int, "seconds": float, "bytes": int}
_EXAMPLE = "kill@rank=2,step=30,phase=backward"


class InjectedFault(SMPRuntimeError):
    """What a fault of the kind ``raise`` raises."""


@dataclass
class Fault:
    """One fault.

    Attributes:
        kind: a key of the table above.
        rank: of the job; None for every rank.
        step: counted from 1.
        phase: empty for the step's begin.
        seconds: of a slow link's delay.
        size: bytes that a file may have when the disk is full.
    """

    kind: str
    rank: int | None = None
    step: int = 1
    phase: str = whereabouts.FORWARD
    seconds: float = 0.05
    size: int = 0
    is_over: bool = field(default=False, compare=False)


def parse(text: str) -> list[Fault]:
    """Read faults; raises ConfigError for words that mean none."""
    return [_one(words.strip()) for words in text.split(";") if words.strip()]


def _one(words: str) -> Fault:
    kind, _, rest = words.partition("@")
    if kind not in _KINDS:
        raise ConfigError(f"{VARIABLE}: {words!r} is of no kind among {', '.join(_KINDS)}; write it like {_EXAMPLE}")
    fault = Fault(kind)
    for pair in filter(None, (part.strip() for part in rest.split(","))):
        name, _, value = pair.partition("=")
        if name == "phase":
            if value not in _PHASES:
                raise ConfigError(f"{VARIABLE}: {pair!r} of {words!r} is no phase; use {', '.join(_PHASES)}")
            fault.phase = whereabouts.BETWEEN if value == "between" else value
            continue
        if name not in _NUMBERS:
            raise ConfigError(
                f"{VARIABLE}: {pair!r} of {words!r} is nothing that a fault has; use phase, {', '.join(_NUMBERS)}, as in {_EXAMPLE}"
            )
        try:
            number = _NUMBERS[name](value)
        except ValueError:
            number = -1
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{VARIABLE}: {pair!r} of {words!r} needs a number from 0")
        setattr(fault, "size" if name == "bytes" else name, number)
    return fault


class Injector:
    """Lets the faults of this rank happen as it enters their phases.

    Args:
        faults: of this rank.
        groups: whose connections are cut.
    """

    def __init__(self, faults: list[Fault], groups: ProcessGroups) -> None:
        self._faults = faults
        self._groups = groups
        self._delay = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int, groups: ProcessGroups) -> Injector | None:
        """The injector of this rank, where the job has faults for it; ConfigError for words that mean none."""
        faults = [fault for fault in parse(environ.get(VARIABLE, "")) if fault.rank in (None, rank)]
        return cls(faults, groups) if faults else None

    def entered(self, phase: str, step: int) -> None:
        """This rank enters a phase."""
        for fault in self._faults:
            if not fault.is_over and fault.phase == phase and fault.step == step:
                fault.is_over = True
                logger.warning("%s: in %s of step %d this rank %s", VARIABLE, phase, step, _KINDS[fault.kind])
                sys.stderr.flush()
                self._happen(fault)
        if self._delay:
            time.sleep(self._delay)

    def _happen(self, fault: Fault) -> None:
        kinds: dict[str, Callable[[], object]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "exit": lambda: os._exit(7),
            "hang": threading.Event().wait,
            "spin": _spin,
            "lose_connection": self._groups.cut_off,
            "slow_link": lambda: setattr(self, "_delay", fault.seconds),
            "disk_full": lambda: _limit_files(fault.size),
        }
        if fault.kind == "raise":
            raise InjectedFault(f"{VARIABLE} asked for it in {fault.phase} of step {fault.step}")
        kinds[fault.kind]()


def _spin() -> None:
    while True:
        pass


def _limit_files(size: int) -> None:
    """Every write beyond ``size`` bytes of a file fails, as on a full disk; the signal that comes with it is ignored."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
