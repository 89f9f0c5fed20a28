"""Copying a rank's state into its host's shared memory, between two steps, as often as that costs little."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from smp_config.recovery import (
    FOLDER_VARIABLE,
    INTERVAL_VARIABLE,
    MEMORY_VARIABLE,
    interval_steps,
    restart_count,
    wants_memory,
)
from smp_records.rank_record import current_record
from smp_runtime.checkpoint.live_state import ScriptPosition, random_file
from smp_runtime.checkpoint.memory.host_folder import (
    CopyProgress,
    Data,
    Generation,
    StoredTensor,
    head_path,
    of_rank,
    remove_older,
    slots_of,
    stand_in,
    write_head,
)
from smp_runtime.checkpoint.memory.known_contents import KnownContents
from smp_runtime.checkpoint.memory.newest import Recovery
from smp_runtime.checkpoint.memory.peer_replication import Outgoing, PeerReplication
from smp_runtime.checkpoint.save_partial import files_of_job
from smp_runtime.checkpoint.saving.save_plan import WriteShare
from smp_runtime.checkpoint.saving.save_report import Report, describe
from smp_runtime.comm.control import host_name, timeout_seconds

if TYPE_CHECKING:
    from smp_runtime.job.session import Session
    from smp_runtime.model.distributed_model import DistributedModel
    from smp_runtime.optim.distributed_optimizer import DistributedOptimizer

logger = logging.getLogger("smp")

#: Of the time of a step, what copies may take of it on average.
SHARE_OF_STEP = 0.03

#: Calls after which the ranks agree on how often to copy: soon, then rarely, since each costs a round of messages.
_FIRST_AGREEMENTS, _AGREEMENT_EVERY = frozenset({3, 6, 12, 24}), 64

#: Copies and steps with durations that count. The first two copies are skipped: each makes one of the two places.
_REMEMBERED, _WARM_UP = 16, 2


class Rooms:
    """Two places for copies of a rank, which take turns.

    Args:
        folder: of the host.
    """

    def __init__(self, folder: Path, start: int, rank: int) -> None:
        self._folder, self._start, self._rank = folder, start, rank
        self._data: list[Data | None] = [None, None]
        self._holds: list[Generation | None] = [None, None]
        self._files = 0

    @property
    def newest(self) -> Generation | None:
        """Return the last complete copy."""
        return max(filter(None, self._holds), default=None)

    def make_room(self, slots: tuple[StoredTensor, ...]) -> tuple[int, Data]:
        """Discard the older copy, and return the index of its buffer and the buffer.

        Raises OSError if there is not enough memory.
        """
        newest = self.newest
        index = 1 if newest is not None and self._holds[0] == newest else 0
        if (former := self._holds[index]) is not None:
            head_path(self._folder, former, self._rank).unlink()
            self._holds[index] = None
        data = self._data[index]
        if data is None or data.slots != slots:
            self._data[index] = None
            if data is not None:
                data.close()
                data.path.unlink()
            self._files += 1
            path = self._folder / of_rank(self._start, self._rank, self._files, "data")
            data = self._data[index] = Data(path, slots, new=True)
        return index, data

    def complete(self, index: int, generation: Generation, content: Mapping[str, Any]) -> None:
        """Mark the data of a buffer as complete by writing ``content`` as its head."""
        write_head(head_path(self._folder, generation, self._rank), content)
        self._holds[index] = generation

    def clear(self) -> None:
        """Free the memory."""
        for generation in filter(None, self._holds):
            head_path(self._folder, generation, self._rank).unlink(missing_ok=True)
        self.unpin()
        for data in filter(None, self._data):
            data.path.unlink(missing_ok=True)
        self._data, self._holds = [None, None], [None, None]

    def unpin(self) -> None:
        """Unpin the memory; the copies stay."""
        for data in filter(None, self._data):
            data.close()


class Interval:
    """How many steps lie between two copies: what the user has set, or as few as cost no more than their share.

    Attributes:
        steps: between two copies, now.
    """

    def __init__(self, given: int | None) -> None:
        self._given = given
        self._copies: deque[float] = deque(maxlen=_REMEMBERED)
        self._between: deque[float] = deque(maxlen=_REMEMBERED)
        self._ended: float | None = None
        self._seen = 0
        self.steps = given or 1

    @property
    def is_given(self) -> bool:
        """Return whether the user has set the interval."""
        return self._given is not None

    def step_ended(self, now: float) -> None:
        """Record the end of a step; ``now`` in seconds."""
        if self._ended is not None:
            self._between.append(now - self._ended)

    def call_ended(self, now: float, copied: float | None) -> None:
        """Record that the script continues; ``copied`` is the time of a copy in seconds, None if none was made."""
        self._ended = now
        if copied is not None:
            self._seen += 1
            if self._seen > _WARM_UP:
                self._copies.append(copied)

    def measured(self) -> tuple[float, float] | None:
        """Return the seconds of a copy and of a step; None as long as these are unknown."""
        if not self._copies or not self._between:
            return None
        return median(self._copies), median(self._between)

    def agree(self, measured: list[tuple[float, float] | None]) -> None:
        """Set the interval from all ranks' measurements.

        It uses the slowest copy, because the other ranks wait for it, and the mean step.
        """
        known = [found for found in measured if found is not None]
        if self._given is None and known:
            step = sum(seconds for _, seconds in known) / len(known)
            self.steps = max(1, math.ceil(max(copy for copy, _ in known) / (SHARE_OF_STEP * max(step, 1e-6))))


class Copier:
    """Copies of one job's state; every rank has one, and makes the same calls. The first call is one for all ranks together."""

    outlives_regrouping = True

    def __init__(self, session: Session, environ: Mapping[str, str]) -> None:
        self._session = session
        self._rank = session.ranks.rank
        self._everyone = list(range(session.ranks.control.size))
        self._start = restart_count(environ)
        self._number = Recovery.of(session).number
        self._interval = Interval(interval_steps(environ))
        self._next = self._number + 1
        self._reports = 0
        self._report: Report | None = None
        self._layouts: list[Path] = []
        text = environ.get(FOLDER_VARIABLE, "")
        self._folder = Path(text)
        found = session.ranks.control.allgather((host_name(), text, _identity(text)), self._everyone)
        self.is_on = all(identity for _, _, identity in found)
        if not self.is_on and self._rank == 0:
            logger.warning(
                "%s=1 has no effect: %d of %d ranks have no folder in shared memory, which this project's launcher makes; start "
                "the job with fit() or smp-launch run",
                MEMORY_VARIABLE,
                sum(not identity for _, _, identity in found),
                len(found),
            )
        folders = list(dict.fromkeys(found))
        numbers = [folders.index(folder) for folder in found]
        self._neighbours = [rank for rank in self._everyone if numbers[rank] == numbers[self._rank]]
        self._hosts = numbers if len(folders) > 1 else None
        self._share = WriteShare(session, self._hosts)
        #: Whether all ranks know that nothing is copied.
        self._is_over = not self.is_on
        #: Whether an earlier start has left copies that are still needed.
        self._has_older = self._start > 0
        self._buddies: PeerReplication | None = None
        if self.is_on:
            if len(folders) > 1:
                self._buddies = PeerReplication(self._rank, numbers, self._folder)
                session.at_close.append(self._buddies.wait)
            self._rooms = Rooms(self._folder, self._start, self._rank)
            session.at_close.append(self._rooms.unpin)
            self._progress = CopyProgress(self._folder, self._start, len(self._everyone))

    @classmethod
    def of(cls, session: Session) -> Copier | None:
        """Return the copier of a session, always the same object; None if the job wants no copies."""
        if not wants_memory(os.environ):
            return None
        return session.ranks.keep(cls, lambda: cls(session, os.environ))

    def regrouped(self) -> None:
        """Compute anew which rank copies what, after the parallel degrees have changed."""
        self._share = WriteShare(self._session, self._hosts)
        self._report = None

    def sent(self) -> int:
        """Return the bytes of the last copy that this rank has sent to another host; wait until they have arrived."""
        if self._buddies is None:
            return 0
        self._buddies.wait()
        return self._buddies.sent

    def step(
        self,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        content: Callable[[], bytes],
        moment: ScriptPosition | None = None,
    ) -> bool:
        """Copy the state after a step, if a copy is due.

        Args:
            content: returns the script's own content in the format of ``user_content_bytes``.
            moment: the position of the copy; None for now. The model and the optimizer must not have changed since.

        Returns:
            Whether this rank has a copy of the state of this moment.
        """
        if self._is_over:
            return False
        self._number += 1
        began = time.perf_counter()
        self._interval.step_ended(began)
        copied = None
        if self._number >= self._next:
            self._next = self._number + self._interval.steps
            outgoing = None
            if self.is_on:
                moment = moment or ScriptPosition.now(self._session)
                outgoing = self._copy(Generation(self._start, self._number), model, optimizer, content, moment)
            if self._buddies is not None:
                self._buddies.begin(outgoing, ends=not self.is_on)
            copied = None if outgoing is None else time.perf_counter() - began
        self._agree()
        self._interval.call_ended(time.perf_counter(), copied)
        return copied is not None

    def _agree(self) -> None:
        """Adapt the interval, at some of the steps, to the durations of copies and steps on all ranks."""
        calls = self._number - Recovery.of(self._session).number
        if self._interval.is_given or not (calls in _FIRST_AGREEMENTS or calls % _AGREEMENT_EVERY == 0):
            return
        former = self._interval.steps
        found = self._session.ranks.control.allgather((self.is_on, self._interval.measured()), self._everyone)
        if not all(is_on for is_on, _ in found):
            self._end()
            self._is_over = True
            return
        measured = [seconds for _, seconds in found]
        self._interval.agree(measured)
        if self._interval.steps != former:
            self._next = self._number + self._interval.steps
            if self._rank == 0:
                logger.info(
                    "memory checkpoints: one every %d steps, since a copy takes %.1f ms and a step %.1f ms; %s sets another number",
                    self._interval.steps,
                    1000 * max(copy for copy, _ in filter(None, measured)),
                    1000 * median(step for _, step in filter(None, measured)),
                    INTERVAL_VARIABLE,
                )

    def _copy(
        self,
        generation: Generation,
        model: DistributedModel,
        optimizer: DistributedOptimizer | None,
        content: Callable[[], bytes],
        moment: ScriptPosition,
    ) -> Outgoing | None:
        """Copy the state, and return the part to send to the buddy: tensors that other hosts do not have.

        Returns None if no copy was made.
        """
        tensors: list[torch.Tensor] = []

        def keep(_: str, tensor: torch.Tensor) -> str:
            tensors.append(tensor.detach())
            return stand_in(len(tensors) - 1)

        session = self._session
        made = KnownContents.of(session, model, optimizer, self._share)
        # What only this host has comes first, so that it lies together.
        only = {name: made.files[name](keep) for name in made.files if name not in made.elsewhere}  # type: ignore[arg-type]
        only[random_file(self._rank)] = moment.random
        first = len(tensors)
        files: dict[str, Any] = {**only, **{n: made.files[n](keep) for n in made.files if n in made.elsewhere}}  # type: ignore[arg-type]
        newest = self._rooms.newest
        if newest is not None and not self._all_have(newest):
            return None
        if self._buddies is not None:
            self._buddies.wait()  # the former copy must be in place on the buddy before an older one is overwritten
        if newest is not None:
            self._remove_older()
        slots = slots_of(tensors)
        try:
            index, data = self._rooms.make_room(slots)
            with torch.no_grad():
                data.copy(tensors, session.ranks.device)
            layout = self._layout(Report(None, {}, made.pieces, made.parameters, made.buffers), model, optimizer)
            places = [[slot.offset, list(slot.shape), str(slot.dtype)] for slot in slots]
            head = {
                "world": len(self._everyone),
                "layout": layout,
                "data": data.path.name,
                "slots": places,
                "files": files,
                "texts": files_of_job(model, content(), moment) if self._rank == 0 else {},
                "steps": session.progress.step,
                "step": current_record().step,
                "saved": time.time(),
            }
            self._rooms.complete(index, generation, head)
        except OSError as error:
            self._give_up(error, slots)
            return None
        self._progress.note(self._rank, generation.number)
        if self._buddies is None and self._has_older and self._all_have(generation):
            self._remove_older()
        sent = slots[:first]
        return Outgoing(
            generation,
            {**head, "files": only, "slots": places[:first]},
            self._layouts[-1],
            data.bytes[: sent[-1].offset + sent[-1].bytes if sent else 0],
            int(data.path.name.split(".")[2]),
        )

    def _remove_older(self) -> None:
        """Remove copies of earlier starts, because all ranks have a copy of this start."""
        if self._has_older and self._rank == self._neighbours[0]:
            remove_older(self._folder, self._start)
        self._has_older = False

    def _all_have(self, generation: Generation) -> bool:
        """Wait until all ranks of this host have the generation, and return whether they do.

        This costs little, since a step makes these ranks wait for each other anyway.
        """
        patience = min(timeout_seconds(), 5.0)
        if self._progress.wait(self._neighbours, generation.number, patience):
            return True
        if self._progress.least(self._neighbours) is None:
            self._end()
        return False

    def _end(self) -> None:
        """Copy nothing any more, and give the memory back; the ranks go on agreeing until all know of it."""
        self.is_on = False
        self._progress.turn_off(self._rank)
        self._rooms.clear()

    def _layout(self, report: Report, model: DistributedModel, optimizer: DistributedOptimizer | None) -> str:
        """Return the name of the file that describes the copy's tensors; write a new one if they have changed."""
        if self._report != report:
            self._reports += 1
            told: dict[str, Any] = {"report": report.to_json()}
            if self._rank == 0:
                described = describe(self._session, "memory", model, optimizer)
                told["described"] = dataclasses.asdict(described)
            path = self._folder / of_rank(self._start, self._rank, self._reports, "layout")
            path.write_text(json.dumps(told))
            self._report = report
            self._layouts.append(path)
            for former in self._layouts[:-2]:  # two generations are kept
                former.unlink(missing_ok=True)
            del self._layouts[:-2]
        return self._layouts[-1].name

    def _give_up(self, error: OSError, slots: tuple[StoredTensor, ...]) -> None:
        needed = 2 * (slots[-1].offset + slots[-1].bytes) if slots else 0
        usage = shutil.disk_usage(self._folder)
        logger.warning(
            "memory checkpoints end: two copies of the state of rank %d take %s bytes of shared memory, and %s of %s bytes of %s "
            "are free (%s); give the container more shared memory, or leave %s away",
            self._rank,
            f"{needed:,}",
            f"{usage.free:,}",
            f"{usage.total:,}",
            self._folder.parent,
            error.strerror or error,
            MEMORY_VARIABLE,
        )
        self._end()


def _identity(folder: str) -> tuple[int, ...]:
    """Return the device and inode of a folder; empty if there is none."""
    try:
        found = os.stat(folder)
    except OSError:
        return ()
    return found.st_dev, found.st_ino
