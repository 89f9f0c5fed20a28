"""The lines of the program that requested work, for errors and counts."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

#: Frames in these files are skipped, because they act on behalf of a line further out.
_INSIDE = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    str(Path(threading.__file__).parent) + "/threading.py",
    str(Path(threading.__file__).parent) + "/contextlib.py",
    str(Path(threading.__file__).parent) + "/concurrent/",
    "<frozen",
)


#: Local variable of functions that stand in for PyTorch's, or for others', and hand calls on: a convention that pytest knows too.
_MARK = "__tracebackhide__"


class _BackwardCaller(threading.local):
    #: The line that has started a backward pass, on the thread that runs it.
    caller: str | None = None


_here = _BackwardCaller()


def find_site() -> str:
    """Return the innermost line of the running thread outside PyTorch and this package.

    Functions with a local variable ``__tracebackhide__`` are skipped too. The form is ``folder/file.py:12 in function``.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_passed = code.co_filename.startswith(_INSIDE) or _MARK in code.co_varnames
        if not is_passed:
            path = "/".join(Path(code.co_filename).parts[-2:])
            return f"{path}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return _here.caller or "no line of Python"


@contextlib.contextmanager
def called_from(line: str) -> Iterator[None]:
    """Report ``line`` as the site of calls in the block that have no line of their own on this thread."""
    before, _here.caller = _here.caller, line
    try:
        yield
    finally:
        _here.caller = before
