"""What docstrings say: their summary, their arguments, what is returned and what is refused."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from smp_config.error_codes import Coded

_SECTION = re.compile(
    r"^(Args|Arguments|Attributes|Returns|Yields|Raises|Example|Examples|Note|Notes):\s*$", re.MULTILINE
)
_ARGUMENT = re.compile(r"^([\w*]+(?:, [\w*]+)*)(?: \([^)]*\))?:(.*)$")


def sections(text: str) -> dict[str, str]:
    """A docstring in Google's style by section; what comes before the first is under ``""``."""
    parts = _SECTION.split(text)
    return {"": parts[0]} | dict(zip(parts[1::2], map(textwrap.dedent, parts[2::2]), strict=True))


def arguments(text: str) -> dict[str, str]:
    """What is said of each argument, by its name; several names may share a text."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in sections(text).get("Args", "").splitlines():
        match = None if line.startswith(" ") else _ARGUMENT.match(line)
        if match:
            names = [name.lstrip("*") for name in match[1].split(", ")]
            found |= dict.fromkeys(names, match[2].strip())
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def whole(value: Any) -> str:
    """The docstring of a function, or of a class with its constructor's."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and "__init__" in vars(value):
        text += "\n\n" + (inspect.cleandoc(value.__init__.__doc__ or "") if value.__init__.__doc__ else "")
    return text


def function_of(value: Any) -> Callable[..., Any] | None:
    """The function behind a name, without what is wrapped around it; the constructor of a class, if it is the library's."""
    if inspect.isclass(value):
        owner = next((base for base in value.__mro__ if "__init__" in vars(base)), object)
        value = vars(owner)["__init__"] if owner.__module__.startswith("smp_") else None
    if not inspect.isroutine(value):
        return None
    value = inspect.unwrap(getattr(value, "__func__", value))
    if inspect.isfunction(value) and "function" in value.__code__.co_freevars:  # asks for the session first
        value = inspect.getclosurevars(value).nonlocals["function"]
    return value if inspect.isfunction(value) else None


def parameters(value: Any) -> list[inspect.Parameter]:
    """What a caller gives, without ``self``, the session, and names that begin with an underscore."""
    function = function_of(value)
    if function is None:
        return []
    # Another than the function's where the session is put in front.
    taken = inspect.signature(function if inspect.isclass(value) else value).parameters.values()
    # The library's errors take any words.
    hidden = {"args", "kwargs"} if inspect.isclass(value) and issubclass(value, Exception) else {"self", "cls"}
    return [each for each in taken if each.name not in {"self", *hidden} and not each.name.startswith("_")]


@functools.cache
def _tree(function: Callable[..., Any]) -> ast.FunctionDef:
    (found,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(found, ast.FunctionDef)
    return found


def refusals(value: Any) -> set[str]:
    """Classes of errors with a code that the function's own lines raise."""
    function = function_of(value)
    if function is None:
        return set()
    raised = {
        ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
        for node in ast.walk(_tree(function))
        if isinstance(node, ast.Raise) and node.exc is not None
    }
    known = {name: _found(name, function.__globals__) for name in raised}
    return {name for name, kind in known.items() if inspect.isclass(kind) and issubclass(kind, Coded)}


def _found(dotted: str, names: dict[str, Any]) -> Any:
    """What a dotted name means; None where it is not one."""
    first, *rest = dotted.split(".")
    found = names.get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found
