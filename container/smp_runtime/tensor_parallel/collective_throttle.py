"""How many collectives may wait on the GPU at once: ``SMP_NCCL_THROTTLE_LIMIT``."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from smp_runtime.errors import SMPUserError

if TYPE_CHECKING:
    from smp_runtime.comm.collectives import Work

VARIABLE = "SMP_NCCL_THROTTLE_LIMIT"
DEFAULT_LIMIT = 8


class Throttle:
    """Lets the CPU run ahead of the GPU by at most ``limit`` collectives.

    Each one that is queued holds on to its buffers, so a CPU far ahead of the GPU raises the peak of memory.

    Args:
        limit: collectives in flight; -1 means any number. On the CPU there is no queue, and no effect.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._events: deque[torch.cuda.Event] = deque()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Throttle:
        """Read the limit.

        Raises:
            SMPUserError: it is neither a positive number nor -1.
        """
        text = (os.environ if environ is None else environ).get(VARIABLE, "")
        try:
            limit = int(text) if text else DEFAULT_LIMIT
        except ValueError:
            limit = 0
        if limit < 1 and limit != -1:
            raise SMPUserError(
                f"{VARIABLE} is {text!r}; it counts collectives that may be in flight at once: set a number from 1, or -1 "
                "for no limit"
            )
        return cls(limit)

    def launched(self, work: Work, tensor: torch.Tensor) -> Work:
        """The collective ``work`` on ``tensor``, counted once it is waited for."""
        return work if self._limit < 0 or tensor.device.type != "cuda" else _Counted(work, self)

    def passed(self) -> None:
        """The stream has been told to wait for a collective; the CPU waits for the oldest when there are too many."""
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._limit:
            self._events.popleft().synchronize()


class _Counted:
    def __init__(self, work: Work, throttle: Throttle) -> None:
        self._work = work
        self._throttle = throttle

    def wait(self) -> None:
        self._work.wait()  # on the GPU: the stream waits, the CPU does not
        self._throttle.passed()
