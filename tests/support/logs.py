"""What the library logs while something runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def heard(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a function returns, and the warnings that were logged meanwhile."""
    found: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: found.append(record.getMessage()) if record.levelno >= logging.WARNING else None
    logging.getLogger("smp").addHandler(listener)
    try:
        return function(), found
    finally:
        logging.getLogger("smp").removeHandler(listener)
