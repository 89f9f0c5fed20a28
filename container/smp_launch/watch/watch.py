"""The watch over a job's ranks: looks at their records, and brings all together when they do not go on."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
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

#: Seconds for which others wait for a rank that has ended its script, before that is their fault; its last words may be under way.
_LEFT_SECONDS = 5.0

#: Share of the patience until a matter is looked into again that was not certain.
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
        patience: how long nothing may happen.
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
        self._glances = {rank: glance for ranks in self._machines for rank, glance in ranks.glances().items()}
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
        """Bring all records together and return the hang, or None if there is none.

        Ranks that stand still because they wait for one that goes on are no hang.
        """
        positions = self.positions()
        still = self.standing_still(positions)
        if not still or (len(positions) < self._size and all(p.standing is Standing.WAITING for p in still.values())):
            return None
        seconds = max((p.seconds for p in still.values() if p.standing is not Standing.LEFT), default=0.0)
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
        patience = min(self._patience.seconds, _LEFT_SECONDS) * 0.8
        gone = {rank for rank, p in positions.items() if p.standing is Standing.LEFT}
        still = {
            rank
            for rank, p in positions.items()
            if rank not in gone
            and p.seconds >= (patience if gone.intersection(p.whom) else self._patience.seconds * 0.8)
        }
        while True:
            moving = positions.keys() - still - gone
            # The target of one of PyTorch's own waits is unknown: it may be any rank that goes on.
            held = {
                rank
                for rank in still
                if positions[rank].standing is Standing.WAITING
                and moving.intersection(positions[rank].whom if positions[rank].whom else positions.keys())
            }
            if not held:
                break
            still -= held
        awaited = {other for rank in still for other in positions[rank].whom}
        if len(still) < len(positions) - len(gone) and not any(
            positions[rank].standing is not Standing.SCRIPT for rank in still
        ):
            return {}  # a rank that no other rank waits for may take its time while others go on
        return {rank: positions[rank] for rank in sorted(still | (gone & awaited))} if still else {}

    def _is_due(self, hang: Hang, now: float) -> bool:
        """Return whether the hang has lasted longer than its timeout."""
        if hang.verdict.rank is None:
            return True
        blamed = hang.positions[hang.verdict.rank]
        if blamed.where.long_until > now:
            return False
        if blamed.standing is Standing.LEFT:
            return True
        if blamed.standing is Standing.STOPPED:
            return hang.seconds >= self._patience.seconds
        awaited = any(blamed.rank in position.whom for position in hang.positions.values())
        if not (hang.verdict.is_certain or awaited or self._patience.is_given):
            return False  # it may compute as long as it likes
        is_early = not self._patience.has_stepped and not hang.verdict.is_deadlock
        is_slow = not hang.verdict.is_certain or is_early
        return hang.seconds >= (self._patience.longer if is_slow else self._patience.seconds)
