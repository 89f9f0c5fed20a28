"""Arguments that are handed on as they are: plain values of a sensible size, which Python, JSON and programs can write out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smp_config import ConfigError
from smp_config.errors import kind_of, show_value
from smp_config.formats import strict_json
from smp_config.formats.secrets import masked_text, shown_value
from smp_config.job import CARRIED
from smp_estimator.settings.variables import is_variable

#: Digits that Python writes out and reads in a whole number.
_MOST_DIGITS = 4300


def require_plain(value: Any, name: str) -> None:
    """Check an argument of dictionaries and lists before anything else reads it.

    Args:
        name: of the argument, for messages.

    Raises:
        ConfigError: it holds itself or is nested too deeply, a whole number that nothing can write out, or a text that no
            program can be given.
    """
    waiting: list[tuple[str, int, Any]] = [(name, 0, value)]
    while waiting:
        place, level, part = waiting.pop()
        if level > strict_json.MOST_LEVELS:
            raise ConfigError(
                f"{place[:200]} is nested more than {strict_json.MOST_LEVELS} levels deep; it was given as {name}, of which no "
                "part has more than ten: take out what holds itself, or the levels",
                code="SMP123",
            )
        if isinstance(part, str):
            if why := strict_json.why_unusable(part):
                raise ConfigError(
                    f"{place} {why}; it begins with {masked_text(repr(part[:60]))} and is handed to programs, which cannot be "
                    "given such a text: remove that character",
                    code="SMP123",
                )
        elif isinstance(part, int) and part.bit_length() > _MOST_DIGITS * 3:
            raise ConfigError(
                f"{place} is a whole number of {part.bit_length()} bits; it travels as text, and Python writes out no more than "
                f"{_MOST_DIGITS:,} digits: give a smaller number, or text",
                code="SMP123",
            )
        elif isinstance(part, Mapping):
            for key, inner in part.items():
                waiting.append((f"a name in {place}", level + 1, key))
                waiting.append((f"{place}[{show_value(key)}]", level + 1, inner))
        elif isinstance(part, list | tuple):
            waiting.extend((f"{place}[{number}]", level + 1, inner) for number, inner in enumerate(part))


def check_hyperparameters(hyperparameters: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming it, for a hyperparameter that would not reach the script as it was given."""
    for name, value in hyperparameters.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(
                f"a hyperparameter is called {show_value(name)}; its name becomes a word of the command line and part of a "
                "variable's "
                "name: give it text that is not empty and has no '='",
                code="SMP123",
            )
        if is_variable(value):
            continue
        require_plain({name: value}, "hyperparameters")
        try:
            strict_json.parse(json.dumps(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"hyperparameter {name!r} is {shown_value(name, value)}, {kind_of(value)}; hyperparameters are sent as "
                f"JSON and this one cannot be ({error}): convert it, for example with str() or float()",
                code="SMP123",
            ) from None


def refuse_carried(hyperparameters: Mapping[str, Any]) -> None:
    """Raise ConfigError for hyperparameters that ``distribution`` becomes, which would be overwritten without a word."""
    for name in hyperparameters:
        if name in CARRIED:
            raise ConfigError(
                f"hyperparameters has {name!r}, which is written from distribution and would replace it: give in distribution what "
                "it should say, and remove it from hyperparameters",
                code="SMP123",
            )


def check_variables(environment: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for environment variables that no process can be given: names and values are text of a certain kind."""
    for name, value in (environment or {}).items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(
                f"an environment variable is called {show_value(name)}; the sign = ends a name: give it a name that is text, "
                "not empty, "
                "and has no '='",
                code="SMP123",
            )
        if not isinstance(value, str) and not is_variable(value):
            raise ConfigError(
                f"environment variable {show_value(name)} is {shown_value(name, value)}, {kind_of(value)}; variables hold "
                f"text: write {show_value(shown_value(name, value))}",
                code="SMP123",
            )
        require_plain({name: value}, "environment")
