"""Where the commands print."""

from __future__ import annotations

import sys

from rich.console import Console


def console() -> Console:
    """As wide as the terminal, and 116 columns in files and pipes."""
    return Console(width=None if sys.stdout.isatty() else 116, soft_wrap=False)
