"""Short error codes, such as ``SMP302``; each has a section in ``docs/troubleshooting.md``.

A message describes one problem with its numbers. A code names the kind of problem and the general remedy.
Codes are not written beside hundreds of messages. A code follows from the error's class if the class is specific
enough (a connection was lost). Otherwise it follows from the part of the library that made the error.
``data/error_codes.json`` lists all codes.
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
        code: ``SMP`` and three digits; the first digit names the family, see :data:`FAMILIES`.
        cause: how it comes about.
        cure: what to do.
        page: the page of the documentation with the details, and its heading.
        modules: modules that raise errors with this code, with all their submodules; the longest matching name counts.
        errors: classes of errors with this code, wherever they are raised.
    """

    code: str
    title: str
    cause: str
    cure: str
    page: str
    modules: tuple[str, ...]
    errors: tuple[str, ...]


#: Origin of an error, by the first digit of its code.
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
    """Return all codes in order, by name."""
    text = (Path(__file__).parent / "data" / "error_codes.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    made = (Code(**{**row, "modules": tuple(row["modules"]), "errors": tuple(row["errors"])}) for row in rows)
    return {code.code: code for code in made}


@functools.cache
def _by_class() -> dict[str, str]:
    codes: dict[str, str] = {}
    for row in catalogue().values():
        for name in row.errors:
            codes[name] = row.code
    return codes


@functools.cache
def _of_module(module: str) -> str | None:
    by_name = {name: row.code for row in catalogue().values() for name in row.modules}
    parts = module.split(".")
    return next((by_name[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in by_name), None)


def code_for(kind: type, module: str) -> str | None:
    """Return the code of an error of class ``kind`` that ``module`` raises, or None if it has no code.

    A specific class has the same code wherever it is raised. For other classes, the module decides.
    """
    of_class = (_by_class()[base.__name__] for base in kind.__mro__ if base.__name__ in _by_class())
    return next(of_class, None) or _of_module(module)


#: Attribute of errors that were given a code.
_GIVEN = "smp_code"


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
        """Take the code of another error, which this error rewords, and return this error."""
        self._take(code_of(other))
        return self

    def _take(self, code: str | None) -> None:
        self.code = code
        # The name is that of ``BaseException.add_note``, which Python 3.10 does not have.
        self.__notes__ = [hint_of(code)] if code else []


def code_of(error: BaseException) -> str | None:
    """Return the code of an error, or None if it is not an error of this library and was given none."""
    if isinstance(error, Coded) and error.code:
        return error.code
    given = getattr(error, _GIVEN, None)
    if isinstance(given, str):
        return given
    if not isinstance(error, Coded):
        return None
    # No code is stored if ``Coded.__init__`` did not run: another base class, such as AttributeError, may come first.
    return code_for(type(error), "")


def give_code(error: BaseException, code: str) -> None:
    """Give a code to an error of Python's or another library's whose cause is known; its traceback shows the code too."""
    setattr(error, _GIVEN, code)
    error.__notes__ = [  # type: ignore[attr-defined]  # Python 3.10 does not know it
        *getattr(error, "__notes__", ()),
        hint_of(code),
    ]


def hint_of(code: str) -> str:
    """Return the line that points from a code to its remedy."""
    return f"[{code}] {catalogue()[code].title}: smp-estimator explain {code}"


def append_code(text: str, error: BaseException) -> str:
    """Append the code of an error to a message, for places that show no traceback."""
    code = code_of(error)
    return f"{text} [{code}]" if code else text
