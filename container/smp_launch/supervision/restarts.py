"""Starting the ranks of a job again after a failure: how often, after which pause, and which failures are worth it."""

from __future__ import annotations

import re
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smp_config.recovery import RESTARTS_VARIABLE
from smp_launch.failures.failure import Cause
from smp_launch.supervision.supervise import stop_code, write_own_line

if TYPE_CHECKING:
    from smp_launch.machine.signals import StopRequests

#: Errors of a script, by name, that come again however often it is started, as long as it has not made a step.
_OF_THE_SCRIPT = frozenset(
    """AssertionError AttributeError ConfigError ImportError IndentationError ModuleNotFoundError NameError NotInitializedError
    SMPUserError SyntaxError SystemExit TabError TypeError UnboundLocalError UnsupportedError ValidationError""".split()
)

#: Seconds before the second restart without progress; each further one waits twice as long, and none longer than the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0

#: What differs in the words of one and the same failure: numbers of processes, seconds, addresses.
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")

#: Shown characters of the last failure's headline, behind the first one's.
#: Both together must fit into the platform's limit.
_SHOWN_CHARACTERS = 200

#: Of each failure, in the detail.
_TOLD_CHARACTERS = 4000


@dataclass(frozen=True)
class Attempt:
    """The outcome of one start of the ranks.

    Attributes:
        code: the exit code.
        cause: why the ranks failed; None if they did not.
        step: step that the failed rank had begun, or, if that is not known, any rank; None before the first.
        is_final: whether the ranks are not started again in any case: the job was stopped, or a host is gone for good.
        is_host_lost: whether a host is gone that the job can go on without; the same fault cannot come again then.
    """

    code: int
    cause: Cause | None = None
    step: int | None = None
    is_final: bool = False
    is_host_lost: bool = False

    @property
    def fault(self) -> tuple[str, int | None]:
        """Return a key that is equal if the same fault happens at the same step."""
        headline = self.cause.headline if self.cause else ""
        return _NUMBERS.sub("#", headline), self.step


@dataclass
class Restarts:
    """The starts of one job's ranks; use it once.

    Args:
        limit: how often they may be started again.
        stop: the source of requests to stop while no rank runs.
        clear: removes what a failed start may have left and the next start would stumble over.
    """

    limit: int
    stop: StopRequests
    clear: Callable[[], object] = lambda: None
    _failed: list[Attempt] = field(default_factory=list)
    _idle: int = 0  # restarts since the last that has brought the job further

    def run(self, start: Callable[[int], Attempt]) -> tuple[int, Cause | None]:
        """Start the ranks until they end well, or it is no use.

        Args:
            start: runs them to their end; it is given how often they were started before.

        Returns:
            The exit code, and why the job failed when it is not 0.
        """
        while True:
            attempt = start(len(self._failed))
            if attempt.cause is None:
                return attempt.code, None
            why_not = self._why_not(attempt)
            self._idle = 0 if self._is_further(attempt) else self._idle + 1
            self._failed.append(attempt)
            if why_not is not None:
                return attempt.code, self._all_causes(why_not)
            pause = 0.0 if self._idle == 0 else min(_FIRST_PAUSE * 2 ** (self._idle - 1), _LONGEST_PAUSE)
            write_own_line(
                f"failed {_at(attempt)}: {attempt.cause.headline}; the ranks are started again"
                f"{f' in {pause:g} s' if pause else ''} (restart {len(self._failed)} of {self.limit})"
            )
            if (by := self._pause(pause)) is not None:
                return stop_code(by), self._all_causes(
                    f"the job was stopped by {by} before its ranks were started again"
                )
            self.clear()

    def _why_not(self, attempt: Attempt) -> str | None:
        """Return why the ranks are not started again, or None if they are.

        The reason is empty if the log needs no word about it.
        """
        if self.limit == 0 or attempt.cause is None or attempt.is_final:
            return ""
        # A lost host is no fault of the script's.
        if not attempt.is_host_lost:
            is_script_s = attempt.cause.error in _OF_THE_SCRIPT
            if is_script_s and not attempt.step:
                return "before the first step, such an error would come again: the ranks are not started again"
            faults = [former.fault for former in self._failed]
            if attempt.fault in faults:
                return f"the same fault came {_at(attempt)} before: the ranks are not started again"
        if len(self._failed) >= self.limit:
            return f"all {self.limit} restarts of {RESTARTS_VARIABLE} are used up"
        return None

    def _is_further(self, attempt: Attempt) -> bool:
        """Return whether the job came further than at its last failures. The next restart then need not wait."""
        steps = [failed.step or 0 for failed in self._failed]
        furthest = max(steps, default=-1)
        step = attempt.step or 0
        return step > furthest

    def _pause(self, seconds: float) -> str | None:
        """Wait, and return who asked to stop meanwhile or before, if anyone did."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.stop, selectors.EVENT_READ)
            if self.stop.lifeline is not None:
                selector.register(self.stop.lifeline, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.fileobj is not self.stop:
                        if self.stop.lifeline_ended():
                            return "the end of the parent process"
                    elif names := self.stop.read():
                        return names[0]
                if time.monotonic() >= deadline:
                    return None

    def _all_causes(self, why_not: str) -> Cause:
        """Return the first cause, with the outcome of the restarts."""
        first, last = self._failed[0].cause, self._failed[-1].cause
        if first is None or last is None:
            raise AssertionError("a failed start has no cause")
        if not why_not:
            return last
        if len(self._failed) == 1:
            return Cause(f"{first.headline} ({why_not})", first.detail, first.error, first.rank)
        count = len(self._failed) - 1
        after = f"after {count} restart{'s' * (count != 1)}"
        again = "" if last.headline == first.headline else f"; the last failure: {last.headline[:_SHOWN_CHARACTERS]}"
        told = [
            f"start {number}, failed {_at(failed)}: {failed.cause.text()[:_TOLD_CHARACTERS]}"
            for number, failed in enumerate(self._failed, 1)
            if failed.cause is not None
        ]
        headline = f"{first.headline} ({after}; {why_not}){again}"
        return Cause(headline, "\n".join(told), first.error, first.rank)


def _at(attempt: Attempt) -> str:
    return f"in step {attempt.step}" if attempt.step else "before the first step"
