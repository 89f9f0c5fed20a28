"""Sending and receiving of the messages of a rank's steps, over its transport.

Messages of a step wait until this rank has entered it, and those of an aborted step are dropped. If a rank
served requests of the next step early, it would add gradients that its script has not cleared yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from smp_runtime.errors import SMPRuntimeError
from smp_runtime.pipeline.transport.messages import (
    UNCOUNTED,
    AllDone,
    Begin,
    Done,
    Fail,
    Release,
    Stamped,
    from_plain,
    to_plain,
)
from smp_runtime.pipeline.transport.transport import PipelineTransport

if TYPE_CHECKING:
    from smp_runtime.comm.control import ControlPlane
    from smp_runtime.pipeline.execution.failures import Alarm

#: News that the stage which has asked for the work waits for. A union would be made anew at each question.
_ENDS = (Done, AllDone)

_Waiting = tuple[int, Stamped, list[torch.Tensor]]

#: Takes a message of the step that runs: sender, message, tensors; called on the thread that receives from that stage.
Handler = Callable[[int, Any, list[torch.Tensor]], None]


class Messenger:
    """A filter that passes each message to the step that it belongs to.

    Its own state is guarded by the pipeline's lock, but it calls the handlers without the lock: a slow handler
    would keep all tasks from going on. One thread receives from each stage, so that the messages of one stage
    are handled in the order in which they were sent.

    Args:
        counts: whether messages are counted, so that all stages together can see that none is under way.

    Attributes:
        step: number of the step that runs, or ran last.
    """

    transport: PipelineTransport
    _alarm: Alarm
    _handlers: Mapping[type, Handler]
    _stages = 0

    def __init__(self, lock: threading.RLock, *, counts: bool = False) -> None:
        self._lock = lock
        self._early: list[_Waiting] = []
        self._is_open = self._has_begun = False
        self._news: dict[int, list[Done | AllDone | Release]] = {}
        self.step = 0
        self.counts = counts
        #: Messages of the step, by stage.
        self.sent: list[int] = []
        self.handled: list[int] = []

    def connect(
        self,
        control: ControlPlane,
        ranks: Sequence[int],
        device: torch.device,
        handlers: Mapping[type, Handler],
        alarm: Alarm,
        **options: Any,
    ) -> None:
        """Connect with the other stages, as :class:`PipelineTransport`; every rank of the pipeline calls it."""
        self._handlers, self._alarm, self._stages = handlers, alarm, len(ranks)
        self.transport = PipelineTransport(
            control,
            ranks,
            device=device,
            on_message=self.receive,
            afterthought=self._news_for,
            on_lost=alarm.lost_stage,
            on_failed=alarm.broken,
            on_left=alarm.left_stage,
            **options,
        )

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, stage: int, message: Any, tensors: Sequence[torch.Tensor] = (), *, copy: bool = True) -> None:
        """Send a message of this step; None sends only the pending news.

        Args:
            copy: False promises that the tensors' memory does not change any more.

        Raises:
            StageError: that stage has left.
        """
        self._alarm.check_left((stage,))
        try:
            self.transport.send(stage, self.stamp(stage, message), tensors, copy=copy)
        except SMPRuntimeError:
            # The stage may have left meanwhile: that error is more precise than a failed send.
            self._alarm.check_left((stage,))
            raise

    def stamp(self, stage: int, message: Any) -> Stamped:
        """Return a message of this step in the form in which it is sent to a stage, with the pending news for that stage."""
        if isinstance(message, UNCOUNTED):
            return self.step, to_plain(message), ()
        # Without the lock: news added meanwhile goes with the next message.
        if not self.counts and not self._news:
            return self.step, _to_plain_or_none(message), ()
        # Tasks and receivers, each on a thread, send and queue news: none may be lost or counted twice.
        with self._lock:
            if self.counts:
                self.sent[stage] += 1
            pending = self._news.pop(stage, ())
            news = tuple(to_plain(each) for each in pending)
            return self.step, _to_plain_or_none(message), news

    def tell_later(self, stage: int, news: Done | AllDone | Release) -> None:
        """Queue the news of an end for a stage; it goes with the next message, or when there is nothing to do.

        The caller holds the lock.
        """
        self._news.setdefault(stage, []).append(news)

    def tell_now(self) -> None:
        """Send all stages the pending news that they wait for; the ends of microbatches can wait.

        The caller holds the lock.
        """
        for stage in self.untold:
            self.send(stage, None)

    @property
    def untold(self) -> list[int]:
        """Return the stages that wait for the news that a request is done.

        No stage waits for the end of a microbatch.
        """
        waiting = []
        for stage, news in self._news.items():
            has_end = any(isinstance(each, _ENDS) for each in news)
            if has_end:
                waiting.append(stage)
        return waiting

    def _news_for(self, stage: int) -> Stamped | None:
        """Return the pending news for a stage, or None if it waits for none any more; runs on a sender's thread."""
        with self._lock:
            # Another message may have taken the news along since this one was wanted.
            return self.stamp(stage, None) if stage in self.untold else None

    # -- the step --------------------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Return whether a step runs."""
        return self._is_open

    def enter(self) -> None:
        """Enter the next step on this rank."""
        with self._lock:
            self.step += 1
            self._is_open, self._has_begun = True, False
            self.sent, self.handled = [0] * self._stages, [0] * self._stages

    def begin(self) -> None:
        """Let messages that came early through, once it is known how the step begins."""
        with self._lock:
            self._has_begun = True
        self.pass_early()

    def leave(self) -> None:
        """Leave the step on this rank; later messages of this step are dropped."""
        with self._lock:
            self._is_open = False
            self._news.clear()

    # -- receiving -------------------------------------------------------------------------------------------------

    def pass_early(self) -> None:
        """Try the messages again that came early."""
        with self._lock:
            early, self._early = self._early, []
        for waiting in early:
            self.receive(*waiting)

    def receive(self, sender: int, stamped: Stamped, tensors: list[torch.Tensor]) -> None:
        """Handle, keep or drop a received message; called on a receiver's thread."""
        step, fields, news = stamped
        message = None if fields is None else from_plain(fields)
        with self._lock:
            if self._is_over(step):
                return
            if self._is_early(step, message):
                self._early.append((sender, stamped, tensors))
                return
        for each in news:
            self._handle(sender, from_plain(each), [])
        if message is not None:
            self._handle(sender, message, tensors)
        # Only now: equal counts of sent and handled messages show that no message is under way any more.
        if self.counts and not isinstance(message, UNCOUNTED):
            self._count_handled(step, sender)

    def _is_over(self, step: int) -> bool:
        if step == self.step:
            return not self._is_open
        return step < self.step

    def _is_early(self, step: int, message: Any) -> bool:
        if step > self.step:
            return True
        return not self._has_begun and not isinstance(message, Begin | Fail)

    def _count_handled(self, step: int, sender: int) -> None:
        with self._lock:
            if step == self.step:  # the handler may have ended the step
                self.handled[sender] += 1

    def _handle(self, sender: int, message: Any, tensors: list[torch.Tensor]) -> None:
        try:
            self._handlers[type(message)](sender, message, tensors)
        except Exception as error:  # the alarm raises it on the script's thread, which waits for the step
            self._alarm.raised(error, f"(a message from stage {sender})")


def _to_plain_or_none(message: Any) -> tuple[Any, ...] | None:
    return None if message is None else to_plain(message)
