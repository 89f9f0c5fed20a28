"""What the library logs while something runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of at least this level that the library logs meanwhile."""
    found: list[str] = []
    listener = logging.Handler(level)
    listener.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("smp").addHandler(listener)
    try:
        yield found
    finally:
        logging.getLogger("smp").removeHandler(listener)


def heard(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a function returns, and the warnings that were logged meanwhile."""
    with logged() as found:
        return function(), found
