"""The wait of one rank for another: its deadline, and the error if the other rank does not come."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smp_config import ConfigError, limits
from smp_records.rank_record import current_record
from smp_records.script_lines import is_runtime_module
from smp_runtime.errors import DeadlineError, RankLeftError, SMPUserError

if TYPE_CHECKING:
    from smp_runtime.comm.authentication import Seal

#: How a rank has left the job.
ENDED = "ended"
FAILED = "failed"

#: Seconds of a wait before this rank asks for the other one's place. It asks again after 2, 4, … times as long.
_QUIET_SECONDS = 0.2

#: Seconds between two looks at the other rank's last report.
_LOOK_SECONDS = 0.02

#: Seconds for messages that a rank sent before it left.
_UNDER_WAY_SECONDS = 0.3


def timeout_seconds() -> float:
    """Return the deadline of every wait, in seconds."""
    try:
        return limits.timeout_seconds(os.environ)
    except ConfigError as error:
        raise SMPUserError(str(error)).of_the_kind_of(error) from None


@dataclass(frozen=True)
class WaitingPlace:
    """The last state that a rank has reported: the call in which it waits, or how it has left."""

    call: str = ""  # the public call in which it waits
    left: str = ""  # how it has left the job, as in "ended its script"; empty while it is in it


class Carrier(Protocol):
    """Moves one pickled object from one rank to another; both calls return when the object has been received.

    Attributes:
        call: the public call that the script is in; empty outside.
        seal: for what ranks exchange by other ways, since strangers do not have its secret; None where there is no secret.
    """

    rank: int
    size: int
    call: str

    @property
    def seal(self) -> Seal | None:
        """See above."""

    def send(self, payload: Any, dest: int, channel: int) -> None:
        """Send an object to rank ``dest``."""

    def receive(self, source: int, channel: int) -> Any:
        """Return the next object from rank ``source`` on this channel."""

    def look(self, other: int, *, asks: bool) -> WaitingPlace | None:
        """Return the last place that rank ``other`` has reported, or None.

        Args:
            asks: report this rank's place to it, and ask for its own. The answer comes with a later look, if at all: a rank
                that computes does not answer.
        """

    def went_on(self) -> None:
        """Handle the end of a wait in which this rank has asked for another rank's place."""

    def close(self, left: str) -> None:
        """Leave the job, and report ``left`` to the ranks that wait for this one."""


class Wait:
    """The wait for another rank, which ends at the deadline, and soon after the other has left the job; a context manager.

    Args:
        longest: seconds of a pause at most; pauses get longer up to it, since ranks share cores with each other.
    """

    def __init__(self, carrier: Carrier, other: int, longest: float) -> None:
        self._carrier = carrier
        self._other = other
        self._longest = longest
        self._seconds = timeout_seconds()
        self._began = time.monotonic()
        self._next_look = self._began + min(_QUIET_SECONDS, self._seconds)
        self._asked = 0  # times
        self._noted: int | None = None  # in the record of this process, once it is worth a note
        self._left_at: float | None = None  # when it was first seen
        # Short at first: most answers are nearly there, and a pause adds to the latency of each message.
        self._pause = 20e-6

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        if self._noted is not None:
            current_record().close_wait(self._noted)
        if self._asked:
            self._carrier.went_on()

    def pause(self) -> None:
        """Let some time pass.

        Raises:
            RankLeftError: the other rank has left the job.
            DeadlineError: the wait took too long.
        """
        if time.monotonic() > self._next_look:
            self._look()
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, self._longest)

    def _look(self) -> None:
        now = time.monotonic()
        waited, self._next_look = now - self._began, now + _LOOK_SECONDS
        if self._noted is None:
            self._noted = current_record().open_wait(self._carrier.call or script_s_call(), (self._other,))
        asks = waited > _QUIET_SECONDS * 2**self._asked
        self._asked += asks
        place = self._carrier.look(self._other, asks=asks)
        if place is not None and place.left:
            self._left_at = self._left_at or now
            if now - self._left_at > _UNDER_WAY_SECONDS:
                raise left_error(self._carrier, {self._other: place.left})
        if waited > self._seconds:
            where = (
                f"waits in {place.call}" if place is not None and place.call else "is in no call that waits for a rank"
            )
            late = DeadlineError(
                f"rank {self._carrier.rank} waited {self._seconds:g} s in {self._carrier.call or script_s_call()} for rank "
                f"{self._other}, which {where}, as far as it has told; let every rank make the same calls in the same order, or "
                "raise SMP_TIMEOUT_SECONDS"
            )
            late.accused = (self._other,)
            raise late


def script_s_call() -> str:
    """Return the function of this library that the script has called, for messages without a named call."""
    frame, name = inspect.currentframe(), ""
    while frame is not None:
        if is_runtime_module(frame.f_globals.get("__name__", "")):
            owner = frame.f_locals.get("self")
            name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
        frame = frame.f_back
    return name.removesuffix(".__init__")


def left_error(carrier: Carrier, left: Mapping[int, str]) -> RankLeftError:
    """Return the error of a rank that cannot continue because others, by rank, have left the job."""
    error = RankLeftError(left_text(carrier, left))
    error.accused = tuple(left)
    return error


def left_text(carrier: Carrier, left: Mapping[int, str]) -> str:
    """Return the error message of a rank that cannot continue because others, by rank, have left the job."""
    call = carrier.call or script_s_call()
    whom = ", ".join(f"rank {rank}" for rank in left)
    if FAILED in left.values():
        return f"{whom} failed while rank {carrier.rank} is in {call}; the error of {whom} is the cause: see the log"
    return (
        f"{whom} ended its script while rank {carrier.rank} waits in {call}; call it on every rank: look for an `if` on the rank "
        "around it, or for a loop or an exit that depends on the rank"
    )
