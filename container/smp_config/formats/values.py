"""Values as command lines and variables have them: dictionaries, written out or as the name of a file, and counts."""

from __future__ import annotations

import ast
import math
import os
import re
from pathlib import Path
from typing import Any

from smp_config.errors import ConfigError, kind_of
from smp_config.formats import strict_json


def parse_literal(text: str, what: str) -> Any:
    """Parse JSON, or a Python literal such as ``{"ddp": True}``; raise ConfigError for anything else."""
    try:
        return strict_json.parse(text)
    except ValueError as as_json:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as as_python:
            raise ConfigError(
                f"{what} is neither JSON ({as_json}) nor a Python literal ({as_python}); write a dictionary such as "
                '{"ddp": true} or {"ddp": True}, without names or calls',
                code="SMP101",
            ) from None


#: Start of ``s3://bucket/x``, also if ``pathlib`` has reduced the two slashes to one.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def why_no_path(path: Any) -> str | None:
    """Return the problem with a path on this machine, such as ``s3://bucket/x``, and the remedy; None if it is valid."""
    try:
        text = os.fspath(path)
    except TypeError:
        return f"is {path!r}, {kind_of(path)}; give the path of a folder or file on this machine as text"
    if not isinstance(text, str):
        return f"is {text!r}, which is bytes; give the path as text"
    if not text.strip():
        return f"is {text!r}, which names nothing; give the path of a folder or file, or '.' for the working directory"
    if "\0" in text:
        return f"is {text!r}, which has a null character; no file can have such a name"
    scheme = _SCHEME.match(text)
    if scheme is None:
        return None
    if scheme[1].lower() == "file":
        return f"is the address {text!r}; give the path alone, without {scheme[1]}://"
    return (
        f"is the address {text!r}, but files are written to and read from this machine's disk, where it would become a folder "
        f"called '{scheme[1]}:'; give a path: a job's SMP_CHECKPOINT_DIR (/opt/ml/checkpoints) is copied to checkpoint_s3_uri "
        "while it trains, and other files the script copies itself"
    )


def is_integer(value: Any) -> bool:
    """Return whether a value is an ``int`` that is no ``bool``, although Python counts these as numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is an ``int`` or a ``float``, but no ``bool``."""
    return isinstance(value, float) or is_integer(value)


def is_count(text: str) -> bool:
    """Return whether a text is a whole number of at most nine digits; ``²``, a digit in Python, does not count."""
    is_ascii_number = text.isascii() and text.isdigit()
    return is_ascii_number and len(text) < 10


def parse_dictionary(value: str, what: str) -> dict[str, Any]:
    """Parse a dictionary, given as text or as the path of a file that holds it."""
    text = value
    if not value.lstrip().startswith("{"):
        path = Path(value)
        if not os.path.isfile(value):
            raise ConfigError(
                f"{what} is {value!r}; it is no dictionary, and there is no such file: give one of them", code="SMP101"
            )
        text = path.read_text(encoding="utf-8")
    found = parse_literal(text, what)
    if not isinstance(found, dict):
        raise ConfigError(f"{what} holds {kind_of(found)}; settings have names: write a dictionary", code="SMP101")
    return found


def parse_number(text: str) -> float | None:
    """Parse a finite number; return None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    # "nan" and "inf" are numbers to Python.
    return value if math.isfinite(value) else None


def parse_count(text: str, most: int) -> int | None:
    """Parse a whole number from 1 to ``most``; return None for anything else, however long it is."""
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal()) or not 1 <= len(digits) <= len(str(most)):
        return None
    return int(digits) if int(digits) <= most else None
