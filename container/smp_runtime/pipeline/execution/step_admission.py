"""Messages of a step wait until this rank has entered it, and those of an aborted step are dropped.

A rank that served requests of the next step early would add gradients that its script has not cleared yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from smp_runtime.pipeline.transport.messages import Begin, Done, Fail, Release, Stamped, named, plain

_Waiting = tuple[int, Stamped, list[torch.Tensor]]


class StepAdmission:
    """Lets messages through to the step that they belong to.

    Args:
        lock: of the rank's pipeline.
        deliver: takes a message of the step that runs: sender, message, tensors.

    Attributes:
        step: number of the step that runs, or ran last.
        is_open: whether it runs.
    """

    def __init__(self, lock: threading.RLock, deliver: Callable[[int, Any, list[torch.Tensor]], None]) -> None:
        self._lock = lock
        self._deliver = deliver
        self._early: list[_Waiting] = []
        self._has_begun = False
        self._news: dict[int, list[Done | Release]] = {}
        self.step = 0
        self.is_open = False

    def stamp(self, stage: int, message: Any) -> Stamped:
        """A message of this step, to be sent to a stage, with what it is to hear by the way."""
        if not self._news:
            return self.step, None if message is None else plain(message), ()
        with self._lock:
            news = tuple(plain(each) for each in self._news.pop(stage, ()))
        return self.step, None if message is None else plain(message), news

    def tell_later(self, stage: int, news: Done | Release) -> None:
        """A stage is to hear that something has ended, with the next message or when this rank has nothing to do."""
        self._news.setdefault(stage, []).append(news)

    @property
    def untold(self) -> list[int]:
        """Stages that wait to hear that a request is done; nobody waits to hear that a microbatch is."""
        return [stage for stage, news in self._news.items() if any(isinstance(each, Done) for each in news)]

    def enter(self) -> None:
        """This rank enters the next step."""
        with self._lock:
            self.step += 1
            self.is_open, self._has_begun = True, False

    def begin(self) -> None:
        """It is known how the step begins: messages that came early go through."""
        with self._lock:
            self._has_begun = True
        self.pass_early()

    def leave(self) -> None:
        """This rank leaves the step; what comes of it from now on is dropped."""
        with self._lock:
            self.is_open = False
            self._news.clear()

    def pass_early(self) -> None:
        """Try the messages again that came early."""
        with self._lock:
            early, self._early = self._early, []
        for waiting in early:
            self.receive(*waiting)

    def receive(self, sender: int, stamped: Stamped, tensors: list[torch.Tensor]) -> None:
        """A message has come; called on a receiver's thread."""
        step, fields, news = stamped
        message = None if fields is None else named(fields)
        with self._lock:
            if step < self.step or (step == self.step and not self.is_open):
                return
            if step > self.step or not (self._has_begun or isinstance(message, Begin | Fail)):
                self._early.append((sender, stamped, tensors))
                return
        for each in news:
            self._deliver(sender, named(each), [])
        if message is not None:
            self._deliver(sender, message, tensors)
