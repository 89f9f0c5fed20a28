"""Faults on purpose, for drills: they happen where the rank enters a phase of its step.

What a job does when a rank dies, stops or loses its network is known only when it was tried. A job without ``SMP_FAULTS`` has
nothing of this.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from smp_config.recovery import restart_count
from smp_records.faults import KINDS, VARIABLE, Fault, parse
from smp_runtime.errors import SMPRuntimeError

if TYPE_CHECKING:
    from smp_runtime.comm.groups import ProcessGroups

logger = logging.getLogger("smp")


class InjectedFault(SMPRuntimeError):
    """What a fault of the kind ``raise`` raises."""


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
        start = restart_count(environ)
        faults = parse(environ.get(VARIABLE, ""))
        faults = [fault for fault in faults if fault.rank in (None, rank) and fault.restart == start]
        return cls(faults, groups) if faults else None

    def entered(self, phase: str, step: int) -> None:
        """This rank enters a phase."""
        for fault in self._faults:
            if not fault.is_over and fault.phase == phase and fault.step == step:
                fault.is_over = True
                logger.warning("%s: in %s of step %d this rank %s", VARIABLE, phase, step, KINDS[fault.kind])
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
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
