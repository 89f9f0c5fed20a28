"""How pipelines whose ranks meet in collectives leave a planned order: at the same place, and into the same order.

Ranks that split tensors or gather each other's parameters meet in collectives while their modules run, so their stages must
run the same work in the same order. A step that takes another course than planned (a frozen layer, a skipped one, a call that
waits once more) is seen by each stage at another moment, and what has arrived by then differs from pipeline to pipeline. So:

1. Every stage halts: it finishes its running segment and begins no other.
2. The root stages compare how far each of their stages has come, and all go on to the farthest place. They can: one of them has
   been there, with the same work.
3. No message is under way any more. Now all pipelines are in the same state, and hold the same tasks.
4. Each root stage has one segment run at a time, on whichever stage, chosen by the schedule's policy, and waits each time until
   nothing is under way. Equal states lead to equal choices.

That is slow, but only for the rest of one step. The next step of the kind runs its microbatches one after the other, and is
planned from anew.
"""

from __future__ import annotations

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
    """How far the stages of a pipeline have come in their planned orders."""

    of_stages: tuple[int, ...]


@dataclass(frozen=True)
class StageLinks:
    """What leads a pipeline's stages, on the root stage.

    Attributes:
        changed: told when an answer has come, or the step fails; its lock guards the pipeline.
        stage: the root stage.
        others: the other stages.
        own: how far the root stage is, called with the lock held; halts it first if asked to.
        turn: takes a message to the root stage itself.
        send: sends a message to another stage.
        check: raises what has ended the step.
        is_finished: whether all microbatches are done.
        share: gives the values of all pipelines that run in one order, on the same stage.
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
    """Sees that a planned order cannot be followed, and leads the stages out of it; on the script's thread of a root stage."""

    def __init__(self, links: StageLinks) -> None:
        self._links = links
        self._number = 0
        self._answers: dict[int, StageProgress] = {}
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        self._look_after = FIRST_LOOK
        self._asked = False
        self._before: Mapping[int, StageProgress] | None = None
        #: What the pipelines have told each other when some of them were at the end of the step.
        self._at_end: Sequence[Any] | None = None

    def at_end(self, diverged: bool) -> bool:
        """The step has come to its end here; returns whether any of the pipelines has left the planned order.

        Another may still lead its stages out of it: then all that is left for it is in the order, as it was here.
        """
        if self._at_end is None:
            self._at_end = self._links.share(diverged)
        return diverged or any(map(bool, self._at_end))

    def answered(self, stage: int, answer: StageProgress) -> None:
        """Another stage has answered."""
        with self._links.changed:
            if answer.number == self._number:
                self._answers[stage] = answer
                self._links.changed.notify_all()

    # -- whether there is anything that still moves ------------------------------------------------------------------

    def is_stuck(self, quiet: float) -> bool:
        """With the lock held: whether no stage computes, no message is under way, and nothing will ever happen.

        Asks the other stages and does not wait for them: two rounds of equal answers show it, a later call sees them.

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
            DeadlineError: a stage has not come on in time.
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
                    "that split or shard its parameters together: branch on values that all of them have"
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
        """Answers of all stages when each is at its place, none computes and no message is under way."""
        before: Mapping[int, StageProgress] = {}
        changed_at, pause = time.monotonic(), FIRST_PAUSE
        while True:
            answers = self._round(halts=True)
            is_same = bool(before) and _are_same(before, answers)
            there = self._at_end is not None or all(answers[stage].position >= limits[stage] for stage in limits)
            if there and is_same and _is_quiet(answers):
                return answers
            if not is_same:
                before, changed_at = answers, time.monotonic()
            if _is_quiet(answers) and there:
                continue  # the second round, which must not come later than the first
            self._check_deadline(changed_at)
            with self._links.changed:
                self._links.changed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

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
    """Whether no stage computes, and all that was sent has been handled."""
    if any(answer.is_running for answer in answers.values()):
        return False
    return all(
        answer.sent[other] == answers[other].handled[stage]
        for stage, answer in answers.items()
        for other in answers
        if other != stage
    )


def _are_same(before: Mapping[int, StageProgress], now: Mapping[int, StageProgress]) -> bool:
    return all(answer._replace(number=0) == now[stage]._replace(number=0) for stage, answer in before.items())
