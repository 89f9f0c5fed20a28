"""What a terminal shows of a failed job: its first cause once, with the place in the script and the path of the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Event = TypeVar("Event")

#: A line of a failing rank's traceback, of whichever host: the launcher marks all of them.
_MARKED = re.compile(r"(?:\[[\w.-]+\] )?\[rank\d+\]:(?: |$)")

#: Other lines that report the failure: another rank's, the launcher's, and mpirun's about a connection of a rank that ended.
_REPORTS = re.compile(
    r"(?:\[[\w.-]+\] )?(?:rank \d+: the same \w+|smp-launch: failed: |\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH )"
)

#: The launcher starts the ranks again after a failure, which no later message repeats.
_STARTS_AGAIN = re.compile(r"smp-launch: failed .*the ranks are started again")

#: A frame of a traceback, with its line of code if Python could read it.
_FRAME = re.compile(
    r'^ +File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<name>\S+))?(?:\n(?P<code>.*))?', re.MULTILINE
)
_TRACEBACK = "Traceback (most recent call last):"

#: Where a job's script lies, with version 2 of the SDK and with version 3.
_CODE = re.compile(r"/opt/ml/(?:code|input/data/code)/")

#: The code at the end of this library's messages.
_ERROR_CODE = re.compile(r"\[(SMP\d{3})\]")

#: Lines of a reason without a traceback, and characters of one.
_DETAIL_LINES = 2
_SHOWN_CHARACTERS = 160


def hide_failure(events: Iterable[Event], has_failed: Callable[[], bool]) -> Iterator[Event]:
    """Yield the events of a job's log without the lines that report its failure, which the job's last message repeats.

    They are yielded at the end if the job has not failed, and earlier if its ranks are started again. The file of the log
    has all of them.

    Args:
        has_failed: called after the last event.
    """
    held: list[Event] = []
    for event in events:
        if isinstance(event, str):
            if _MARKED.match(event) or _REPORTS.match(event):
                held.append(event)
                continue
            if _STARTS_AGAIN.search(event):
                yield from held
                held.clear()
        yield event
    if not has_failed():
        yield from held


def shorten_reason(reason: str) -> str:
    """Return at most four lines of a job's reason of failure.

    The first line is the reason. Then come up to two places in the script, or the end of a text without a traceback. Last
    is the command that explains the error's code, if it has one.
    """
    headline, _, detail = reason.partition("\n")
    lines = [headline, *(_places(detail) or _last_lines(detail))]
    if code := _ERROR_CODE.search(headline):
        lines.append(f"  to read more: smp-estimator explain {code[1]}")
    return "\n".join(lines)


def _places(detail: str) -> list[str]:
    """Return where in the script an error came about: the first and the last of its own lines."""
    if _TRACEBACK not in detail:
        return []
    frames = _FRAME.finditer(detail[detail.rindex(_TRACEBACK) :])
    own = [frame for frame in frames if _CODE.search(frame["file"])]
    if len(own) > 2:
        own = [own[0], own[-1]]
    return list(map(_shown, own))


def _shown(frame: re.Match[str]) -> str:
    file = _CODE.split(frame["file"])[-1]
    inside = f", in {frame['name']}" if frame["name"] else ""
    code = (frame["code"] or "").strip()
    return _cut(f"  at {file}:{frame['line']}{inside}{f': {code}' if code else ''}")


def _last_lines(detail: str) -> list[str]:
    if _TRACEBACK in detail:  # all its lines are a library's
        return []
    return [_cut(f"  {line.strip()}") for line in detail.splitlines() if line.strip()][-_DETAIL_LINES:]


def _cut(line: str) -> str:
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
