"""The ranks of this machine, seen through their records and the system."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smp_launch.watch import stacks
from smp_launch.watch.position import RankPosition, position_of
from smp_launch.watch.states import is_active, states_with_children
from smp_records import rank_record

if TYPE_CHECKING:
    from smp_records.rank_record import Glance

#: Seconds over which it is seen whether a process computes.
_SAMPLE_SECONDS = 0.5


class WatchedRanks(Protocol):
    """The ranks of one machine. Times are those of the caller's monotonic clock."""

    def glances(self) -> Mapping[int, Glance]:
        """Return the newest known sign of life of each rank, without waiting."""

    def ask(self) -> None:
        """Have the positions made ready, for a verdict that may end the job."""

    def positions(self) -> Mapping[int, RankPosition]:
        """Return the position of each rank that can be reached."""


class LocalRanks:
    """See :class:`WatchedRanks`.

    Args:
        folder: folder of the ranks' records.
        wakes: whether a stopped rank is resumed for a moment, so that it writes its stack.
    """

    def __init__(self, folder: Path, *, wakes: bool = False) -> None:
        self._folder = folder
        self._wakes = wakes

    def glances(self) -> dict[int, Glance]:
        """See :class:`WatchedRanks`."""
        found = {}
        for name in self._names():
            if (glance := rank_record.read_glance(self._folder / name)) is not None:
                found[int(name)] = glance
        return found

    def _names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.isdecimal()]
        except OSError:
            return []

    def ask(self) -> None:
        """See :class:`WatchedRanks`; nothing has to be made ready here."""

    def positions(self) -> dict[int, RankPosition]:
        """See :class:`WatchedRanks`; takes half a second, to measure which ranks compute."""
        records = rank_record.read_all(self._folder)
        pids = {rank: where.pid for rank, where in records.items()}
        states = states_with_children(pids.values())
        before = {rank: states[pid] for rank, pid in pids.items()}
        began = time.monotonic()
        alive = [rank for rank, state in before.items() if not (state.is_stopped or state.has_ended)]
        threads = stacks.ask(self._folder, pids, alive)
        woken = [rank for rank, state in before.items() if state.letter == "T"] if self._wakes else []
        threads |= stacks.ask_stopped(self._folder, pids, woken)
        time.sleep(max(0.0, _SAMPLE_SECONDS - (time.monotonic() - began)))
        now = time.monotonic()
        # Progress made while a stopped rank was briefly resumed does not count.
        after = rank_record.read_all(self._folder) if not woken else {}
        later, found = states_with_children(pids.values()), {}
        for rank, where in records.items():
            state = before[rank] if before[rank].is_stopped else later[where.pid]
            active = is_active(before[rank], state, now - began)
            found[rank] = position_of(after.get(rank, where), state, threads.get(rank, ()), now, is_active=active)
        return found
