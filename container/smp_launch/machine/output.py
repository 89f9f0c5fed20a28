"""Assembly of the fragments of output that mpirun forwards into whole lines, with their rank.

With its tagging option mpirun marks which rank an output comes from. Version 5 marks whole lines, version 4.1 marks
every fragment, so a line of one rank may hold a fragment of another in the middle.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: A rank's first line: its process id, and that it can take signals from now on. Never shown.
STARTED_PREFIX = "smp-started "

#: Prefix of the line in which a starter of ranks without mpirun reports the first failed rank and its exit code.
#: Never shown.
ENDED_PREFIX = "smp-ended "

#: What mpirun puts before a line of output: the rank, and the stream.
_TAG = re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>:")
_TAG_START = re.compile(rb"\[[\d,]*(\](<[a-z]*>?)?)?")

#: Stands for the number of the rank in lines without a tag.
_UNTAGGED = -1

#: A tag may arrive in two pieces; none is longer than this many bytes.
_LONGEST_TAG = 48

#: A line without an end is passed on once it is this long, so that memory stays bounded. With one more read it is shorter than a
#: mebibyte, at which the log of ``fit()`` would cut it again.
_LONGEST_LINE = (1 << 20) - (1 << 17)


@dataclass(frozen=True)
class OutputLine:
    """One line, without its line break. ``rank`` is None for mpirun's own messages."""

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
    _cut_of: int | None = None

    def feed(self, data: bytes) -> list[OutputLine]:
        """Add new data and return the lines that it completes."""
        lines: list[OutputLine] = []
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

    def finish(self) -> list[OutputLine]:
        """Return the lines that never got their line break."""
        lines: list[OutputLine] = []
        held, self._held = self._held, b""
        self._append(self._rank, held, lines)
        for rank, partial in sorted(self._partial.items()):
            if partial:
                lines.append(self._line(rank, bytes(partial)))
        self._partial.clear()
        return lines

    def _append(self, rank: int, data: bytes, lines: list[OutputLine]) -> None:
        at = 0
        while at < len(data):
            end = data.find(b"\n", at)
            partial = self._partial.setdefault(rank, bytearray())
            if end < 0:
                partial += data[at:]
                if len(partial) > _LONGEST_LINE:
                    self._cut(rank, lines)
                return
            partial += data[at:end]
            lines.append(self._line(rank, bytes(self._partial.pop(rank))))
            self._cut_of = None
            at = end + 1
            if self.tags == "fragments":
                # A tag stands before every piece of a rank; what follows a line's end without one is mpirun's.
                rank = self._rank = _UNTAGGED

    def _cut(self, rank: int, lines: list[OutputLine]) -> None:
        """Pass on the beginning of a line that is too long to wait for its end."""
        partial = self._partial[rank]
        end = _last_character(partial)
        line = self._line(rank, bytes(partial[:end]))
        del partial[:end]
        lines.append(line)
        # The next piece has no tag, and is this rank's, too.
        self._cut_of = line.rank

    def _line(self, rank: int, raw: bytes) -> OutputLine:
        tag = _TAG.match(raw) if self.tags == "lines" else None
        if tag is not None:
            rank = int(tag[1])
            raw = raw[tag.end() :].removeprefix(b" ")
        elif self._cut_of is not None:
            rank = self._cut_of
        text = raw.decode("utf-8", "replace").removesuffix("\r")
        return OutputLine(text, None if rank == _UNTAGGED else rank)


@dataclass
class WholeLines:
    """Cuts the output of one rank, which has a pipe of its own, behind its line breaks; bytes stay as they are."""

    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> bytes:
        """Add new data and return the lines that it completes, each with its line break."""
        end = data.rfind(b"\n") + 1
        if end:
            whole = bytes(self._rest) + data[:end]
            self._rest = bytearray(data[end:])
            return whole
        self._rest += data
        if len(self._rest) <= _LONGEST_LINE:
            return b""
        cut = _last_character(self._rest)
        whole = bytes(self._rest[:cut]) + b"\n"
        del self._rest[:cut]
        return whole

    def finish(self) -> bytes:
        """Return the line that never got its line break, with one added."""
        whole = bytes(self._rest) + b"\n" if self._rest else b""
        self._rest.clear()
        return whole


def _last_character(data: bytearray) -> int:
    """Return at which length to cut a long text so that its last character stays whole.

    It is the text's length, or up to three bytes less.
    """
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first byte of a character of 2 to 4 bytes
            wanted = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - back if back < wanted else len(data)
    return len(data)


def _may_become_tag(tail: bytes) -> bool:
    """Return whether ``tail``, which begins with ``[``, could be the first part of a tag."""
    return _TAG_START.fullmatch(tail) is not None
