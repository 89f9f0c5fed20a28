"""The hang watch: reads the ranks' records, and compares them if the ranks make no progress."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_launch.machine.processes import all_processes, find_descendants_of
from smp_launch.watch.position import RankPosition, Standing
from smp_launch.watch.states import name_of, state_of
from smp_launch.watch.verdict import HangVerdict, find

if TYPE_CHECKING:
    from smp_launch.watch.hang_timeout import HangTimeout
    from smp_launch.watch.local_ranks import WatchedRanks
    from smp_records.rank_record import Glance

#: Seconds between two looks, at most; less if the timeout is short.
_LOOK_SECONDS = 1.0

#: Seconds that others may wait for a rank that has ended its script before they are to blame: its last message may be under way.
_LEFT_SECONDS = 5.0

#: Share of the patience after which an uncertain verdict is examined again.
_AGAIN = 0.25


@dataclass(frozen=True)
class Hang:
    """A hang that was found.

    Attributes:
        seconds: seconds without any progress.
        positions: positions of all ranks, also of those that went on.
    """

    verdict: HangVerdict
    seconds: float
    positions: Mapping[int, RankPosition]


class HangWatch:
    """Looks at the ranks of a job now and then; use it from one thread.

    Args:
        machines: the ranks of each machine.
        size: number of ranks of the job. If some of them cannot be seen here, no verdict about them is made.
        patience: seconds without progress that are allowed.
    """

    def __init__(self, machines: Sequence[WatchedRanks], patience: HangTimeout, size: int = 0) -> None:
        self._machines = machines
        self._patience = patience
        self._size = size
        self._glances: dict[int, Glance] = {}
        self._stopped: dict[int, float] = {}
        self.next_look = time.monotonic() + self._pause if patience.watches else float("inf")

    @property
    def _pause(self) -> float:
        return max(0.05, min(_LOOK_SECONDS, self._patience.seconds / 10))

    def look(self) -> Hang | None:
        """Return the hang if the job hangs, else None. Call it at ``next_look``."""
        now = time.monotonic()
        self.next_look = now + self._pause
        quiet = self._quiet(now)
        if (stopped := self._stopped_overseer(now)) is not None:
            return stopped
        if not quiet or not self._is_suspect(quiet):
            return None
        hang = self.examine()
        now = time.monotonic()
        if hang is None or not self._is_due(hang, now):
            again = _AGAIN * self._patience.seconds
            if any(glance.has_left for glance in self._glances.values()):
                again = min(again, _LEFT_SECONDS)
            self.next_look = now + max(self._pause, again)
            return None
        return hang

    def _quiet(self, now: float) -> dict[int, float]:
        """Return the seconds since the last sign of life of each rank that has not left."""
        self._glances = {}
        for ranks in self._machines:
            self._glances.update(ranks.glances())
        if self._glances:
            first = self._glances[min(self._glances)]
            self._patience.saw(first.step, first.when)
        return {rank: now - glance.when for rank, glance in self._glances.items() if not glance.has_left}

    def _is_suspect(self, quiet: Mapping[int, float]) -> bool:
        """Return whether the job needs a closer look."""
        longest = max(quiet.values())
        some_left = any(glance.has_left for glance in self._glances.values())
        return longest >= self._patience.seconds or (longest >= _LEFT_SECONDS and some_left)

    def _stopped_overseer(self, now: float) -> Hang | None:
        """Return a hang if a process between this one and the ranks, such as mpirun, is stopped for too long.

        The output and the exit codes of the ranks then stay in that process.
        """
        ranks = {glance.pid for glance in self._glances.values()}
        overseers = find_descendants_of([os.getpid()], all_processes(), apart=ranks)
        stopped = {pid for pid in overseers if state_of(pid).is_stopped}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in sorted(stopped)}
        for pid, since in self._stopped.items():
            if now - since >= self._patience.seconds:
                text = (
                    f"process {pid}, {name_of(pid)}, through which the ranks run, is stopped (by SIGSTOP, or by a debugger) since "
                    f"{now - since:.0f} s; kill -CONT {pid} would have let it go on"
                )
                return Hang(HangVerdict(None, text), now - since, {})
        return None

    def examine(self) -> Hang | None:
        """Combine all records, and return the hang, or None if there is none.

        Ranks that stand still because they wait for one that goes on are no hang.
        """
        positions = self.positions()
        still = self.standing_still(positions)
        if not still:
            return None
        all_wait = all(position.standing is Standing.WAITING for position in still.values())
        # They may wait for a rank without a record. Nothing is known about such a rank.
        if all_wait and len(positions) < self._size:
            return None
        waited = [position.seconds for position in still.values() if position.standing is not Standing.LEFT]
        seconds = max(waited, default=0.0)
        return Hang(find(still, seconds), seconds, positions)

    def positions(self) -> dict[int, RankPosition]:
        """Return where each rank is now, with its stacks.

        This takes half a second, and longer if hosts do not answer.
        """
        for ranks in self._machines:
            ranks.ask()
        return dict(sorted((rank, place) for ranks in self._machines for rank, place in ranks.positions().items()))

    def standing_still(self, positions: Mapping[int, RankPosition]) -> dict[int, RankPosition]:
        """Return the ranks that stand still and wait for none that goes on.

        Ranks that have left are included if those wait for them.
        """
        gone = {rank for rank, position in positions.items() if position.standing is Standing.LEFT}
        still = self._long_quiet(positions, gone)
        while True:
            moving = positions.keys() - still - gone
            held = {rank for rank in still if _waits_for(positions[rank], moving)}
            if not held:
                break
            still -= held
        if not still:
            return {}
        all_in_script = all(positions[rank].standing is Standing.SCRIPT for rank in still)
        others_go_on = len(still) < len(positions) - len(gone)
        if all_in_script and others_go_on:
            return {}  # a rank that no other rank waits for may take its time while others go on
        awaited: set[int] = set()
        for rank in still:
            awaited.update(positions[rank].whom)
        return {rank: positions[rank] for rank in sorted(still | (gone & awaited))}

    def _long_quiet(self, positions: Mapping[int, RankPosition], gone: set[int]) -> set[int]:
        """Return the ranks that have given no sign of life for most of their timeout."""
        patience = self._patience.seconds * 0.8
        # A rank that has left does not come back, so there is less to wait for.
        patience_with_left = min(self._patience.seconds, _LEFT_SECONDS) * 0.8
        found = set()
        for rank, position in positions.items():
            limit = patience_with_left if gone.intersection(position.whom) else patience
            if rank not in gone and position.seconds >= limit:
                found.add(rank)
        return found

    def _is_due(self, hang: Hang, now: float) -> bool:
        """Return whether the hang has lasted longer than its timeout."""
        verdict, patience = hang.verdict, self._patience
        if verdict.rank is None:
            return True
        blamed = hang.positions[verdict.rank]
        if blamed.where.long_until > now:
            return False
        if blamed.standing is Standing.LEFT:
            return True
        if blamed.standing is Standing.STOPPED:
            return hang.seconds >= patience.seconds
        is_awaited = any(blamed.rank in position.whom for position in hang.positions.values())
        may_compute = not verdict.is_certain and not is_awaited
        if may_compute and not patience.is_given:
            return False  # it may compute as long as it likes
        # The first step also compiles and allocates; a deadlock does not pass with time.
        is_early = not patience.has_stepped and not verdict.is_deadlock
        is_slow = is_early or not verdict.is_certain
        limit = patience.longer if is_slow else patience.seconds
        return hang.seconds >= limit


def _waits_for(position: RankPosition, moving: Set[int]) -> bool:
    """Return whether a rank waits, and one of the ranks that go on may end its wait."""
    if position.standing is not Standing.WAITING:
        return False
    # The target of one of PyTorch's own waits is unknown: it may be any rank that goes on.
    if not position.whom:
        return bool(moving)
    return not moving.isdisjoint(position.whom)
