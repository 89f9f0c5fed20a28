"""The collectives that a rank has called, with their order and lines, and the first difference between two ranks.

Ranks that share a group wait for each other in each of its collectives: they must make the same calls in the same order. If a
script makes a call in an ``if`` on the rank, the job hangs. Every rehearsed rank writes its calls to a file as it makes them.
The process that has started the ranks compares the files while they run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smp_records.script_lines import script_line
from smp_runtime.comm.waiting import script_s_call

#: ``calls-1023.jsonl`` in the request's folder.
_PREFIX, _SUFFIX = "calls-", ".jsonl"

#: Of PyTorch's own collectives of objects, the bytes differ by rank.
_OF_OBJECTS = "object"

#: What may be called by some ranks of a group only: another rank is named.
_POINT_TO_POINT = {"send", "recv"}


@dataclass(frozen=True)
class RehearsedCall:
    """A call of a script in which ranks wait for each other.

    Attributes:
        what: was called: ``"smp.barrier"``, ``"all_reduce of 4 bytes"``.
        line: of the script, file and number.
        step: from 0; -1 before the first.
        ranks: rehearsed ranks of its groups, this one too.
    """

    what: str
    line: str
    step: int
    ranks: frozenset[int]


class CallLog:
    """Writes down the calls of this rank.

    Args:
        rehearsed: all ranks that are rehearsed.
        file: that is written.

    Attributes:
        step: the step that runs; -1 before the first.
        public_call: the public call that the script is in; empty outside.
    """

    def __init__(self, rehearsed: Sequence[int], file: Path) -> None:
        self._rehearsed = rehearsed
        self._file = file.open("w", encoding="utf-8")
        self._members: dict[tuple[int, ...], list[int]] = {}
        self._number = -1
        self._open: tuple[str, str] | None = None  # the last call: its name, and its file and line
        self._heard: set[int] = set()  # ranks of its groups
        self.step = -1
        self.public_call: Callable[[], str] = str

    def another(self) -> None:
        """Begin a public call: what follows belongs to it."""
        self._open = None

    def of_library(self, ranks: Sequence[int]) -> None:
        """Record that this library communicates with ranks; one call of the script is written down once."""
        self._add(ranks, None)

    def of_script(self, kind: str, nbytes: int, ranks: Sequence[int]) -> None:
        """Record a collective that the script itself requests from PyTorch.

        The library's own collectives take the same path, but they belong to the public call that runs.
        """
        if kind in _POINT_TO_POINT or self.public_call():
            return
        self._open = None
        self._add(ranks, kind if _is_of_objects() else f"{kind} of {nbytes:,} bytes")

    def _add(self, ranks: Sequence[int], what: str | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # it belongs to a call of the main thread, and other threads come in any order
        file, number = script_line()
        members = self._rehearsed_of(ranks)
        if not file or len(members) < 2:
            return
        call = (what or self.public_call() or script_s_call(), f"{file}:{number}")
        if self._open != call:
            self._number, self._open, self._heard = self._number + 1, call, set()
        if not self._heard.issuperset(members):
            self._heard.update(members)
            record = {"number": self._number, "what": call[0], "line": call[1], "step": self.step, "ranks": members}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def _rehearsed_of(self, ranks: Sequence[int]) -> list[int]:
        key = tuple(ranks)
        if key not in self._members:
            there = set(key)
            self._members[key] = [rank for rank in self._rehearsed if rank in there]
        return self._members[key]


def file_of_calls(folder: str, rank: int) -> Path:
    """Return the path of the file with a rank's calls."""
    return Path(folder, f"{_PREFIX}{rank}{_SUFFIX}")


def _is_of_objects() -> bool:
    """Return whether the script requested a collective of Python objects, which consists of several collectives of tensors."""
    frame = sys._getframe(2)  # noqa: SLF001 - inspect.currentframe() and its f_back take several times as long
    while frame.f_back is not None:
        if (
            _OF_OBJECTS in frame.f_code.co_name
            and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
        ):
            return True
        frame = frame.f_back
    return False


@dataclass
class _ReadFile:
    """The part of a rank's file that has been read."""

    position: int = 0
    calls: list[RehearsedCall] = field(default_factory=list)


class Agreement:
    """A repeated comparison of the calls of all ranks with a file in a folder.

    Args:
        steps: number of steps to compare; later ones are not compared, because not all ranks run them.
    """

    def __init__(self, folder: str, steps: int) -> None:
        self._folder = Path(folder)
        self._steps = steps
        self._written: dict[int, _ReadFile] = {}

    def difference(self, *, is_over: bool) -> Difference | None:
        """Return the first call in which two ranks differ, or None if there is none yet.

        Args:
            is_over: no rank will make another call, so a rank with fewer calls than another differs, too.
        """
        self._read()
        ranks = sorted(self._written)
        for place, one in enumerate(ranks):
            for other in ranks[place + 1 :]:
                if (found := self._between(one, other, is_over=is_over)) is not None:
                    return found
        return None

    def _between(self, one: int, other: int, *, is_over: bool) -> Difference | None:
        mine = self._shared(one, other)
        theirs = self._shared(other, one)
        for first, second in zip(mine, theirs, strict=False):
            if first.what != second.what:
                return Difference(one, first, other, second)
        if not is_over or len(mine) == len(theirs):
            return None
        # One rank has made a call that the other has not.
        if len(mine) > len(theirs):
            return Difference(one, mine[len(theirs)], other, None)
        return Difference(other, theirs[len(mine)], one, None)

    def _shared(self, rank: int, other: int) -> list[RehearsedCall]:
        """Return the calls of a rank in which another one takes part."""
        return [call for call in self._written[rank].calls if other in call.ranks and call.step < self._steps]

    def _read(self) -> None:
        for path in self._folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            written = self._written.setdefault(int(path.name[len(_PREFIX) : -len(_SUFFIX)]), _ReadFile())
            with path.open("rb") as file:
                file.seek(written.position)
                whole, newline, _ = file.read().rpartition(b"\n")
            written.position += len(whole) + len(newline)
            for line in whole.splitlines():
                self._add(written.calls, json.loads(line))

    @staticmethod
    def _add(calls: list[RehearsedCall], record: dict[str, object]) -> None:
        number, ranks = int(str(record["number"])), frozenset(record["ranks"])  # type: ignore[call-overload]  # a list of numbers
        if number < len(calls):  # the same call reaches further ranks
            ranks |= calls.pop().ranks
        calls.append(RehearsedCall(str(record["what"]), str(record["line"]), int(str(record["step"])), ranks))


@dataclass(frozen=True)
class Difference:
    """Two ranks that wait for each other do not make the same call."""

    rank: int
    call: RehearsedCall
    other: int
    other_call: RehearsedCall | None  # None: it makes none any more

    def __str__(self) -> str:
        instead = "makes no such call" if self.other_call is None else f"calls {_at(self.other_call)}"
        return (
            f"rank {self.rank} calls {_at(self.call)} while rank {self.other} {instead}; ranks wait for each other in such calls, "
            "so the job would hang there: make the call on every rank, outside of an `if` on the rank, and as often"
        )


def _at(call: RehearsedCall) -> str:
    file, _, number = call.line.rpartition(":")
    return f"{call.what} ({os.path.basename(file)}:{number})"
