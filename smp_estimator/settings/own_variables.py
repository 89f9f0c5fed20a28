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
    given: Mapping[str, Any] = environment or {}
    for name, (argument, value) in wanted.items():
        # Variables of a pipeline compare as what they stand for, which nobody knows yet.
        if name in given and (is_variable(given[name]) or is_variable(value) or str(given[name]) != str(value)):
            raise ConfigError(
                f"{argument} says {name}={value}, and environment has {name}={given[name]}; both mean the same setting: remove one"
            )
    return {**given, **{name: value for name, (_, value) in wanted.items()}}
