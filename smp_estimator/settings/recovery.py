"""Arguments of an estimator about lost ranks, as the variables by which launcher and ranks read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_config.formats.values import is_integer
from smp_config.recovery import INTERVAL_VARIABLE, MEMORY_VARIABLE, MOST_RESTARTS, MOST_STEPS, RESTARTS_VARIABLE
from smp_estimator.settings.own_variables import with_variables
from smp_estimator.settings.variables import is_variable

#: The only key of ``memory_checkpoint={…}``.
_STEPS = "steps"


def with_recovery(environment: Any, memory_checkpoint: Any, max_restarts: Any) -> Any:
    """Return a job's environment with the variables of these arguments, or the same object if none was given.

    Args:
        memory_checkpoint: True, False, or ``{"steps": n}``; None if it was not given.
        max_restarts: how often the ranks are started again; None if it was not given.

    Raises:
        ConfigError: an invalid argument, or one that contradicts the environment.
    """
    wanted: dict[str, tuple[str, Any]] = {}
    if max_restarts is not None:
        wanted[RESTARTS_VARIABLE] = "max_restarts", _whole(max_restarts, "max_restarts", 0, MOST_RESTARTS)
    if memory_checkpoint is not None:
        is_on, steps = _memory(memory_checkpoint)
        wanted[MEMORY_VARIABLE] = "memory_checkpoint", "1" if is_on else "0"
        if steps is not None:
            wanted[INTERVAL_VARIABLE] = 'memory_checkpoint={"steps": …}', steps
    return with_variables(environment, wanted)


def _memory(given: Any) -> tuple[bool, Any]:
    """Return whether copies are kept, and the steps between two copies, or None for as often as it costs little."""
    if isinstance(given, bool):
        return given, None
    if isinstance(given, Mapping) and set(given) <= {_STEPS}:
        steps = given.get(_STEPS)
        return True, None if steps is None else _whole(steps, 'memory_checkpoint={"steps": …}', 1, MOST_STEPS)
    raise ConfigError(
        f"memory_checkpoint is {show_value(given)}; it says whether the state of the training is kept in shared memory: write "
        "True, "
        'False, or {"steps": 10} for a copy each ten steps',
        code="SMP106",
    )


def _whole(given: Any, name: str, least: int, most: int) -> Any:
    """Return an integer as text; a value that is known only when a pipeline runs is returned unchanged."""
    if is_variable(given):
        return given
    is_allowed = is_integer(given) and least <= given <= most
    if not is_allowed:
        raise ConfigError(f"{name} is {show_value(given)}; give a whole number from {least} to {most:,}", code="SMP106")
    return str(given)
