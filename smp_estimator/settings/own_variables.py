"""Arguments of an estimator that travel as variables of the job's environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_config import ConfigError
from smp_estimator.settings.checks import require_mapping
from smp_estimator.settings.variables import is_variable


def with_variables(environment: Any, wanted: Mapping[str, tuple[str, Any]]) -> Any:
    """Return a job's environment with variables that represent arguments, or the same object if there are none.

    Args:
        wanted: by variable, the argument that it represents, for messages, and its value.

    Raises:
        ConfigError: the environment has a different value.
    """
    if not wanted:
        return environment
    require_mapping(environment, "environment")
    made: dict[str, Any] = dict(environment or {})
    for name, (argument, value) in wanted.items():
        if name in made and not _are_equal(made[name], value):
            raise ConfigError(
                f"{argument} says {name}={value}, and environment has {name}={made[name]}; both mean the same setting: remove one",
                code="SMP103",
            )
        made[name] = value
    return made


def _are_equal(given: Any, wanted: Any) -> bool:
    # Only a run knows the value of a variable of a pipeline, so that it equals nothing.
    if is_variable(given) or is_variable(wanted):
        return False
    return str(given) == str(wanted)
