"""JSON: that of others is read as it stands or refused, never half understood; what is written can be read by all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

#: Most levels of nested objects and lists; a job's description has fewer than ten.
MOST_LEVELS = 64


def parse(text: str) -> Any:
    """Parse a JSON text strictly.

    Raises:
        ValueError: If it is not JSON, or JSON that Python would not read exactly: numbers beyond its range, a name twice
            in one object (the first of the two would be lost), or more than 64 levels. The message reports which, and where.
    """
    try:
        value = json.loads(text, parse_float=_float, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"it has more than {MOST_LEVELS} levels of objects and lists") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    for place, _ in _parts(value):
        if len(place) > MOST_LEVELS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels of objects and lists")
    return value


def replace_non_finite(value: Any) -> Any:
    """Return a JSON value with texts instead of numbers that are not finite, because JSON has none: ``"nan"``, ``"-inf"``."""
    if isinstance(value, dict):
        return {name: replace_non_finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def unusable_text(value: Any) -> str | None:
    """Find the first text that no command line and no environment variable can hold.

    Args:
        value: a JSON value; its names are checked as well as its values.

    Returns:
        Where the text is and why it is unusable, or None if all of the value is usable.
    """
    for place, part in _parts(value):
        if not isinstance(part, str):
            continue
        why = why_unusable(part)
        if why is not None:
            path = "".join(f"[{step!r:.80}]" for step in place)
            return f"{path or 'it'} {why}"
    return None


def why_unusable(text: str) -> str | None:
    """Return why a text cannot be passed to every program, such as ``"holds the character NUL"``.

    Half of a surrogate pair is the other reason. The result is None for a usable text.
    """
    if "\0" in text:
        return "holds the character NUL, at which a program's argument ends"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds half of a surrogate pair ({text[error.start]!a}), which is no character"
    return None


def _parts(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value and name inside ``value`` with its place; iteratively, and at most one level too deep."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while waiting:
        place, part = waiting.pop()
        yield place, part
        if len(place) > MOST_LEVELS:
            continue
        if isinstance(part, dict):
            for name, inner in part.items():
                yield (*place, name), name
                waiting.append(((*place, name), inner))
        elif isinstance(part, list):
            waiting.extend(((*place, number), inner) for number, inner in enumerate(part))


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is beyond the range of floating point numbers")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice[:100]!r} stands twice in one object")
    return found
