"""Plain containers that their owners change in place: what was in them, and how it comes back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

_KINDS = (dict, OrderedDict, defaultdict, list, set, deque)


def contents_of(value: Any) -> Any:
    """A copy of a plain container, with the very objects that are in it; None for anything else."""
    return value.copy() if type(value) in _KINDS else None


def holds_same(value: Any, contents: Any) -> bool:
    """Whether a container holds the very objects of another one of its kind, in the same places."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in contents.items())
    if isinstance(value, set):
        return all(item in value for item in contents)
    return all(one is other for one, other in zip(value, contents, strict=True))


def refill(value: Any, contents: Any) -> None:
    """Put back what :func:`contents_of` gave, unless it is there."""
    if not holds_same(value, contents):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(contents)
