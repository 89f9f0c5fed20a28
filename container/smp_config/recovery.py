"""Settings of a job's recovery: how often its ranks are restarted, and where their state is kept meanwhile.

The launcher reads some of them and passes the rest to the ranks; both sides import the names from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from smp_config.errors import ConfigError, show_value

#: How often the ranks of a job are started again after a failure; nothing or 0 for never.
RESTARTS_VARIABLE = "SMP_MAX_RESTARTS"
#: More would hide a job that never goes on.
MOST_RESTARTS = 10_000

#: Set in each rank: how often the job's ranks were started before.
COUNT_VARIABLE = "SMP_RESTART_COUNT"

#: ``1`` keeps the state of the training in shared memory; see ``docs/recovery.md``.
MEMORY_VARIABLE = "SMP_MEMORY_CHECKPOINT"
#: Steps between two copies; nothing for as often as it costs little.
INTERVAL_VARIABLE = "SMP_MEMORY_CHECKPOINT_STEPS"
MOST_STEPS = 1_000_000

#: Set in each rank: the folder of its host's shared memory for the job's state; the launcher makes and removes it.
FOLDER_VARIABLE = "SMP_MEMORY_FOLDER"

#: How many of a job's hosts, the last ones, have no ranks until another host is lost.
SPARES_VARIABLE = "SMP_SPARE_HOSTS"

#: Set in each rank if a job goes on with fewer ranks than it began with: the current ``mp_parameters``, as JSON.
PARAMETERS_VARIABLE = "SMP_PARAMETERS_OF_NOW"
#: Set in each rank if a job goes on with fewer ranks: how many ranks divided a batch when the job began.
READERS_VARIABLE = "SMP_READERS_AT_START"

#: Linux's folder of files that lie in memory.
SHARED_MEMORY = Path("/dev/shm")


def max_restarts(environ: Mapping[str, str]) -> int:
    """Return how often ranks may be restarted; raise ConfigError for an invalid number."""
    return _count(environ, RESTARTS_VARIABLE, "how often the ranks are started again after a failure", 0, MOST_RESTARTS)


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often the ranks of this job were started before this start."""
    text = environ.get(COUNT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def spare_hosts(environ: Mapping[str, str], hosts: int) -> int:
    """Return how many of a job's ``hosts`` are spare; raise ConfigError for an invalid number."""
    return _count(environ, SPARES_VARIABLE, f"how many of the job's {hosts} host(s) wait as spares", 0, hosts - 1)


def readers_at_start(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks that batches were divided among when the job began.

    Returns:
        None if the job has as many ranks as then.
    """
    text = environ.get(READERS_VARIABLE, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def interval_steps(environ: Mapping[str, str]) -> int | None:
    """Return the user's number of steps between two copies of the state; None if it is not set.

    Raises:
        ConfigError: If it is not a valid number.
    """
    if not environ.get(INTERVAL_VARIABLE):
        return None
    return _count(
        environ, INTERVAL_VARIABLE, "the steps from one copy of the state in memory to the next", 1, MOST_STEPS
    )


def wants_memory(environ: Mapping[str, str]) -> bool:
    """Return whether a job keeps its state in memory; raise ConfigError for anything but 0 and 1."""
    text = environ.get(MEMORY_VARIABLE, "") or "0"
    if text not in ("0", "1"):
        raise ConfigError(
            f"{MEMORY_VARIABLE} is {show_value(text)}; it says whether the state of the training is kept in shared memory: "
            "set 1, or 0 "
            "for no",
            code="SMP106",
        )
    interval_steps(environ)
    return text == "1"


def _count(environ: Mapping[str, str], name: str, what: str, least: int, most: int) -> int:
    text = environ.get(name, "") or str(least)
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value <= most:
        raise ConfigError(
            f"{name} is {show_value(text)}; it says {what}: set a whole number from {least} to {most:,}", code="SMP106"
        )
    return value
