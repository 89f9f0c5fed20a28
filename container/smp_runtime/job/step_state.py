"""What of a step runs on this rank: the microbatch, the backward pass, the tracing step."""

from __future__ import annotations

import threading
import types
from typing import Any


class StepState:
    """Set by the step, by a pipeline's tasks and by ``model.backward``; read by the strategies.

    Args:
        has_threads: whether microbatches run on threads of their own, several at once, as tasks of a pipeline do.
            Otherwise a microbatch is the whole rank's: autograd runs the hooks of a GPU's backward pass on a thread
            of its own.

    Attributes:
        seed_scale: what the backward pass that runs has multiplied its losses with.
        is_tracing: whether the step that runs only traces the model, to partition it.
        count: steps that have ended.
    """

    def __init__(self, *, has_threads: bool) -> None:
        self._here: Any = threading.local() if has_threads else types.SimpleNamespace()
        self.seed_scale = 1.0
        self.is_tracing = False
        self.count = 0

    @property
    def microbatch(self) -> int | None:
        """The microbatch that runs, with pipeline parallelism on the calling thread; None outside a step."""
        return getattr(self._here, "microbatch", None)

    @microbatch.setter
    def microbatch(self, value: int | None) -> None:
        self._here.microbatch = value
