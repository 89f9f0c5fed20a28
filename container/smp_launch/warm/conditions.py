"""Conditions that must be equal in two processes if one is to do the work of the other, read from the system."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

#: Fields of ``/proc/self/status``: permissions, signal masks, and the CPUs and memory nodes that the process may use.
_STATUS = frozenset(
    "Umask Uid Gid Groups SigBlk SigIgn NoNewPrivs Seccomp CapInh CapEff CapBnd Cpus_allowed Mems_allowed".split()
)

#: Files of ``/proc/self`` that count whole.
_FILES = ("limits", "cgroup", "personality", "oom_score_adj")

#: Variables that differ between ranks or starts and are read after the imports: MPI's, and those of this launcher.
_FREE_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_MCA_", "OMPI_FILE_", "OMPI_ARGV", "PMIX_", "PRTE_", "PMI_")
_FREE = frozenset(
    """_ OLDPWD MASTER_PORT SMP_JOB_SECRET SMP_LAUNCH_LAYOUT SMP_LAUNCH_REPORTS SMP_LAUNCH_SURROUNDINGS SMP_LAUNCH_WARM
    SMP_PARAMETERS_OF_NOW SMP_READERS_AT_START SMP_RESTART_COUNT SMP_WHEREABOUTS""".split()
)


def read_conditions() -> dict[str, str]:
    """Return the conditions of this process: limits, rights, signals, cores, namespaces, and the interpreter.

    Raises:
        OSError: the system does not report them.
    """
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[name] = value.strip()
    found |= {name: Path("/proc/self", name).read_text(encoding="utf-8") for name in _FILES}
    found |= {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))}
    found |= {"root": os.readlink("/proc/self/root"), "interpreter": f"{sys.executable} {sys.version} {sys.flags}"}
    return {**found, "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}"}


def other_condition(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the name of a condition in which two processes differ, or None if they are alike."""
    return next((name for name in sorted({*one, *other}) if one.get(name) != other.get(name)), None)


def other_variable(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Return the name of a variable that differs between two environments, or None if there is none.

    Only variables that imports may have read count.
    """
    for name in sorted({*one, *other} - _FREE):
        if name.startswith(_FREE_PREFIXES):
            continue
        if one.get(name) != other.get(name):
            return name
    return None
