"""Fault injection for drills: a fault happens when its rank enters a phase of its step.

How a job behaves when a rank dies, stops or loses its network is known only once it has been tried. A job without
``SMP_FAULTS`` has no injector.
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
    """The error of a fault of the kind ``raise``."""

    code = "SMP507"


class Injector:
    """The injector of a rank's faults, each of them when the rank enters the fault's phase.

    Args:
        faults: the faults of this rank.
        groups: the process groups that lose their connections.
    """

    def __init__(self, faults: list[Fault], groups: ProcessGroups) -> None:
        self._faults = faults
        self._groups = groups
        self._delay = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], rank: int, groups: ProcessGroups) -> Injector | None:
        """Return the injector of this rank, or None if the job has no faults for it.

        Raises:
            ConfigError: the variable does not describe faults.
        """
        start = restart_count(environ)
        faults = parse(environ.get(VARIABLE, ""))
        faults = [fault for fault in faults if fault.rank in (None, rank) and fault.restart == start]
        return cls(faults, groups) if faults else None

    def entered(self, phase: str, step: int) -> None:
        """Trigger the faults of a phase that this rank enters."""
        due = [fault for fault in self._faults if fault.phase == phase and fault.step == step]
        for fault in due:
            if fault.is_over:
                continue
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
    """Make every write beyond ``size`` bytes of a file fail, as on a full disk, and ignore its signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
