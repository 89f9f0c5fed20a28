"""What the ranks print, put together again: mpirun forwards fragments, this gives whole lines with their rank.

With its tagging option mpirun marks what comes from which rank. Version 5 marks whole lines, version 4.1 marks
every fragment, so a line of one rank may hold a fragment of another in the middle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: A rank's first line: its process id, and that it can take signals from now on. Never shown.
STARTED_PREFIX = "smp-started "

_TAG = re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>:")
_TAG_START = re.compile(rb"\[[\d,]*(\](<[a-z]*>?)?)?")
_UNTAGGED = -1

#: A tag may arrive in two pieces; none is longer than this many bytes.
_LONGEST_TAG = 48

#: A line without an end is passed on once it is this long, so that memory stays bounded.
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Line:
    """One line, without its line break. ``rank`` is None for what mpirun itself says."""

    text: str
    rank: int | None = None


@dataclass
class LineAssembler:
    """Turns one stream of mpirun (its stdout or its stderr) into lines.

    Args:
        tags: ``"fragments"`` (4.1), ``"lines"`` (5), or None for a program that is not mpirun.
    """

    tags: str | None
    _partial: dict[int, bytearray] = field(default_factory=dict)
    _rank: int = _UNTAGGED
    _held: bytes = b""

    def feed(self, data: bytes) -> list[Line]:
        """Add what was read; the lines that it completes."""
        lines: list[Line] = []
        if self.tags != "fragments":
            self._append(_UNTAGGED, data, lines)
            return lines
        data, self._held = self._held + data, b""
        at = 0
        for tag in _TAG.finditer(data):
            self._append(self._rank, data[at : tag.start()], lines)
            self._rank, at = int(tag[1]), tag.end()
        rest = data[at:]
        start = rest.rfind(b"[", max(0, len(rest) - _LONGEST_TAG))
        if start >= 0 and b"\n" not in rest[start:] and _may_become_tag(rest[start:]):
            rest, self._held = rest[:start], rest[start:]
        self._append(self._rank, rest, lines)
        return lines

    def finish(self) -> list[Line]:
        """The lines that never got their line break."""
        lines: list[Line] = []
        held, self._held = self._held, b""
        self._append(self._rank, held, lines)
        for rank, partial in sorted(self._partial.items()):
            if partial:
                lines.append(self._line(rank, bytes(partial)))
        self._partial.clear()
        return lines

    def _append(self, rank: int, data: bytes, lines: list[Line]) -> None:
        while data:
            end = data.find(b"\n")
            partial = self._partial.setdefault(rank, bytearray())
            if end < 0:
                partial += data
                if len(partial) > _LONGEST_LINE:
                    lines.append(self._line(rank, bytes(self._partial.pop(rank))))
                return
            partial += data[:end]
            lines.append(self._line(rank, bytes(self._partial.pop(rank))))
            data = data[end + 1 :]
            if self.tags == "fragments":
                # A tag stands before every piece of a rank; what follows a line's end without one is mpirun's.
                rank = self._rank = _UNTAGGED

    def _line(self, rank: int, raw: bytes) -> Line:
        if self.tags == "lines" and (tag := _TAG.match(raw)):
            rank = int(tag[1])
            raw = raw[tag.end() :].removeprefix(b" ")
        text = raw.decode("utf-8", "replace").removesuffix("\r")
        return Line(text, None if rank == _UNTAGGED else rank)


def _may_become_tag(tail: bytes) -> bool:
    """Whether ``tail``, which begins with ``[``, could be the first part of a tag."""
    return _TAG_START.fullmatch(tail) is not None
