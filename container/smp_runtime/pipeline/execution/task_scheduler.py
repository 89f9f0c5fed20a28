"""Tasks and the baton: a rank has many unfinished tasks, one worker thread each, and computes in one at a time.

A task is a microbatch's step function, or a module call that another stage requested, or its backward pass.
It runs until it needs a value that another task or stage makes; then it gives the baton back, which ends
one *segment* of it. A planned order decides who gets the baton next. If there is none, the schedule's
policy decides.

One lock guards all state of a rank's pipeline, including the scheduler's. It is re-entrant, because a
function that the scheduler calls with the lock held may call it back (an ended task sends a message that
opens another). A thread that holds the lock never waits for another rank, a task or a socket. A task that
waits gives the lock back first and then blocks on its own ``turn``, and sending only queues bytes. So the
holder of the lock always makes progress, and no cycle of waits can go through the lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_records.rank_record import current_record
from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError
from smp_runtime.pipeline.execution.task import Abandoned, Order, Task, TaskWatch
from smp_runtime.pipeline.schedule.actions import Action, Event, Segment, TaskKind
from smp_runtime.tensors import computing_time
from smp_runtime.tensors.determinism import explained
from smp_runtime.tensors.split_operations import SplitOperations
from smp_runtime.tensors.weight_gradients import split_inside

if TYPE_CHECKING:
    from smp_runtime.microbatch_state.attributes import Attributes
    from smp_runtime.pipeline.schedule.policies import Policy

#: Seconds that worker threads get to end.
CLOSE_SECONDS = 10.0


class TaskScheduler:
    """The scheduler that hands the baton of one rank from task to task.

    All state is guarded by ``lock``, which the server shares. Comments or docstrings of the methods state
    whether the caller holds it.

    Args:
        lock: of the rank's pipeline.
        policy: decides who goes first if no order is planned.
        attributes: of this stage's modules; they change with the microbatch that runs.
    """

    _is_admitted: Callable[[Task], bool]
    _diverged: Callable[[str], None]
    _failed: Callable[[BaseException, str], None]
    _finished: Callable[[Task], Callable[[], None] | None]
    _idle: Callable[[], None]
    _leaves_weights: Callable[[Task], None]
    _pauses: Callable[[Task], None]

    def __init__(
        self,
        lock: threading.RLock,
        stage: int,
        policy: Policy,
        device: torch.device,
        attributes: Attributes | None = None,
        watch: TaskWatch | None = None,
    ) -> None:
        self._lock = lock
        self._stage = stage
        self._policy = policy
        self._device = device
        self._attributes = attributes
        self._watch = watch
        self._waiting: dict[tuple[TaskKind, int, tuple[int, ...]], Task] = {}
        self._by_event: dict[Event, list[Task]] = {}
        self._running: Task | None = None
        # Threads wait here for their next task: to start one for each task would cost more than many tasks take.
        self._idle_threads: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._spare = 0
        self._live = 0
        # Shares the pipeline's lock, since the counts that it waits for change under that lock.
        self._all_ended = threading.Condition(lock)
        self._local = threading.local()
        self.is_aborted = False
        self.order: Order | None = None
        #: Position in the planned order at which the rank halts until a command to go on; None if it does not halt.
        self.limit: int | None = None
        self._granted: tuple[TaskKind, int, tuple[int, ...]] | None = None
        self.records = True
        self.record: list[Segment] = []
        #: When the last segment ended.
        self.last_progress = time.perf_counter()

    def report_to(
        self,
        *,
        is_admitted: Callable[[Task], bool],
        diverged: Callable[[str], None],
        failed: Callable[[BaseException, str], None],
        finished: Callable[[Task], Callable[[], None] | None],
        idle: Callable[[], None],
        leaves_weights: Callable[[Task], None],
        pauses: Callable[[Task], None],
    ) -> None:
        """Set the callbacks, before the first task; all but the last are called with the lock held.

        Args:
            is_admitted: returns whether a new step function task may begin (microbatches in flight).
            diverged: the planned order cannot be followed.
            failed: a task has raised, with its label.
            finished: a task's code has ended; returns a function to call without the lock after the next task has
                the baton.
            idle: no task can run.
            leaves_weights: a segment ends that has left gradients of weights for later.
            pauses: a task is about to wait; called without the lock.
        """
        self._is_admitted = is_admitted
        self._diverged = diverged
        self._failed = failed
        self._finished = finished
        self._idle = idle
        self._leaves_weights = leaves_weights
        self._pauses = pauses

    # -- called by worker threads ----------------------------------------------------------------------------------

    @property
    def current(self) -> Task | None:
        """Return the task that runs on the calling thread, or None."""
        return getattr(self._local, "task", None)

    def wait(
        self, task: Task, events: Iterable[Event], is_there: Callable[[Event], bool], *, goes_on: bool = False
    ) -> None:
        """End the running segment of ``task``; return when ``events`` have come and it has the baton again.

        Args:
            goes_on: its segment goes on afterwards, as if it had not waited: planned steps do not wait here.

        Raises:
            Abandoned: the step has failed meanwhile.
            DeadlineError: the events have not come in time.
        """
        self._pauses(task)
        self._settle()
        with self._lock:
            if self.is_aborted:
                raise Abandoned
            if task.weight_gradients and not goes_on:
                self._leaves_weights(task)
            if goes_on:
                self._pause_segment(task)
            else:
                self._end_segment(task)
            if task.random is not None:
                task.random.capture()
            needs = task.needs
            self._enqueue(task, events, is_there)
            if goes_on:
                task.needs = needs
            else:
                task.part += 1
            if self.order is not None and task.part >= self.order.parts.get(task.key, 0):
                self._diverged(f"{task} waits once more than it did")
            self._running = None
            self._hand_over()
        # Without the lock: whoever hands this task the baton needs it. A turn that was given before this line is not lost.
        arrived = task.turn.acquire(timeout=timeout_seconds())
        if self.is_aborted:
            raise Abandoned
        if not arrived:
            raise DeadlineError(
                f"{task} waited {timeout_seconds():.0f} s for {sorted(task.missing, key=str)[:3]} from other stages; check "
                "that every rank runs the step, or raise SMP_TIMEOUT_SECONDS"
            )
        if task.random is not None:
            task.random.restore()

    # -- called by the server, with the lock held ------------------------------------------------------------------

    def add(self, task: Task, events: Iterable[Event], is_there: Callable[[Event], bool]) -> None:
        """Add a new task, which can begin once ``events`` have come."""
        self._enqueue(task, events, is_there)
        if self.order is not None and task.key not in self.order.parts:
            self._diverged(f"{task} was not asked for in the recorded step")

    def arrived(self, event: Event) -> None:
        """Record that something that tasks may wait for is available."""
        for task in self._by_event.pop(event, ()):
            task.missing.discard(event)

    def poke(self) -> None:
        """Hand the baton to a task that can run, if no task has it."""
        if self._running is None and not self.is_aborted:
            self._hand_over()

    def give(self, task: Task, event: Event) -> None:
        """Note that the running segment has made ``event`` available."""
        if self.records:
            task.gives.append((event, task.spent + computing_time.now() - task.began))

    def reset(self, order: Sequence[Action] | None, *, records: bool = True) -> None:
        """Begin a step, in a planned order if there is one."""
        self.order = None if order is None else Order(order)
        self.limit = self._granted = None
        self.records = records
        self.record = []
        self.is_aborted = False
        self.last_progress = time.perf_counter()

    # While pipelines that run their work in one order leave a planned one, no rank decides by itself what runs next.

    @property
    def position(self) -> int:
        """Return the position in the planned order, or the position where the order was left."""
        if self.order is not None:
            return self.order.position
        return self.limit or 0

    def halt(self) -> None:
        """Begin nothing more: the running segment is the last one until :meth:`go_on_to` or :meth:`grant`."""
        if self.limit is None:
            self.limit = self.position

    def go_on_to(self, limit: int) -> None:
        """Follow the planned order up to a place, and halt there."""
        self.limit = limit
        self.poke()

    def grant(self, key: tuple[TaskKind, int, tuple[int, ...]]) -> None:
        """Run one segment of a waiting task, and halt again; there is no order any more."""
        self.order = None
        self._granted = key
        self.poke()

    def most_urgent(self) -> tuple[tuple[Any, ...], tuple[TaskKind, int, tuple[int, ...]]] | None:
        """Return the urgency and the key of the task that would run next without an order, or None.

        None means that no task can run.
        """
        task = self._choose_freely()
        return None if task is None else (self._urgency(task), task.key)

    def abort(self) -> None:
        """Wake every task of the step, so that it ends."""
        self.is_aborted = True
        self.order = None
        waiting, self._waiting = self._waiting, {}
        self._by_event.clear()
        for task in waiting.values():
            task.turn.release()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until no task of an aborted step runs any more, and return whether that happened in time."""
        with self._lock:
            return self._all_ended.wait_for(lambda: self._live == 0, seconds)

    @property
    def is_running(self) -> bool:
        """Return whether a task has the baton."""
        return self._running is not None

    @property
    def is_stalled(self) -> bool:
        """Return whether tasks could run but the planned order holds them back."""
        if self._running is not None:
            return False
        return any(not task.missing for task in self._waiting.values())

    def waiting_tasks(self) -> list[Task]:
        """Return the tasks that wait for the baton or for values."""
        return list(self._waiting.values())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _enqueue(self, task: Task, events: Iterable[Event], is_there: Callable[[Event], bool]) -> None:
        task.needs = tuple(events)
        task.missing = {event for event in task.needs if not is_there(event)}
        for event in task.missing:
            self._by_event.setdefault(event, []).append(task)
        self._waiting[task.key] = task

    def _settle(self) -> None:
        """Wait for the GPU if the segment is recorded, so that its duration includes the GPU's work.

        A plan made from launch times would not fit.
        """
        if self.records and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _end_segment(self, task: Task) -> None:
        now = computing_time.now()
        current_record().pace.add_task(now - task.began)
        self.last_progress = time.perf_counter()
        if self.records:
            self.record.append(
                Segment(
                    task.action,
                    self._stage,
                    task.spent + now - task.began,
                    task.phase,
                    task.needs,
                    tuple(task.gives),
                    task.label,
                )
            )
            task.gives = []
        task.spent = 0.0
        if self._watch is not None:
            self._watch.segment_ended(task, task.began, now)
        if self._attributes is not None:
            self._attributes.segment_ended()

    def _pause_segment(self, task: Task) -> None:
        self.last_progress, now = time.perf_counter(), computing_time.now()
        task.spent += now - task.began
        current_record().pace.add_task(now - task.began)
        if self._watch is not None:
            self._watch.segment_ended(task, task.began, now)

    def _choose(self) -> Task | None:
        if self._is_halted:
            granted, self._granted = self._granted, None
            return None if granted is None else self._waiting[granted]
        if self.order is None:
            return self._choose_freely()
        following = self.order.next
        if following is not None:
            return self._follow(self.order, following)
        if not self._waiting:
            return None
        self._diverged("there is more to do than in the recorded step")
        if self.limit is not None:
            return None
        return self._choose_freely()

    @property
    def _is_halted(self) -> bool:
        if self.limit is None:
            return False
        return self.order is None or self.order.position >= self.limit

    def _follow(self, order: Order, following: Action) -> Task | None:
        """Return the task of an order's next action and advance the order, or None if the task cannot run yet."""
        key = (following.kind, following.microbatch, following.path)
        task = self._waiting.get(key)
        if task is None or task.missing or task.part != following.part:
            return None
        if not self._may_begin(task):
            return None
        order.position += 1
        return task

    def _choose_freely(self) -> Task | None:
        return min(
            (task for task in self._waiting.values() if not task.missing and self._may_begin(task)),
            key=self._urgency,
            default=None,
        )

    def _urgency(self, task: Task) -> tuple[Any, ...]:
        first, *others = self._policy.urgency(task.phase, task.microbatch)
        # Between the passes: later it would keep more microbatches in flight, earlier it would keep others waiting.
        return first, task.kind is TaskKind.WEIGHTS, *others, task.kind is not TaskKind.STEP, task.path

    def _may_begin(self, task: Task) -> bool:
        begins_microbatch = task.kind is TaskKind.STEP and not task.has_thread
        return not begins_microbatch or self._is_admitted(task)

    def _hand_over(self) -> None:
        """Choose the next task and wake it; afterwards ``_running`` is that task or None."""
        task = self._choose()
        if task is None:
            self._idle()
            return
        del self._waiting[task.key]
        self._running = task
        if self._attributes is not None:
            self._attributes.switch(task.microbatch, is_forward=task.phase is not TaskKind.BACKWARD)
        task.began = computing_time.now()
        if task.has_thread:
            task.turn.release()
        else:
            task.has_thread = True
            self._live += 1
            if getattr(self._local, "is_ending", False):
                # This thread continues with the task. The task already has the baton, so no other thread can take it.
                self._local.next = task
            elif self._spare == 0:
                # A daemon: after a failure its task may wait for a tensor that never comes.
                thread = threading.Thread(target=self._work, args=(task,), name="smp-pipeline-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._spare -= 1
                self._idle_threads.put(task)

    def _work(self, first: Task) -> None:
        """Run tasks on a worker thread, one after the other, until a None in the queue ends it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        task: Task | None = first
        while task is not None:
            self._local.task = task
            try:
                task = self._run(task)
            finally:
                self._local.task = None
            if task is None:
                with self._lock:
                    self._spare += 1
                task = self._idle_threads.get()

    def _run(self, task: Task) -> Task | None:
        """Run a task to its end, and return one that can begin now on the same thread, or None."""
        error = self._raised_by(task)
        if error is None:
            self._settle()
        with self._lock:
            post = self._ended(task, error)
            # Whoever comes next should run on this thread, which is awake: a switch of threads costs more than a small task.
            self._local.is_ending = True
            self.poke()
            self._local.is_ending = False
            following: Task | None = self._local.__dict__.pop("next", None)
        if post is not None:
            try:
                post()
            except Exception as failure:  # no caller is left on this thread to raise it to
                with self._lock:
                    self._failed(failure, task.label)
        return following

    def _raised_by(self, task: Task) -> BaseException | None:
        """Do the work of a task, and return the error that it has raised; None if its step was abandoned."""
        try:
            if task.random is not None:
                task.random.restore()
            # Of this thread, which runs nothing but tasks. So nothing needs to restore it.
            torch.autograd.set_multithreading_enabled(False)
            if self._policy.splits_backward and task.kind is not TaskKind.WEIGHTS:
                with split_inside(task.weight_gradients, SplitOperations()):
                    task.run()
            else:
                task.run()
        except Abandoned:
            pass
        except BaseException as error:  # the caller decides, under the lock, whether it fails the step
            return explained(error)
        return None

    def _ended(self, task: Task, error: BaseException | None) -> Callable[[], None] | None:
        """Handle the end of a task's work, and return a function to call without the lock, or None.

        The caller holds the lock.
        """
        post = None
        self._live -= 1
        is_current = self._running is task
        if is_current:
            if task.weight_gradients and error is None:
                self._leaves_weights(task)
            self._end_segment(task)
            self._running = None
        if error is not None:
            self._failed(error, task.label)
        elif not self.is_aborted and is_current:
            if self.order is not None and task.part + 1 < self.order.parts.get(task.key, 0):
                self._diverged(f"{task} waited less often than it did")
            task.code_done = True
            post = self._finished(task)
        if self._live == 0 and self.is_aborted:
            self._all_ended.notify_all()
        return post

    def close(self) -> None:
        """End the worker threads.

        A thread that still runs native code when the interpreter ends would abort the process.
        """
        for _ in self._threads:
            self._idle_threads.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
