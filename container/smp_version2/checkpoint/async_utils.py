"""Saves that are written while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from smp_records.records import FailureRecord, format_failure
from smp_runtime.comm.waiting import timeout_seconds
from smp_runtime.errors import DeadlineError
from smp_runtime.job import session
from smp_version2.checkpoint.agreement import agree, list_ranks

if TYPE_CHECKING:
    from smp_runtime.job.session import Session

logger = logging.getLogger("smp")


@dataclass
class _PendingSave:
    """One save.

    Attributes:
        thread: writes it. The thread alone sets ``error``, before it ends; others read it after.
    """

    number: int
    what: str
    thread: threading.Thread = field(init=False)
    error: Exception | None = None

    def begin(self, save: Callable[[], object]) -> None:
        """Start to write."""
        # A daemon, since a failed rank must not wait for it at its end; the session waits in good order.
        self.thread = threading.Thread(target=self._run, args=(save,), name="smp-async-save", daemon=True)
        self.thread.start()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            save()
        except Exception as error:
            logger.error("%s", error)  # now, since the script may ask much later
            self.error = error

    def wait(self) -> None:
        """Block until it has ended.

        Raises:
            DeadlineError: it took longer than ``SMP_TIMEOUT_SECONDS``.
        """
        self.thread.join(timeout_seconds())
        if self.thread.is_alive():
            raise DeadlineError(
                f"the checkpoint {self.what}, which is written in the background, is not complete after {timeout_seconds():.0f} s; "
                "look at the disk and at the other ranks, or raise SMP_TIMEOUT_SECONDS"
            )


class AsyncCallsQueue:
    """Saves that are under way: at most one, since the next one waits for it."""

    def __init__(self) -> None:
        self._pending: list[_PendingSave] = []
        self._number = 0
        self._session: weakref.ref[Session] | None = None
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def maybe_finalize_async_calls(
        self, blocking: bool = True, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
    ) -> list[int]:
        """Return the numbers of saves that have ended since the last call, and raise their errors.

        Args:
            blocking: wait for saves that are under way.
            process_group: ranks that all make this call, and all learn of an error of one of them; None if each asks for itself.
                PyTorch brings an error to all ranks of the save in any case.
            skip_sync: ask for this rank only, whatever the group.

        Raises:
            CheckpointError: a checkpoint could not be written.
            DeadlineError: writing took longer than ``SMP_TIMEOUT_SECONDS``.
        """
        problem: Exception | None = None
        if blocking:
            try:
                for save in self._pending:
                    save.wait()
            except DeadlineError as error:  # reported below, so that other ranks do not wait for this one
                problem = error
        has_ended = not any(save.thread.is_alive() for save in self._pending)
        together = process_group is not None and not skip_sync
        if together and not blocking:
            states: list[bool] = [False] * dist.get_world_size(process_group)
            dist.all_gather_object(states, has_ended, group=process_group)
            has_ended = all(states)
        if not has_ended and problem is None:
            return []
        ended, self._pending = self._pending, []
        problem = problem or next((save.error for save in ended if save.error is not None), None)
        if together:
            agree(problem, process_group)
        if problem is not None:
            raise problem
        return [save.number for save in ended]

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of saves whose end no call has reported yet."""
        return len(self._pending)

    def begin(self, save: Callable[[], object], what: str) -> int:
        """Run a save on a thread, after the one before it; return its number.

        Args:
            what: the checkpoint, for messages.
        """
        self.maybe_finalize_async_calls(blocking=True)
        self._number += 1
        made = _PendingSave(self._number, what)
        self._pending.append(made)
        made.begin(save)
        return made.number

    def group_of(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Return a second process group of the same ranks, for the thread: training uses the first one meanwhile.

        All ranks of the group call it; the first time they make it, over the CPU.
        """
        self._follow(session.current_session())
        ranks = tuple(list_ranks(group))
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_seconds()),
                backend="gloo",
                use_local_synchronization=True,  # ranks with copies of the same state may not save
            )
        return self._groups[ranks]

    def _follow(self, current: Session) -> None:
        """Let a session wait for this queue when it closes. Groups end with their session."""
        if self._session is None or self._session() is not current:
            self._session = weakref.ref(current)
            self._groups = {}
            current.at_close.append(self._finish)
            _end_with_code()

    def _finish(self) -> None:
        """Wait for pending saves, unless this rank has failed: others may then never finish theirs."""
        current = self._session() if self._session is not None else None
        pending, self._session, self._groups = self._pending, None, {}
        if current is not None and current.has_failed:
            self._pending = []
            for save in pending:
                if save.thread.is_alive():
                    logger.warning("the checkpoint %s is not complete, since this rank has failed", save.what)
            return
        try:
            self.maybe_finalize_async_calls(blocking=True)
        except Exception as error:
            # The interpreter would report an error of an exit handler and end with code 0: the job would seem to have worked.
            if not threading.main_thread().is_alive():
                rank = current.ranks.rank if current is not None else 0
                trace = "".join(traceback.format_exception(error))
                _lost.append(FailureRecord.of(rank, os.environ.get("SM_CURRENT_HOST", ""), error, trace))
            raise


#: The queue of ``async_save`` if a script passes none.
DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue()

#: Saves that failed while the process was ending.
_lost: list[FailureRecord] = []


def _end_with_code() -> None:
    """Let the process fail if a save fails while it ends."""
    for handler in (_exit_if_lost, session.shutdown):  # the last one registered runs first
        atexit.unregister(handler)
        atexit.register(handler)


def _exit_if_lost() -> None:
    if not _lost:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if "smp_launch" in sys.modules:  # it started this process, and reads the reason of the failure from this line
        os.write(2, (format_failure(_lost[0]) + "\n").encode())
    os._exit(1)
