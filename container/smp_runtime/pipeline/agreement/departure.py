"""Departure of pipelines from a planned order: all leave it at the same place and continue in one order.

Ranks that split tensors or gather each other's parameters meet in collectives while their modules run. So
their stages must run the same work in the same order. A step may differ from its plan (a frozen layer, a
skipped one, one more call that waits). Each stage notices that at another moment, and what has arrived by
then differs from pipeline to pipeline. So:

1. Every stage halts: it finishes its running segment and begins no other.
2. The root stages compare the positions of their stages, and all stages go on to the farthest position.
   They can, because one pipeline has reached it with the same work.
3. No message is under way any more. Now all pipelines are in the same state, and hold the same tasks.
4. Each root stage lets one segment run at a time, on any stage, chosen by the schedule's policy. It waits
   each time until nothing is under way. Equal states lead to equal choices.

That is slow, but only for the rest of one step. The next step of this kind runs its microbatches one after
the other, and a new plan is made from it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_runtime.comm.control import timeout_seconds
from smp_runtime.errors import DeadlineError, SMPRuntimeError, SMPUserError
from smp_runtime.pipeline.transport.messages import Ask, StageProgress, Turn

if TYPE_CHECKING:
    import threading

#: Seconds without progress on the root stage before it asks the others whether anything still moves; each time twice as long.
FIRST_LOOK = 0.2
#: Seconds between two questions while stages compute: the first time, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.05


class StagePositions(NamedTuple):
    """The positions of a pipeline's stages in their planned orders."""

    of_stages: tuple[int, ...]


@dataclass(frozen=True)
class StageLinks:
    """The root stage's means to control the stages of its pipeline.

    Attributes:
        changed: notified when an answer arrives or the step fails; its lock guards the pipeline.
        stage: the root stage.
        others: the other stages.
        own: returns the root stage's progress; called with the lock held; halts the stage first if asked to.
        turn: takes a message to the root stage itself.
        send: sends a message to another stage.
        check: raises the error that has ended the step.
        is_finished: returns whether all microbatches are done.
        share: returns the values of all pipelines that run in one order, on the same stage.
    """

    changed: threading.Condition
    stage: int
    others: Sequence[int]
    own: Callable[[Ask], StageProgress]
    turn: Callable[[Turn], None]
    send: Callable[[int, Any, Sequence[Any]], None]
    check: Callable[[], None]
    is_finished: Callable[[], bool]
    share: Callable[[Any], list[Any]]


class Departure:
    """Detection of a planned order that cannot be followed, and the way out of it; on a root stage's script thread."""

    def __init__(self, links: StageLinks) -> None:
        self._links = links
        self._number = 0
        self._answers: dict[int, StageProgress] = {}
        self.reset()

    def reset(self) -> None:
        """Reset the state at the beginning of a step."""
        self._look_after = FIRST_LOOK
        self._asked = False
        self._before: Mapping[int, StageProgress] | None = None
        #: The values that the pipelines shared after some had reached the end of the step; None before.
        self._at_end: Sequence[Any] | None = None

    def at_end(self, diverged: bool) -> bool:
        """Return, at the end of the step here, whether any of the pipelines has left the planned order.

        Another pipeline may still lead its stages out of the order. Then all its remaining work is in the order, as
        it was here.
        """
        if self._at_end is None:
            self._at_end = self._links.share(diverged)
        return diverged or any(map(bool, self._at_end))

    def answered(self, stage: int, answer: StageProgress) -> None:
        """Record the answer of another stage."""
        with self._links.changed:
            if answer.number == self._number:
                self._answers[stage] = answer
                self._links.changed.notify_all()

    # -- whether there is anything that still moves ------------------------------------------------------------------

    def is_stuck(self, quiet: float) -> bool:
        """Return whether no stage computes, no message is under way, and nothing will ever happen.

        The caller holds the lock. The method asks the other stages and does not wait for them. Two rounds of equal
        answers prove that the step is stuck, so a later call finds out.

        Args:
            quiet: seconds since the root stage has computed.
        """
        if quiet < self._look_after:
            self._asked, self._before = False, None
            return False
        if self._asked and not self._has_all:
            return False
        if self._asked:
            answers = dict(self._answers)
            if not _is_quiet(answers):
                self._asked, self._before = False, None
                self._look_after = 2 * max(quiet, FIRST_LOOK)
                return False
            if self._before is not None and _are_same(self._before, answers):
                return True
            self._before = answers
        self._ask(halts=False)
        return False

    # -- the way out -------------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Lead the stages from the planned order to the end of the step.

        Raises:
            SMPUserError: the other pipelines have not left their orders.
            DeadlineError: a stage has made no progress in time.
        """
        links = self._links
        stages = sorted((links.stage, *links.others))
        answers = self._round(halts=True)
        shared = links.share(StagePositions(tuple(answers[stage].position for stage in stages)))
        if all(isinstance(each, StagePositions) for each in shared):
            farthest = map(max, zip(*(each.of_stages for each in shared), strict=True))
            limits = dict(zip(stages, farthest, strict=True))
        else:  # of pipelines that are at the end
            self._at_end = shared
            limits = dict.fromkeys(stages, sys.maxsize)
        for stage, limit in limits.items():
            self._turn(stage, Turn(limit, None))
        while True:
            answers = self._settled(limits)
            with links.changed:
                if links.is_finished():
                    return
            if self._at_end is not None:
                raise SMPUserError(
                    "pipelines whose ranks meet in collectives while their modules run took different courses through the model in "
                    "this step: this one has calls left, others are at its end; let the model call the same modules on all ranks "
                    "that split or shard its parameters together: branch on values that all of them have",
                    code="SMP306",
                )
            choices = [(*answer.ready, stage) for stage, answer in answers.items() if answer.ready is not None]
            if not choices:
                raise SMPRuntimeError(
                    "the step has left its planned order, and no stage of the pipeline has anything left to run, although "
                    "microbatches are not finished; please report this with the model's forward"
                )
            _, key, stage = min(choices, key=lambda choice: (choice[0], choice[2]))
            self._turn(stage, Turn(limits[stage], key))

    def _settled(self, limits: Mapping[int, int]) -> Mapping[int, StageProgress]:
        """Return the answers of all stages when each has reached its position, none computes and no message is under way."""
        before: Mapping[int, StageProgress] = {}
        changed_at, pause = time.monotonic(), FIRST_PAUSE
        while True:
            answers = self._round(halts=True)
            is_same = bool(before) and _are_same(before, answers)
            is_settled = self._have_arrived(answers, limits) and _is_quiet(answers)
            # The answers of one round are not from one moment. Only two equal rounds prove that nothing moved between them.
            if is_settled and is_same:
                return answers
            if not is_same:
                before, changed_at = answers, time.monotonic()
            if is_settled:
                continue  # the second round, which must not come later than the first
            self._check_deadline(changed_at)
            with self._links.changed:
                self._links.changed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _have_arrived(self, answers: Mapping[int, StageProgress], limits: Mapping[int, int]) -> bool:
        """Return whether all stages have reached their positions; after the end of the step there are none."""
        if self._at_end is not None:
            return True
        return all(answers[stage].position >= limit for stage, limit in limits.items())

    def _round(self, *, halts: bool) -> Mapping[int, StageProgress]:
        """Ask all stages, and wait for their answers."""
        began = time.monotonic()
        with self._links.changed:
            self._ask(halts=halts)
            while not self._has_all:
                self._links.check()
                self._check_deadline(began)
                self._links.changed.wait(1.0)
            self._links.check()
            return dict(self._answers)

    def _ask(self, *, halts: bool) -> None:
        links = self._links
        self._asked = True
        self._number += 1
        ask = Ask(self._number, halts)
        self._answers = {links.stage: links.own(ask)}
        for stage in links.others:
            links.send(stage, ask, [])

    @property
    def _has_all(self) -> bool:
        return len(self._answers) == 1 + len(self._links.others)

    def _turn(self, stage: int, turn: Turn) -> None:
        if stage == self._links.stage:
            self._links.turn(turn)
        else:
            self._links.send(stage, turn, [])

    def _check_deadline(self, since: float) -> None:
        seconds = timeout_seconds()
        if time.monotonic() - since > seconds:
            raise DeadlineError(
                f"the step has left its planned order, and no stage of the pipeline has come on for {seconds:.0f} s; check that "
                "every rank runs the same steps, or raise SMP_TIMEOUT_SECONDS"
            )


def _is_quiet(answers: Mapping[int, StageProgress]) -> bool:
    """Return whether no stage computes, and every sent message has been handled."""
    if any(answer.is_running for answer in answers.values()):
        return False
    for sender, receiver in itertools.permutations(answers, 2):
        sent = answers[sender].sent[receiver]
        handled = answers[receiver].handled[sender]
        if sent != handled:
            return False
    return True


def _are_same(before: Mapping[int, StageProgress], now: Mapping[int, StageProgress]) -> bool:
    return all(answer._replace(number=0) == now[stage]._replace(number=0) for stage, answer in before.items())
