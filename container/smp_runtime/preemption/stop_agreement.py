"""An agreement on the step after which all ranks stop.

A signal to any rank asks for it. As long as there is no request, the ranks exchange no messages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smp_runtime.checkpoint.rank_agreement import SecondConnection, second_connection
from smp_runtime.comm.authentication import ForgedError, Seal
from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane

logger = logging.getLogger("smp")

#: Seconds between two looks of a rank at the store, and how many looks of all ranks the store shall answer in a second.
_LOOK_SECONDS = 0.1
_LOOKS_PER_SECOND = 1000

#: Seconds between two looks of a rank that waits for the answer.
_ANSWER_PAUSE_SECONDS = 2e-3

#: Keys: who asked, which step each rank will finish next, and after which all stop.
_ASKED, _NEXT, _LAST = "asked", "next", "last"

#: In place of a step: a rank has left the job, or its step is unknown; then no rank stops.
_NEVER = -1


class StopAgreement:
    """An agreement with the other ranks on the step after which all stop.

    Every rank makes one, and calls :meth:`finished_step` after each step. As long as there is no request, this
    costs one check of a flag. A thread of every rank looks for a request, its own or another rank's. When it has
    found one, it announces the step that its rank finishes next. From then on a rank that finishes a step waits,
    once, for the decision of rank 0. The decision is the greatest of these numbers.

    No rank has finished that step yet, because each rank that could have waits. No rank waits for a step of
    another rank, because the threads answer. So all ranks stop after the same step, and none before the others
    have finished the work that they have begun.

    Args:
        told: rank 0's log message when the ranks have agreed, with ``%s`` for the reason.

    Raises:
        DeadlineError: from :meth:`finished_step`, if rank 0 does not answer.
    """

    def __init__(
        self, control: ControlPlane, told: str = "asked to stop by %s: all ranks finish the same step, save and end"
    ) -> None:
        self._control = control
        self._told = told
        #: From handlers of signals, which may run between any two instructions: such a queue allows it, a lock or an event not.
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below, which the thread reads and writes together
        self._finished = 0
        self._is_asked = False
        self._last: int | None = None  # the script's thread alone
        self._reason = ""
        self._handler: _Handler | None = None
        self._board: _Board | None = None
        self._thread: threading.Thread | None = None
        self._asks_all = False
        if control.size > 1:
            found = second_connection(control, "smp-stop", "stops")
            if all(control.allgather(found is not None, list(range(control.size)))) and found is not None:
                self._board = _Board(found)
                # Training must not wait for the store, which answers when some rank has asked for a stop.
                self._thread = threading.Thread(target=self._serve, name="smp-stop", daemon=True)
                self._thread.start()
            else:
                self._asks_all = True  # an older PyTorch: no thread may use the store
                if control.rank == 0:
                    logger.info(
                        "the ranks ask each other after every step whether to stop; a newer PyTorch needs no such call"
                    )

    def request(self, reason: str) -> None:
        """Ask for a stop; a handler of a signal may call it.

        Args:
            reason: such as ``SIGTERM``.
        """
        self._requests.put(reason)

    def finished_step(self) -> str | None:
        """Record that this rank has finished a step; every rank calls it equally often.

        Returns:
            The reason why all ranks stop now, after this step; None to continue.
        """
        if self._asks_all:
            said = self._control.allgather(self._asked_here(), list(range(self._control.size)))
            return next((reason for reason in said if reason), None)
        if self._board is None:
            return self._asked_here()
        # Together: the other thread must name a step that this one has not finished when it reads the flag.
        with self._lock:
            self._finished += 1
            is_asked = self._is_asked
        if not is_asked:
            return None
        if self._last is None:
            self._last = self._decision(self._board)
        return self._reason if self._finished == self._last else None

    def close(self) -> None:
        """End the agreement: notify the other ranks, and restore the default signal handler."""
        if self._handler is not None:
            self._handler.remove()
        if self._thread is not None:
            self._requests.put(None)
            # It may be waiting for an answer of ranks that are gone.
            self._thread.join(timeout_seconds())
            self._thread = None

    def _asked_here(self) -> str | None:
        """Return the reason for a stop that this rank was given; it stays."""
        if not self._reason:
            with contextlib.suppress(queue.Empty):
                self._reason = self._requests.get_nowait() or ""
        return self._reason or None

    # -- the script's thread ---------------------------------------------------------------------------------------

    def _decision(self, board: _Board) -> int:
        """Block until rank 0 has decided, and return the step after which all ranks stop.

        Every rank's thread answers, independent of its script.
        """
        deadline = time.monotonic() + timeout_seconds()
        while True:
            try:
                last = board.read(_LAST)
            except (RuntimeError, ForgedError) as error:  # the store is gone with rank 0, which has left
                logger.info("the ranks do not stop together: %s", str(error).splitlines()[0])
                return _NEVER
            if last is not None:
                self._reason = last[1]
                return int(last[0])
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rank {self._control.rank} was asked to stop after step {self._finished} and waited {timeout_seconds():g} s "
                    "for rank 0, which tells after which step all stop; look for the first error of that rank, or raise "
                    "SMP_TIMEOUT_SECONDS"
                )
            time.sleep(_ANSWER_PAUSE_SECONDS)

    # -- this rank's thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        if self._board is None:
            raise AssertionError("a thread without a store")
        try:
            reason = self._found_request(self._board)
            self._answer(self._board, reason)
        except ForgedError:
            logger.warning(
                "rank %d: what the job's store has in the place of a request to stop is not from a rank of this job: another "
                "process writes to the store; keep its port from others. This job does not stop between two steps",
                self._control.rank,
            )
            with contextlib.suppress(RuntimeError):
                self._answer(self._board, None)  # others may wait for this rank
        except RuntimeError:
            pass  # the store is gone: rank 0 has left, and no other rank stops either

    def _found_request(self, board: _Board) -> str | None:
        """Block until any rank was asked to stop, and return the reason; None when this rank leaves."""
        pause = max(_LOOK_SECONDS, self._control.size / _LOOKS_PER_SECOND)
        while True:
            with contextlib.suppress(queue.Empty):
                reason = self._requests.get(timeout=pause)
                if reason is not None:
                    board.write(_ASKED, [reason])
                return reason
            if (asked := board.read(_ASKED)) is not None:
                return str(asked[0])

    def _answer(self, board: _Board, reason: str | None) -> None:
        rank, size = self._control.rank, self._control.size
        coming = _NEVER
        if reason is not None:
            # Together: the main thread must not finish a step between the two, or it would not stop after it.
            with self._lock:
                self._is_asked = True
                coming = self._finished + 1
        board.write(f"{_NEXT}/{rank}", coming)
        if rank != 0:
            return
        steps = [coming]
        for other in range(1, size):
            while (step := _NEVER if _NEVER in steps else board.read(f"{_NEXT}/{other}")) is None:
                with contextlib.suppress(queue.Empty):  # a second request changes nothing, and leaving ends it
                    if self._requests.get(timeout=_ANSWER_PAUSE_SECONDS) is None:
                        step = _NEVER
                        break
            steps.append(int(step))
        last = _NEVER if _NEVER in steps else max(steps)
        board.write(_LAST, [last, reason or ""])
        if last != _NEVER:
            logger.warning(self._told, reason)

    # -- signals ---------------------------------------------------------------------------------------------------

    def listen(self) -> bool:
        """Let SIGTERM ask for a stop, unless the script has a handler of its own for it.

        Returns:
            Whether it does; this rank stops with the others in any case.
        """
        # Python lets only the main thread set handlers.
        if threading.current_thread() is not threading.main_thread() or script_handles_stops():
            return False
        handler = _Handler(self.request)
        signal.signal(signal.SIGTERM, handler)
        self._handler = handler
        return True


class _Handler:
    """Asks for a stop when a signal comes."""

    def __init__(self, request: Callable[[str], None]) -> None:
        self._request = request
        self._process = os.getpid()
        self._was_called = False

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() == self._process:
            self._was_called = True
            self._request(signal.Signals(number).name)
            return
        signal.signal(number, signal.SIG_DFL)  # a child that was forked ends as it would have
        os.kill(os.getpid(), number)

    def remove(self) -> None:
        """Restore the default handler, unless the signal has come.

        After a first signal, a second one must not end the process while it stops.
        """
        is_there = signal.getsignal(signal.SIGTERM) is self and threading.current_thread() is threading.main_thread()
        if is_there and not self._was_called:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def script_handles_stops() -> bool:
    """Return whether the script has its own handler for SIGTERM, or ignores it."""
    former = signal.getsignal(signal.SIGTERM)
    return former not in (signal.SIG_DFL, None) and not isinstance(former, _Handler)


class _Board:
    """The ranks' messages to each other: JSON under keys of the store, each sealed for its key."""

    def __init__(self, connection: SecondConnection) -> None:
        self._store = connection.store
        self._seal = Seal(connection.secret)
        # Unique to this agreement, even if a job has several, one after the other.
        self._title = self._seal.derived("title", b"").hex()[:16]

    def write(self, name: str, value: Any) -> None:
        key = f"{self._title}/{name}"
        self._store.set(key, self._seal.close(key, json.dumps(value).encode()))

    def read(self, name: str) -> Any:
        """Return the value that was written, or None; never block, so that threads may share the connection.

        Raises:
            ForgedError: no rank of this job has written it.
            RuntimeError: the store is gone.
        """
        key = f"{self._title}/{name}"
        if not self._store.check([key]):
            return None
        return json.loads(self._seal.open(key, self._store.get(key)))
