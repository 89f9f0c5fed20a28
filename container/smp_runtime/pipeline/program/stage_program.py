"""The other stages' side of the step program: the requests that a stage runs without being asked one by one."""

from __future__ import annotations

from collections.abc import Sequence

from smp_runtime.pipeline.program.root_program import MOST_PROGRAMS
from smp_runtime.pipeline.transport.messages import AllDone, BackwardCall, Done, ForwardCall

_Groups = dict[int, Sequence[ForwardCall | BackwardCall]]


class StageProgram:
    """The programs of one stage, and how far it is in that of the running step; guarded by the pipeline's lock."""

    def __init__(self) -> None:
        self._kept: dict[int, _Groups] = {}
        self.clear()

    def begin(
        self, program: tuple[int, Sequence[tuple[int, Sequence[ForwardCall | BackwardCall]]] | None] | None
    ) -> None:
        """Begin a step; None: it has no program."""
        self.clear()
        if program is None:
            return
        number, groups = program
        if groups is not None:
            self._kept[number] = dict(groups)
            if len(self._kept) > MOST_PROGRAMS:
                del self._kept[next(iter(self._kept))]
        self._waiting.update(self._kept[number])
        for messages in self._waiting.values():
            for message in messages:
                self._calls[message.microbatch] = self._calls.get(message.microbatch, 0) + 1

    def clear(self) -> None:
        """Clear the state at the end of the step."""
        self._waiting: _Groups = {}
        #: Calls of the program on this stage, by microbatch.
        self._calls: dict[int, int] = {}
        self._done: dict[int, list[Done]] = {}
        self._finished: dict[int, tuple[int, ...]] = {}
        self._is_left = False

    def begin_group(self, group: int, finished: tuple[int, ...]) -> Sequence[ForwardCall | BackwardCall]:
        """Return the requests that begin with a tensor of a group, the first time.

        Args:
            finished: microbatches that the sender reports as finished.
        """
        self._finished.setdefault(group, finished)
        return self._waiting.pop(group, ())

    def finished_in(self, group: int) -> tuple[int, ...]:
        """Return the finished microbatches that a tensor of a group tells the next stage of."""
        return self._finished.get(group, ())

    def call_done(self, done: Done) -> list[Done | AllDone]:
        """Return the news for the root stage when a call of the program is done.

        One message is enough for all calls of a microbatch, since the root stage waits for the last.
        """
        if self._is_left:
            return [done]
        others = self._done.setdefault(done.microbatch, [])
        others.append(done)
        if len(others) < self._calls[done.microbatch]:
            return []
        del self._done[done.microbatch]
        return [AllDone(done.microbatch)]

    def leave(self) -> list[Done]:
        """Handle that the root stage has left the program; return the news that it waits for now.

        Groups that it has begun are still run.
        """
        self._is_left = True
        done, self._done = self._done, {}
        return [each for of_microbatch in done.values() for each in of_microbatch]
