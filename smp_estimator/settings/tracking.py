"""The arguments of an estimator about trackers and profiles, as the variables by which ranks read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_config import ConfigError
from smp_config.errors import show_value
from smp_estimator.settings.own_variables import with_variables
from smp_estimator.settings.variables import is_variable
from smp_records.profiling import VARIABLE as PROFILE_VARIABLE
from smp_records.profiling import Profile
from smp_records.tracking import LOGGERS_VARIABLE, loggers_of

_FLAGS = ("memory", "shapes", "stacks")


def with_tracking(environment: Any, loggers: Any, profile: Any) -> Any:
    """Return a job's environment with the variables of ``loggers`` and ``profile``, or the same object if neither was given.

    Args:
        loggers: names of trackers, as a list or as text with commas.
        profile: which steps PyTorch's profiler records: text as in ``SMP_PROFILE``, or a dictionary such as
            ``{"steps": (10, 12), "memory": True}``.

    Raises:
        ConfigError: an invalid argument, or one that contradicts the environment.
    """
    wanted: dict[str, tuple[str, Any]] = {}
    if loggers is not None:
        wanted[LOGGERS_VARIABLE] = "loggers", _loggers(loggers)
    if profile is not None:
        wanted[PROFILE_VARIABLE] = "profile", _profile(profile)
    return with_variables(environment, wanted)


def _loggers(given: Any) -> Any:
    if is_variable(given):
        return given
    if isinstance(given, str):
        text = given
    elif isinstance(given, list | tuple) and all(isinstance(name, str) for name in given):
        text = ",".join(given)
    else:
        raise ConfigError(
            f'loggers is {show_value(given)}; it names the trackers that get the numbers of the training: write ["tensorboard"] or '
            '"tensorboard,mlflow"',
            code="SMP103",
        )
    loggers_of({LOGGERS_VARIABLE: text})
    return text


def _profile(given: Any) -> Any:
    if is_variable(given):
        return given
    text = given if isinstance(given, str) else _words(given)
    Profile.of({PROFILE_VARIABLE: text})
    return text


def _words(given: Any) -> str:
    known = {"steps", "ranks", *_FLAGS}
    if not isinstance(given, Mapping) or not set(given) <= known or "steps" not in given:
        raise ConfigError(
            f"profile is {show_value(given)}; it says which steps PyTorch's profiler records: write "
            '{"steps": (10, 12), "memory": True} with any of memory, shapes, stacks and ranks',
            code="SMP103",
        )
    words = [f"steps={_joined(given['steps'], '-')}"]
    words += [flag for flag in _FLAGS if given.get(flag)]
    ranks = given.get("ranks", ())
    if ranks:
        words.append(f"ranks={_joined(ranks, '/')}")
    return ",".join(words)


def _joined(numbers: Any, sign: str) -> str:
    if isinstance(numbers, list | tuple):
        return sign.join(map(str, numbers))
    return str(numbers)
