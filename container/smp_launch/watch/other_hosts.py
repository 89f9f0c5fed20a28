"""The ranks of other machines: asked over the connection that the leader has to each host, answered there.

Requests and answers are lines. Clocks differ between hosts, so an answer has its time, by its host's clock.
"""

from __future__ import annotations

import dataclasses
import os
import select
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from smp_launch.watch.local_ranks import LocalRanks
from smp_launch.watch.position import RankPosition  # noqa: TC001 - as above
from smp_records.rank_record import Glance  # noqa: TC001 - pydantic reads it

#: Requests of the leader.
GLANCE, WHERE = "smp-glance", "smp-where"

#: Name of the folder with the records of a host that is not the leader, beside the folder of the leader's status.
RECORDS = "ranks"

#: Seconds for a host to answer with the positions of its ranks.
_PATIENCE = 8.0

#: Read from a pipe at once.
_READ_BYTES = 1 << 16

#: An answer is never longer: some hundred threads with their stacks for each rank.
_MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class _Answer:
    """A host's answer; ``now`` is by its own clock."""

    now: float
    glances: dict[int, Glance]
    positions: dict[int, RankPosition] | None = None


_answers = TypeAdapter(_Answer)


def answer(request: str, folder: Path) -> str | None:
    """Return the line with which a host answers a request of its leader, or None if ``request`` is no request."""
    if request not in (GLANCE, WHERE):
        return None
    ranks = LocalRanks(folder, wakes=True)
    positions = ranks.positions() if request == WHERE else None
    return _answers.dump_json(_Answer(time.monotonic(), ranks.glances(), positions)).decode()


class OtherHost:
    """See :class:`~smp_launch.watch.local_ranks.WatchedRanks`: the ranks of a host, over its connection.

    Args:
        requests: stream to the host.
        answers: stream from the host; only this object reads from it.
        ranks: ranks of the host. Others may have records of an earlier start, when ranks had other numbers.
    """

    def __init__(self, requests: IO[bytes], answers: IO[bytes], ranks: Collection[int]) -> None:
        self._ranks = ranks
        self._requests = requests
        self._answers = answers
        self._heard = bytearray()
        self._glances: dict[int, Glance] = {}
        self._positions: dict[int, RankPosition] | None = None
        self._is_asked = False

    def glances(self) -> dict[int, Glance]:
        """Return the host's last answer, and ask it again. See :class:`WatchedRanks`."""
        self._hear(0.0)
        if not self._is_asked:
            self._request(GLANCE)
        return self._glances

    def ask(self) -> None:
        """See :class:`WatchedRanks`."""
        self._positions = None
        self._request(WHERE)

    def positions(self) -> Mapping[int, RankPosition]:
        """See :class:`WatchedRanks`."""
        deadline = time.monotonic() + _PATIENCE
        while self._positions is None:
            left = deadline - time.monotonic()
            if left <= 0 or not self._hear(left):
                break
        return self._positions or {}

    def _request(self, words: str) -> None:
        try:
            os.write(self._requests.fileno(), f"{words}\n".encode())
            self._is_asked = True
        except (OSError, ValueError):
            pass  # the host is gone, which others notice

    def _hear(self, seconds: float) -> bool:
        """Read the host's answers for up to ``seconds``, and return whether more may come."""
        try:
            while select.select([self._answers], [], [], seconds)[0]:
                data = os.read(self._answers.fileno(), _READ_BYTES)
                if not data or len(self._heard) > _MOST_BYTES:
                    return False
                self._heard += data
                *lines, rest = self._heard.split(b"\n")
                self._heard = bytearray(rest)
                for line in lines:
                    self._take(bytes(line))
                if lines:
                    return True
                seconds = min(seconds, 1.0)
        except (OSError, ValueError):
            return False
        return seconds > 0

    def _take(self, line: bytes) -> None:
        try:
            said = _answers.validate_json(line)
        except ValidationError:
            return  # a banner, or words of another program
        self._is_asked = False
        later = time.monotonic() - said.now
        self._glances = {
            rank: dataclasses.replace(g, when=g.when + later) for rank, g in said.glances.items() if rank in self._ranks
        }
        if said.positions is not None:
            found = {rank: _shifted(position, later) for rank, position in said.positions.items()}
            self._positions = {rank: position for rank, position in found.items() if rank in self._ranks}


def _shifted(position: RankPosition, later: float) -> RankPosition:
    """Return the position with its times converted to another clock."""
    where = position.where
    moved = dataclasses.replace(where, when=where.when + later, long_until=where.long_until + later)
    return dataclasses.replace(position, where=moved)
