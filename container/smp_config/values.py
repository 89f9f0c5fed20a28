"""Dictionaries as command lines have them: written out, or the name of a file."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from smp_config import strict_json
from smp_config.errors import ConfigError


def literal(text: str, what: str) -> Any:
    """JSON, or a Python literal such as ``{"ddp": True}``; raises ConfigError for what is neither."""
    try:
        return strict_json.parse(text)
    except ValueError as as_json:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as as_python:
            raise ConfigError(
                f"{what} is neither JSON ({as_json}) nor a Python literal ({as_python}); write a dictionary such as "
                '{"ddp": true} or {"ddp": True}, without names or calls'
            ) from None


def is_count(text: str) -> bool:
    """Whether a text is a whole number of at most nine digits; Python takes ``²`` for a digit, too."""
    return text.isascii() and text.isdigit() and len(text) < 10


def dictionary(value: str, what: str) -> dict[str, Any]:
    """A dictionary given as text or as the path of a file with it."""
    text = value
    if not value.lstrip().startswith("{"):
        path = Path(value)
        if not os.path.isfile(value):
            raise ConfigError(f"{what} is {value!r}; it is no dictionary, and there is no such file: give one of them")
        text = path.read_text(encoding="utf-8")
    found = literal(text, what)
    if not isinstance(found, dict):
        raise ConfigError(f"{what} holds a {type(found).__name__}; settings have names: write a dictionary")
    return found
