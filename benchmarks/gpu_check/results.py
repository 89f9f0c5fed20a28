"""Findings of a check: one line ``RESULT {json}`` each on its standard output, which the driver reads.

A finding has the name of its case, and ``ok``: true, false, or null if the case could not be tried on this machine.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

_MARK = "RESULT "

#: A finding, or what is known of one so far.
Finding = dict[str, Any]


def emit(**finding: Any) -> None:
    """Print a finding."""
    print(_MARK + json.dumps(finding, default=str), flush=True)


def find_result(line: str) -> str | None:
    """Return a finding in a line of a program's output, as :func:`emit` has printed it, or None.

    A launcher may have put its own words before it, such as the rank's name.
    """
    start = line.find(_MARK + "{")
    return None if start < 0 else line[start:]


def parse(line: str) -> Finding | None:
    """Return the finding of a line that begins with one, or None for other lines."""
    if not line.startswith(_MARK):
        return None
    try:
        return json.loads(line.removeprefix(_MARK))
    except ValueError:
        return {"garbled": line[:200]}


@contextlib.contextmanager
def case(name: str) -> Iterator[Finding]:
    """Emit a finding for the block, whatever happens in it.

    Yields:
        The finding, to which the block adds its figures. If the block does not set ``ok``, it is true; after an
        exception it is false. The next case starts without a session.
    """
    begin = time.monotonic()
    finding: Finding = {}
    try:
        yield finding
    except BaseException as error:
        print("".join(traceback.format_exception(error)), flush=True)
        message = f"{type(error).__name__}: {error}"[:500]
        emit(**{"case": name, **finding, "ok": False, "error": message})
        with contextlib.suppress(BaseException):
            if device := sys.modules.get("gpu_check.device"):  # otherwise there is no session
                device.shut_down()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return
    finding.setdefault("ok", True)
    emit(case=name, **finding, s=round(time.monotonic() - begin, 1))


def round_significant(value: float) -> float:
    """Return ``value`` with three significant digits."""
    return float(f"{value:.3g}")
