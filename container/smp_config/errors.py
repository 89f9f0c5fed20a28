"""The errors of the configuration: what is wrong, how it came about, what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from smp_config.error_codes import Coded

#: No name that is known has more characters.
_LONGEST_NAME = 200

#: Most characters of a value that a message repeats.
_SHOWN_CHARACTERS = 400


class ConfigError(Coded, ValueError):
    """A setting that cannot work.

    The message has three parts: what is wrong with the numbers, how they came about, and what to change to
    which value. It is the root of every error that this package raises for a user's input.
    """


class PackageMissing(Coded, RuntimeError):
    """A package that only some calls need is not installed."""

    code = "SMP121"


class RequiredPackageMissing(Coded, ImportError):
    """A package that every process of a job needs is not installed."""

    code = "SMP206"


def show_value(value: Any) -> str:
    """Return a value as messages show it: its ``repr``, cut if it is long.

    Python itself refuses to write integers of more than 4,300 digits and values that are nested too deeply.
    """
    try:
        text = repr(value)
    except Exception as error:  # of the value's own class; it is shown in a message about something else
        return f"{kind_of(value)} that cannot be written out ({type(error).__name__})"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def kind_of(value: Any) -> str:
    """Return the name of a value's type with its article: ``an int``, ``a str``."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` with the known word nearest to ``word``; empty if none is near.

    Append it to a sentence.
    """
    by_folded = {name.casefold(): name for name in known}
    # Comparing takes the square of the length.
    near = difflib.get_close_matches(str(word)[:_LONGEST_NAME].casefold(), list(by_folded), n=1, cutoff=0.6)
    return f", did you mean '{by_folded[near[0]]}'?" if near else ""
