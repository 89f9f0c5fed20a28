"""The argument of an estimator about recorded numbers, as the variables by which ranks read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_estimator.settings.own_variables import with_variables
from smp_estimator.settings.variables import is_variable
from smp_records.numerics import EVERY_VARIABLE, GUARDS_VARIABLE, MOST_EVERY, VARIABLE, Guards

_EVERY, _GUARDS = "every", "guards"
_VARIABLES = (VARIABLE, EVERY_VARIABLE, GUARDS_VARIABLE)


def with_numerics(environment: Any, record_numerics: Any) -> Any:
    """Return a job's environment with the variables of ``record_numerics``, or the same object if it was not given.

    Args:
        record_numerics: True, False, or a dictionary of ``"every"`` (updates from one recorded step to the next) and ``"guards"``
            (the check before each update); None if it was not given. Ranks record into ``numerics`` in the job's output.

    Raises:
        ConfigError: an invalid argument, or one that contradicts the environment.
    """
    if record_numerics is None:
        return environment
    if isinstance(record_numerics, bool):
        return with_variables(environment, {VARIABLE: ("record_numerics", "1" if record_numerics else "0")})
    if not isinstance(record_numerics, Mapping) or not set(record_numerics) <= {_EVERY, _GUARDS}:
        raise ConfigError(
            f"record_numerics is {show_value(record_numerics)}; it says whether ranks record what tells trainings apart: "
            "write True, "
            'False, or {"every": 100, "guards": "finite"}',
            code="SMP103",
        )
    wanted: dict[str, tuple[str, Any]] = {VARIABLE: ("record_numerics", "1")}
    every, guards = record_numerics.get(_EVERY), record_numerics.get(_GUARDS)
    if every is not None:
        if not is_variable(every) and (
            isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= MOST_EVERY
        ):
            raise ConfigError(
                f'record_numerics={{"every": …}} is {show_value(every)}; it is the number of updates between recorded steps: give '
                f"a whole number from 1 to {MOST_EVERY:,}",
                code="SMP103",
            )
        wanted[EVERY_VARIABLE] = 'record_numerics={"every": …}', every if is_variable(every) else str(every)
    if guards is not None:
        if not is_variable(guards):
            Guards.of(guards if isinstance(guards, str) else show_value(guards))
        wanted[GUARDS_VARIABLE] = 'record_numerics={"guards": …}', guards
    return with_variables(environment, wanted)


def with_other_numerics(environment: Any, record_numerics: Any) -> Any:
    """Return a job's environment with ``record_numerics`` in place of its own variables for recorded numbers."""
    others = {name: value for name, value in (environment or {}).items() if name not in _VARIABLES}
    return with_numerics(others, record_numerics)
