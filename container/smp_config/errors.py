"""The errors of the configuration: what is wrong, how it came about, what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting that cannot work.

    The message has three parts: what is wrong with the numbers, how they came about, and what to change to
    which value. It is the root of every error that this package raises for a user's input.
    """


def suggest(word: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` with the known word nearest to ``word``, to end a sentence with; empty when none is near."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(str(word).casefold(), list(by_folded), n=1, cutoff=0.6)
    return f", did you mean '{by_folded[near[0]]}'?" if near else ""
