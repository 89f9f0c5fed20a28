"""Where the commands print."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape


def console() -> Console:
    """Return a console as wide as the terminal, or with 116 columns for files and pipes."""
    return Console(width=None if sys.stdout.isatty() else 116, soft_wrap=False)


def make_printable(text: str) -> str:
    """Escape, as Python does, characters that would move a terminal's cursor or cannot be written."""
    made = []
    for character in text:
        is_harmless = character.isprintable() or character in "\n\t"
        made.append(character if is_harmless else character.encode("unicode_escape").decode())
    return "".join(made)


def escape_text(text: str) -> str:
    """Escape a text from outside, such as a name in a file, so that :func:`console` finds no markup in it."""
    return escape(make_printable(text))
