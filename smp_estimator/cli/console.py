"""Where the commands print."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape


def console() -> Console:
    """As wide as the terminal, and 116 columns in files and pipes."""
    return Console(width=None if sys.stdout.isatty() else 116, soft_wrap=False)


def printable(text: str) -> str:
    """A text, with what would move a terminal's cursor, or cannot be written at all, as Python writes it."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in text
    )


def shown(text: str) -> str:
    """A text that is not ours, such as a name in a file, for :func:`console`: nothing in it is markup."""
    return escape(printable(text))
