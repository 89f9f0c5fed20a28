"""Queued work, executed late and in an order that is drawn by lot among those that streams and events allow."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

import torch

from smp_emulation.checked.streams.clocks import VectorClock
from smp_emulation.errors import CudaCallError

#: Seconds that a host waits for queued work before it reports the work that hangs.
PATIENCE = 120.0
#: Seconds after which work that other ranks wait for begins although this host has not asked for it.
_DELAY = 0.002


class QueuedWork:
    """An item in the queue of a stream.

    Args:
        run: does the work; None if only ``needs`` count. Work that another thread does is started by ``begin``.
        begin: starts the work and returns at once; its argument is the function to call when the work is done.
        needs: work of other streams that must be done before.
        what: a name, for messages.
    """

    __slots__ = ("begin", "begun", "done", "needs", "previous", "run", "what")

    def __init__(
        self,
        run: Callable[[], None] | None,
        needs: tuple[QueuedWork, ...] = (),
        what: str = "",
        begin: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.run = run
        self.begin = begin
        self.needs = needs
        self.what = what
        self.previous: QueuedWork | None = None
        self.begun = False
        self.done = False

    @property
    def is_ready(self) -> bool:
        """Return whether the work may run, provided it is the first in its stream."""
        return not self.begun and all(need.done for need in self.needs)


class Lane:
    """The queue of one stream, and what its last work knows of.

    Args:
        actor: its number in clocks.
        name: for messages.
    """

    def __init__(self, actor: int, name: str) -> None:
        self.actor = actor
        self.name = name
        self.clock = VectorClock()
        self.queue: deque[QueuedWork] = deque()
        self.last: QueuedWork | None = None

    def __repr__(self) -> str:
        return self.name


class Executor:
    """Runs queued work on a thread of its own: when the host waits for some of it, or other ranks may.

    The thread has none of the modes that the program is in. A host that waits draws whether all that may run does, or
    only what it waits for.

    Args:
        seed: of the orders.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        #: Guards everything here and in the lanes' queues.
        self.changed = threading.Condition(threading.RLock())
        self._lanes: list[Lane] = []
        self._targets: list[QueuedWork] = []
        self._outside: deque[QueuedWork] = deque()
        self._error: BaseException | None = None
        self._ends = False
        # The device works beside the host, as a GPU does: otherwise no missing wait would show.
        self._thread = threading.Thread(target=self._serve, name="emulated-device", daemon=True)
        self._thread.start()

    def add(self, lane: Lane) -> None:
        """Register a new stream."""
        with self.changed:
            self._lanes.append(lane)

    def queue(self, lane: Lane, item: QueuedWork) -> QueuedWork:
        """Append work to the queue of a stream."""
        with self.changed:
            last = lane.last
            is_behind = last is not None and not last.done
            item.previous = last if is_behind else None
            lane.queue.append(item)
            lane.last = item
            if item.begin is not None:
                self._outside.append(item)
            # Other ranks may wait for such work, so the thread goes on without a host that waits here.
            if self._outside:
                self.changed.notify_all()
        return item

    def finish(self, items: Iterable[QueuedWork | None]) -> None:
        """Block the host until these items are done.

        Raises:
            CudaCallError: some work has failed, now or earlier, or the device makes no progress.
        """
        wanted = [item for item in items if item is not None and not item.done]
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            # Before the wait: the thread sleeps while it has no targets.
            self._targets += wanted
            self.changed.notify_all()
            for item in wanted:
                while not item.done and self._error is None:
                    has_changed = self.changed.wait(1.0)
                    if not has_changed and time.monotonic() > deadline:
                        raise CudaCallError(self._stuck())
            self._raise()

    def look(self, item: QueuedWork | None) -> bool:
        """Return whether work is done, for a host that polls and does not wait; it may run some work meanwhile."""
        if item is None or item.done:
            self._raise()
            return True
        if self._random.random() < 0.5:
            # A step in any case: a host that polls must get "yes" some time.
            self.finish(need for need in (*item.needs, item.previous) if need is not None)
            if item.begin is None:
                self.finish([item])
        return item.done

    def close(self) -> None:
        """End the thread and discard its queued work."""
        with self.changed:
            self._ends = True
            self.changed.notify_all()
        # Outside of the lock, which the thread needs to end. Not for ever: an operation may hang.
        self._thread.join(5)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        # Autograd has recorded the operations when they were queued.
        torch.set_grad_enabled(False)
        with self.changed:
            while not self._ends:
                self._targets = [item for item in self._targets if not item.done]
                # Some have begun meanwhile, for other work that needed them.
                while self._outside and self._outside[0].begun:
                    self._outside.popleft()
                # No host waits for it here, so it may run at any time, as on a GPU.
                if not self._targets and self._outside:
                    self.changed.wait(self._random.random() * _DELAY)
                targets = self._targets or list(self._outside)[:1]
                if targets:
                    self._work(list(targets))
                else:
                    self.changed.wait()

    def _work(self, targets: list[QueuedWork]) -> None:
        """Run what the targets need, and perhaps more, until they have begun or nothing may run; the lock is held."""
        # Sometimes work runs that nothing waits for yet: a GPU does not hold it back either.
        needed = None if self._random.random() < 0.3 else _before(targets)
        while not self._ends and self._error is None and not all(item.begun for item in targets):
            lanes = self._ready_lanes(needed)
            if not lanes:
                break
            # Any order that events and streams allow: a missing wait shows in some of them.
            self._step(self._random.choice(lanes))
        self.changed.notify_all()
        is_done = self._error is None and all(item.done for item in targets)
        # Collectives end on other threads, which notify.
        if not is_done:
            self.changed.wait(0.5)

    def _ready_lanes(self, needed: Collection[int] | None) -> list[Lane]:
        """Return the streams whose first work may run; ``needed`` are the ids of work that counts, None for all."""
        ready = [lane for lane in self._lanes if lane.queue and lane.queue[0].is_ready]
        if needed is None:
            return ready
        return [lane for lane in ready if id(lane.queue[0]) in needed]

    def _step(self, lane: Lane) -> None:
        item = lane.queue[0]
        item.begun = True
        try:
            if item.begin is not None:
                item.begin(lambda error=None: self._over(lane, item, error))  # type: ignore[misc]
                return
            if item.run is not None:
                item.run()
        except BaseException as error:  # raised when the host waits
            error.add_note(f"in {item.what}") if hasattr(error, "add_note") else None
            self._error = self._error or error
        self._end(lane, item)

    def _over(self, lane: Lane, item: QueuedWork, error: BaseException | None) -> None:
        # Called on the thread of a collective.
        with self.changed:
            self._error = self._error or error
            self._end(lane, item)
            self.changed.notify_all()

    @staticmethod
    def _end(lane: Lane, item: QueuedWork) -> None:
        item.done = True
        item.run = item.begin = item.previous = None
        item.needs = ()
        lane.queue.popleft()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stuck(self) -> str:
        heads = [f"{lane.name}: {lane.queue[0].what}" for lane in self._lanes if lane.queue]
        return f"the device has not moved on for {PATIENCE:.0f} s; first in the queues: {'; '.join(heads) or 'nothing'}"


def _before(targets: Iterable[QueuedWork]) -> set[int]:
    """Return the ids of all work that must be done before the targets, and of the targets."""
    found: set[int] = set()
    waiting = [item for item in targets if not item.done]
    while waiting:
        item = waiting.pop()
        if id(item) in found or item.done:
            continue
        found.add(id(item))
        waiting += item.needs
        if item.previous is not None:
            waiting.append(item.previous)
    return found
