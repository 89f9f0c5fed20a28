"""Short error codes, such as ``SMP302``; each has a section in ``docs/troubleshooting.md``.

A message describes one problem with its numbers. A code names the kind of problem and the general remedy.
It is written where the error is raised: ``raise ConfigError("…", code="SMP102")``. A class that is specific enough
(a connection was lost) has a code itself. ``data/error_codes.json`` lists all codes.
"""

from __future__ import annotations

import functools
import json
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
    """

    code: str
    title: str
    cause: str
    cure: str
    page: str


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
    rows: list[dict[str, str]] = json.loads(text)
    return {row["code"]: Code(**row) for row in rows}


#: Attribute of errors that were given a code.
_GIVEN = "smp_code"


class Coded(Exception):
    """An error that has a code, which tracebacks show below its message (from Python 3.11 on).

    The message stays as it was written: it may become a part of another one, and programs compare it.

    Args:
        code: of the list; None for that of the class.

    Attributes:
        code: of the class, for errors that are raised without one.
    """

    code: str | None = None

    def __init__(self, *args: Any, code: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take(code or type(self).code)

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
    return given if isinstance(given, str) else None


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
