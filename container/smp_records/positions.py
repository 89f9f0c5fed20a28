"""The content of a rank's record: where the rank is, the calls that it has made and its open waits."""

from __future__ import annotations

import os
from dataclasses import dataclass

from smp_records.time_breakdown import TimeReading  # noqa: TC001 - pydantic reads the classes

#: Kinds of calls: the script's own call of this library, or a collective over a group.
PUBLIC, COLLECTIVE = 0, 1


@dataclass(frozen=True)
class ScriptLine:
    """A line of the script."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"

    def __bool__(self) -> bool:
        return bool(self.file)


@dataclass(frozen=True)
class JoinedCall:
    """A call that other ranks must make too.

    Attributes:
        position: how many such calls the rank had made with it.
        when: it began, in seconds of the monotonic clock.
        kind: :data:`PUBLIC` or :data:`COLLECTIVE`.
        members: ranks of its group; empty for a public call.
        number: how many collectives the rank had begun in that group with it; how many public calls, for one of these.
        size: elements of its tensor.
    """

    position: int
    when: float
    kind: int
    name: str
    line: ScriptLine
    members: tuple[int, ...] = ()
    number: int = 0
    size: int = 0
    dtype: str = ""

    @property
    def content(self) -> str:
        """Return the part of the call that must be the same on all members: ``all_reduce of 1024 float32``."""
        return f"{self.name} of {self.size} {self.dtype}".rstrip() if self.kind == COLLECTIVE else self.name


@dataclass(frozen=True)
class Waiting:
    """An open wait.

    Attributes:
        whom: the ranks that must act before it ends.
        line: the script's line; none for a collective.
        number: number of the collective in its group; 0 for other waits.
    """

    since: float
    what: str
    whom: tuple[int, ...]
    line: ScriptLine
    number: int = 0


@dataclass(frozen=True)
class RankRecord:
    """A record, as it was read.

    Attributes:
        main_thread: the identifier of its main thread.
        when: the last change, in seconds of the monotonic clock.
        step: steps that the rank has begun.
        microbatch: the one that was begun last; negative outside a step.
        left: how the rank has left the job; empty while it is in it.
        long: work that the script has announced as long, until ``long_until``.
        calls: the last ones, in their order.
        waits: those that are open, longest first.
    """

    pid: int
    rank: int
    main_thread: int
    when: float
    step: int
    microbatch: int
    phase: str
    left: str
    long: str
    long_until: float
    calls: tuple[JoinedCall, ...]
    waits: tuple[Waiting, ...]

    @property
    def line(self) -> ScriptLine:
        """Return the script's line that was noted last."""
        last = ScriptLine("", 0)
        lines = [call.line for call in self.calls]
        lines += [wait.line for wait in self.waits]
        for line in filter(None, lines):
            last = line
        return last


@dataclass(frozen=True)
class Glance:
    """The part of a record that shows whether a rank makes progress."""

    pid: int
    when: float
    step: int
    has_left: bool
    pace: TimeReading | None = None
