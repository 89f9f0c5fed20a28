"""The root stage's side of the step program: it records the calls of the step function, and later compares them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from smp_runtime.pipeline.program.call_groups import CallGroup, CallKey, PostedCall, StepProgram, make_program
from smp_runtime.pipeline.transport.messages import BackwardCall, ForwardCall, ProgramLeft, Release, ValueMessage

if TYPE_CHECKING:
    import torch

    from smp_runtime.tensors.remote_tensor import Name

logger = logging.getLogger("smp")

#: Calls of one step that a program may have. Each stage keeps its own, a few hundred bytes each.
MOST_CALLS = 20_000
#: Programs that are kept, and that the other stages keep.
MOST_PROGRAMS = 16
#: A kind of step that leaves its program so often in a row gets none any more.
MOST_LEAVINGS = 3


class _HeldCall(NamedTuple):
    """A call that has come as expected, and waits for the rest of its group."""

    stage: int
    message: ForwardCall | BackwardCall
    inline: Mapping[Name, torch.Tensor]
    is_copy: bool  # whether nothing else can change these tensors


class RootProgram:
    """The programs of a pipeline on its root stage.

    Calls are posted by the task that has the baton, so one task at a time. It holds calls back only until its segment ends.
    What other threads use is guarded by the pipeline's lock.

    Args:
        send: sends a message with tensors to a stage.
        release: queues the news that a microbatch is finished for a stage; called with the lock held.
        others: the other stages.
        is_on: whether programs are wanted, and this is the root stage.
    """

    def __init__(
        self,
        lock: threading.RLock,
        send: Callable[..., None],
        release: Callable[[int, Release], None],
        others: Sequence[int],
        *,
        is_on: bool,
    ) -> None:
        self._lock = lock
        self._send = send
        self._release = release
        self._others = others
        self.is_on = is_on
        self._programs: dict[Hashable, StepProgram] = {}
        self._numbers: dict[Hashable, int] = {}
        #: Programs that the other stages keep, the oldest first; they forget in the same order.
        self._sent: deque[tuple[int, Hashable]] = deque()
        self._count = 0
        self._leavings: dict[Hashable, int] = {}
        self._said: set[str] = set()
        self._kind: Hashable = None
        self._reset()

    def _reset(self) -> None:
        self._following: StepProgram | None = None
        #: Why the step has left its program; None if it follows it, or has none.
        self.left: str | None = None
        self._number = 0
        self._is_new = False
        self._posted: dict[int, list[PostedCall]] = {}
        self._waited = False
        #: Groups that are over, by microbatch.
        self._over: dict[int, int] = {}
        self._held: list[_HeldCall] = []
        #: Finished microbatches that stages have not heard of.
        self._finished: dict[int, set[int]] = {stage: set() for stage in self._others}

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin(self, kind: Hashable, *, is_planned: bool) -> None:
        """Begin a step; its program is followed if it has one, and an order is planned.

        Args:
            kind: of step; None if it differs from every other.
        """
        self._reset()
        self._kind = kind
        if not self.is_on or kind is None or not is_planned:
            return
        self._following = self._programs.get(kind)
        if self._following is not None:
            self._number = self._numbers.get(kind) or self._new_number(kind)

    def _new_number(self, kind: Hashable) -> int:
        """Return the number under which the stages will keep a program, and forget the oldest, as they do.

        It counts once a step has gone well: if it fails, some stages may not have got the program.
        """
        self._is_new = True
        self._count += 1
        self._sent.append((self._count, kind))
        if len(self._sent) > MOST_PROGRAMS:
            number, oldest = self._sent.popleft()
            if self._numbers.get(oldest) == number:
                self._forget(oldest)
        return self._count

    def for_stage(self, stage: int) -> tuple[int, object] | None:
        """Return what a stage must know at the beginning of the step: the program's number, and its part if that is new."""
        program = self._following
        if program is None:
            return None
        return self._number, program.of_stage(stage) if self._is_new else None

    def finish(self) -> None:
        """End a step that went well: make a program from its calls, or count that it left the one that it had."""
        kind = self._kind
        if not self.is_on or kind is None:
            return
        if self._following is not None and self.left is None:
            self._numbers[kind] = self._number
            self._leavings.pop(kind, None)
            return
        if self._following is not None:
            self._leavings[kind] = self._leavings.get(kind, 0) + 1
            self._forget(kind)
        if (why := self._obstacle(kind)) is not None:
            self.explain(why)
        elif kind not in self._programs and self._posted:
            self._programs[kind] = make_program(self._posted)

    def _obstacle(self, kind: Hashable) -> str | None:
        """Return why no program is made from the step, or None."""
        if self._leavings.get(kind, 0) >= MOST_LEAVINGS:
            return f"{MOST_LEAVINGS} steps of one kind in a row took another course than the one before ({self.left})"
        count = sum(map(len, self._posted.values()))
        if count > MOST_CALLS:
            return f"a step has {count:,} calls of modules on other stages, and a program at most {MOST_CALLS:,}"
        # The first steps wait for results that no earlier call has shown. They are no reason to say anything.
        if self._waited:
            self._forget(kind)
            self._posted = {}
        return None

    def _forget(self, kind: Hashable) -> None:
        self._programs.pop(kind, None)
        self._numbers.pop(kind, None)

    @property
    def was_followed(self) -> bool:
        """Return whether the last step has followed a program to its end, or does so until now."""
        return self._following is not None and self.left is None

    def explain(self, why: str) -> None:
        """Log why a step has no program, once for each reason."""
        if self.is_on and why not in self._said:
            self._said.add(why)
            logger.info("step_program: steps are run with requests, because %s", why)

    # -- calls of the step function, on the thread of its task -------------------------------------------------------

    def post(
        self,
        task: tuple[int, int],
        stage: int,
        message: ForwardCall | BackwardCall,
        inline: Mapping[Name, torch.Tensor],
    ) -> None:
        """Send a request of the step function, or hold it back until its group is complete.

        Args:
            task: its microbatch, and the segment that runs.
            inline: the tensors of the request.
        """
        if not self.is_on:
            self._send(stage, message, list(inline.values()))
            return
        microbatch, part = task
        self._waited = self._waited or message.wants_reply
        self._posted.setdefault(microbatch, []).append(PostedCall(stage, message, part, time.thread_time()))
        group = self._group_of(microbatch)
        if group is None or not self._is_expected(group, stage, message):
            self.leave(f"a call of {_name_of(message)} is not the one that came before at its place")
            self.send_held()
            self._send(stage, message, list(inline.values()))
            return
        is_last = len(self._held) + 1 == len(group.calls)
        kept = inline
        if inline and not is_last:  # the script may change its tensors in place before they are sent
            kept = {name: tensor.clone() for name, tensor in inline.items()}
        self._held.append(_HeldCall(stage, message, kept, kept is not inline))
        if is_last:
            self._begin_group(group, microbatch)

    def _group_of(self, microbatch: int) -> CallGroup | None:
        """Return the group to which the next call of a microbatch belongs, or None."""
        if self._following is None or self.left is not None:
            return None
        groups = self._following.groups.get(microbatch, ())
        over = self._over.get(microbatch, 0)
        return groups[over] if over < len(groups) else None

    def _is_expected(self, group: CallGroup, stage: int, message: ForwardCall | BackwardCall) -> bool:
        expected = group.calls[len(self._held)]
        return expected.stage == stage and expected.message == message

    def _begin_group(self, group: CallGroup, microbatch: int) -> None:
        """Send the tensors of a group; they stand for its requests."""
        held, self._held = self._held, []
        self._over[microbatch] = self._over.get(microbatch, 0) + 1
        with self._lock:
            finished: set[int] = set()
            for stage in group.reached:
                finished |= self._finished[stage]
                self._finished[stage] = set()
        for stage in group.told:
            calls = [call for call in held if call.stage == stage]
            tensors = {name: tensor for call in calls for name, tensor in call.inline.items()}
            is_copy = all(call.is_copy or not call.inline for call in calls)
            message = ValueMessage(tuple(tensors), group.number, tuple(sorted(finished)))
            self._send(stage, message, list(tensors.values()), copy=not is_copy)

    def send_held(self) -> None:
        """Send the calls that are held back, as requests."""
        held, self._held = self._held, []
        for call in held:
            self._send(call.stage, call.message, list(call.inline.values()))

    def pause(self) -> None:
        """Handle that the step function's task is about to wait: nothing may be held back meanwhile."""
        if self._held:
            self.leave("a call that came before did not come")
            self.send_held()

    def step_function_ended(self, microbatch: int) -> None:
        """Handle the end of the step function for a microbatch."""
        self.pause()
        if self._group_of(microbatch) is not None:
            self.leave("a call that came before did not come")

    # -- the end of microbatches, and of the program -----------------------------------------------------------------

    def leave(self, why: str) -> None:
        """Leave the program for the rest of the step, if it has one; what is held back is sent by its own thread."""
        with self._lock:
            if self._following is None or self.left is not None:
                return
            self.left = why
            logger.debug("the step has left its program: %s", why)
            for stage in self._others:
                self._send(stage, ProgramLeft(why), [])
                for microbatch in sorted(self._finished[stage]):
                    self._release(stage, Release(microbatch))

    def microbatch_finished(self, microbatch: int) -> bool:
        """Return whether stages hear of the end of a microbatch by the program; the caller holds the lock."""
        if self._following is None or self.left is not None:
            return False
        for finished in self._finished.values():
            finished.add(microbatch)
        return True

    def keys_of(self, stage: int, microbatch: int) -> Sequence[CallKey]:
        """Return the calls of a microbatch that a stage has run, if it says that all of the program are done."""
        program = self._following
        return () if program is None else program.keys_of(stage, microbatch)


def _name_of(message: ForwardCall | BackwardCall) -> str:
    return f"module {str(message.module)!r}" if isinstance(message, ForwardCall) else "a backward pass"
