"""The short code of an error, such as ``SMP302``, which leads to its section of ``docs/troubleshooting.md``.

A message says what is wrong with which numbers; a code says what kind of thing that is, and what helps in general. Codes are not
written beside hundreds of messages: they follow from the error's class where that says enough (a connection was lost), else from
the part of the library that made the error. ``data/error_codes.json`` has them all.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Code:
    """A kind of error.

    Attributes:
        code: ``SMP`` and three digits; the first says whom it concerns, see :data:`FAMILIES`.
        cause: how it comes about.
        cure: what to do.
        page: of the documentation that says more, with its heading.
        modules: whose errors have this code, with all below them; the longest name that fits counts.
        errors: classes whose errors have this code, wherever they are made.
    """

    code: str
    title: str
    cause: str
    cure: str
    page: str
    modules: tuple[str, ...]
    errors: tuple[str, ...]


#: By the first digit of a code, where its errors come from.
FAMILIES = {
    "1": "Settings of a job",
    "2": "Starting a job",
    "3": "What a script asks for",
    "4": "Checkpoints",
    "5": "Other ranks and the machine",
    "6": "CUDA without a GPU",
}


@functools.cache
def catalogue() -> dict[str, Code]:
    """All codes, in their order."""
    text = (Path(__file__).parent / "data" / "error_codes.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    made = (Code(**{**row, "modules": tuple(row["modules"]), "errors": tuple(row["errors"])}) for row in rows)
    return {code.code: code for code in made}


@functools.cache
def _by_class() -> dict[str, str]:
    return {name: row.code for row in catalogue().values() for name in row.errors}


@functools.cache
def _of_module(module: str) -> str | None:
    by_name = {name: row.code for row in catalogue().values() for name in row.modules}
    parts = module.split(".")
    return next((by_name[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in by_name), None)


def code_for(kind: type, module: str) -> str | None:
    """The code of an error of this class that this module makes; None where nobody has given it one.

    A class that says what has happened has its code wherever it is raised; of the others the module decides.
    """
    of_class = (_by_class()[base.__name__] for base in kind.__mro__ if base.__name__ in _by_class())
    return next(of_class, None) or _of_module(module)


class Coded(Exception):
    """An error that has a code, which tracebacks show below its message (from Python 3.11 on).

    The message stays as it was written: it may become a part of another one, and programs compare it.
    """

    code: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        frame = sys._getframe(1)  # noqa: SLF001 - the public way, inspect.currentframe, is the same call
        # Constructors of subclasses stand between.
        while frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self and frame.f_back is not None:
            frame = frame.f_back
        self._take(code_for(type(self), frame.f_globals.get("__name__", "")))

    def of_the_kind_of(self, other: BaseException) -> Self:
        """The same error with the code of another one, which it tells in other words."""
        self._take(code_of(other))
        return self

    def _take(self, code: str | None) -> None:
        self.code = code
        # The name is that of ``BaseException.add_note``, which Python 3.10 does not have.
        self.__notes__ = [hint(code)] if code else []


def code_of(error: BaseException) -> str | None:
    """The code of an error; of one that is not ours, None."""
    if isinstance(error, Coded) and error.code:
        return error.code
    # One whose constructor is another's, as of a class that is an AttributeError first.
    return code_for(type(error), "") if isinstance(error, Coded) else None


def hint(code: str) -> str:
    """The line that leads from a code to what helps."""
    return f"[{code}] {catalogue()[code].title}: smp-estimator explain {code}"


def marked(text: str, error: BaseException) -> str:
    """A message with the code of its error at its end, for where no traceback shows it."""
    code = code_of(error)
    return f"{text} [{code}]" if code else text
