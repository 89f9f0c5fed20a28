"""The first cause of a job's end, found in the output of the ranks and mpirun."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smp_records.records import FAILURE_CHARACTERS, FailureRecord, parse_failure

if TYPE_CHECKING:
    from smp_launch.machine.output import OutputLine

#: Suffix of a failing rank's whole record, which it writes if the launcher runs on its machine. The rank's line is cut,
#: and may be lost.
REPORT_SUFFIX = ".json"

#: The first line has room for rank, exception and message, and leaves some for the traceback.
_HEADLINE_CHARACTERS = 640

#: mpirun's own messages stand between two such lines.
_RULE = re.compile(r"-{20,}$")

#: mpirun's messages about the signal that ended a rank, or about its exit code.
_BY_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_BY_CODE = re.compile(r"Process name: \S*,(\d+)\] Exit code: (\d+)")

#: Messages that only report a rank's end, which this module describes better.
_UNDERSTOOD = re.compile(
    r"exited on signal \d+|non-zero status, thus causing|Primary job terminated normally|MPI_ABORT was invoked"
    r"|has exited due to process rank|exiting improperly"
)
_CHATTER = re.compile(r"mpirun: Forwarding signal \d+ to job$")

#: Seconds and lines after which what follows a rule is shown all the same: mpirun writes its messages at once, and the
#: longest has some 50 lines.
_HOLD_SECONDS = 1.0
_HOLD_LINES = 100

#: Signals that are never the consequence of another rank's end. (mpirun itself ends the others with SIGTERM and
#: SIGKILL, but reports only the first process that ended.)
_FIRST_CAUSES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS})

#: Signals that stop a job: sent by the launcher, or by mpirun if a rank does not end.
_STOPS = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGKILL})

#: Error types in the report of a rank that chose its exit code; see :mod:`smp_launch.ranks.rank`.
_OWN_CODES = frozenset({"SystemExit", "ScriptError"})

#: Limits of the kept output of a rank before its script begins: the newest lines, and the characters of each.
_EARLY_LINES, _EARLY_CHARACTERS = 30, 400

#: A line that names an error, as those of Python and of the system's loader do.
_NAMES_ERROR = re.compile(r"\w*(?:Error|Exception|error)\b.*:")

_HINTS = {
    signal.SIGKILL: "often the machine ran out of memory: use a smaller batch, more microbatches or fewer processes",
    signal.SIGSEGV: "a crash in native code: run with PYTHONFAULTHANDLER=1 to see where",
    signal.SIGABRT: "native code gave up, as NCCL's watchdog does after SMP_TIMEOUT_SECONDS of waiting for a rank; its message "
    "is in the log above",
    signal.SIGBUS: "often shared memory (/dev/shm) is full: enlarge it or use fewer data loader workers",
}


@dataclass(frozen=True)
class Cause:
    """The reason why a job failed: one line for people, and further details.

    Attributes:
        error: name of the exception, if the cause is one.
        rank: the rank that failed; None if it is not known.
    """

    headline: str
    detail: str = ""
    error: str = ""
    rank: int | None = None

    def text(self) -> str:
        """Return the content of the failure file."""
        return self.headline + "\n" + (f"\n{self.detail.rstrip()}\n" if self.detail else "")


@dataclass
class FailureCollector:
    """Listens to all lines of a job and knows in the end why it failed.

    Args:
        host_of: returns the host's name of a rank.
        mpirun: whether mpirun runs the ranks; without it every line is the script's own.

    Attributes:
        release_at: when :meth:`release` is due, in seconds of ``time.monotonic()``; infinity if nothing is held back.
        last_seen: last known positions of ranks before they ended.
        started: ranks that have announced themselves, just before their script begins.
    """

    host_of: Callable[[int], str]
    mpirun: bool = True
    records: list[FailureRecord] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    release_at: float = float("inf")
    last_seen: dict[int, str] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    _early: dict[int, deque[str]] = field(default_factory=dict)
    _block: list[str] | None = None

    @property
    def failing(self) -> bool:
        """Return whether a rank is known to have failed."""
        if self.records:
            return True
        return self._ended(_BY_SIGNAL) is not None or self._ended(_BY_CODE) is not None

    def take(self, line: OutputLine) -> list[str]:
        """Process one line of output.

        Returns:
            The lines to show for it. The list is empty for failure records and for messages of mpirun that are reported
            better later. A block of mpirun's messages is held back until its end, for about a second at most, and then
            returned at once.
        """
        record = parse_failure(line.text)
        if record is not None:
            self.records.append(record)
            return []
        if line.rank is not None or not self.mpirun:
            if (rank := line.rank or 0) not in self.started:
                self._early.setdefault(rank, deque(maxlen=_EARLY_LINES)).append(line.text[:_EARLY_CHARACTERS])
            return [line.text]
        if _CHATTER.search(line.text):
            return []
        if self._block is None:
            if not _RULE.match(line.text):
                return [line.text]
            self._hold(line.text)
            return []
        if not _RULE.match(line.text):
            self._block.append(line.text)
            return self.release() if len(self._block) > _HOLD_LINES else []
        if len(self._block) == 1:
            # Nothing between them, so they end one message and begin another; the first was on its own.
            self._hold(line.text)
            return [line.text]
        return self._end_block([*self._block, line.text])

    def release(self) -> list[str]:
        """Return the lines held back so far if the end of their block did not come. Call it at :attr:`release_at`."""
        block, self._block, self.release_at = self._block or [], None, float("inf")
        self._note(block)
        return block

    def _hold(self, text: str) -> None:
        self._block, self.release_at = [text], time.monotonic() + _HOLD_SECONDS

    def read_reports(self, folder: Path) -> None:
        """Add the records that ranks left in ``folder``; they replace the same ranks' lines, which may be cut."""
        whole = {}
        for path in sorted(folder.glob(f"*{REPORT_SUFFIX}")):
            try:
                record = FailureRecord.model_validate_json(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # the rank was killed while it wrote
            whole[record.rank] = record
        self.records = [r for r in self.records if r.rank not in whole] + list(whole.values())

    def finish(self) -> list[str]:
        """Return the lines that are still held back."""
        return self._end_block(self._block) if self._block else []

    def _end_block(self, block: list[str]) -> list[str]:
        self._block, self.release_at = None, float("inf")
        return [] if _UNDERSTOOD.search(self._note(block)) else block

    def _note(self, block: list[str]) -> str:
        inner = [text for text in block if not _RULE.match(text)]
        message = " ".join(" ".join(inner).split())
        if message:
            self.messages.append(message)
        return message

    def first_cause(
        self,
        returncode: int,
        stopped_by: str | None = None,
        program: str = "mpirun",
        first_ended: int | None = None,
        ended_unheard: Collection[int] | None = None,
        first_failed: tuple[int, int] | None = None,
    ) -> Cause:
        """Decide why the job failed.

        Args:
            returncode: return code of the program that ran the ranks; negative for a signal, as in ``subprocess``.
            stopped_by: the signal or event that asked the job to stop, if any.
            program: name of the program that ran the ranks, for the message.
            first_ended: the rank that ended first, if known.
            ended_unheard: ranks that ended before any rank had reported a failure; None if unknown.
            first_failed: the rank that failed first and its exit code, negative for a signal, if the process that
                started it reported them.
        """
        record = self._first_record()
        death, code, is_reported = self._first_end(returncode, first_ended, first_failed)
        if death is not None and (record is None or self._caused_others(death, stopped_by, ended_unheard)):
            rank, number = death
            early = None if stopped_by else self._ended_early(rank, -number)
            return early or self._killed(rank, number, stopped_by)
        if code is not None and (record is None or self._came_first(code, is_reported, ended_unheard)):
            rank, number = code
            return self._ended_early(rank, number) or self._ended_silently(rank, number)
        if record is not None:
            detail = record.traceback or record.message
            mark = f" [{record.code}]" if record.code else ""
            return Cause(_one_line(record.headline(), mark), detail, record.error_type, record.rank)
        if stopped_by:
            return Cause(f"the job was stopped by {stopped_by} before its script ended")
        return self._end_of_program(program, returncode)

    def _first_end(
        self, returncode: int, first_ended: int | None, first_failed: tuple[int, int] | None
    ) -> tuple[tuple[int, int] | None, tuple[int, int] | None, bool]:
        """Return the first rank that failed, with its signal, or else with its exit code, and whether it was reported.

        An end that was not reported is a guess. See :meth:`first_cause` for the arguments.
        """
        death, code = self._ended(_BY_SIGNAL), self._ended(_BY_CODE)
        if death is not None or code is not None:
            return death, code, code is not None
        if first_failed is not None:
            rank, number = first_failed
            if number > 0:
                return None, first_failed, True
            return (rank, -number), None, False
        if first_ended is None:
            return None, None, False
        # mpirun does not always report it, but its exit code is that of the first rank that failed.
        if returncode < 0:
            return (first_ended, -returncode), None, False
        if returncode > 128:  # as shells report signals
            return (first_ended, returncode - 128), None, False
        return None, (first_ended, returncode) if returncode else None, False

    def _caused_others(
        self, death: tuple[int, int], stopped_by: str | None, ended_unheard: Collection[int] | None
    ) -> bool:
        """Return whether a rank's death by a signal has caused the failures that other ranks reported."""
        rank, number = death
        reporters = {record.rank for record in self.records}
        if rank in reporters:
            return False
        if number in _FIRST_CAUSES:
            return True
        # A rank that is stopped before it can handle the signal makes others fail that are still at work.
        is_unheard = ended_unheard is not None and rank in ended_unheard
        return stopped_by is not None and number in _STOPS and is_unheard

    def _end_of_program(self, program: str, returncode: int) -> Cause:
        """Return the end of the program that ran the ranks as the cause, or the output of a rank that had not begun."""
        how = f"was killed by {_signal_name(-returncode)}" if returncode < 0 else f"ended with code {returncode}"
        # A rank that ended before its script began could report nothing.
        if not self.messages:
            silent = self._first_early()
            cause = None if silent is None else self._ended_early(silent, returncode)
            if cause is not None:
                return cause
        known = f": {self.messages[0]}" if self.messages else "; its messages are in the log"
        return Cause(_one_line(f"{program} {how}{known}"), "\n".join(self.messages))

    def _ended_silently(self, rank: int, number: int) -> Cause:
        return Cause(
            f"rank {rank} ({self.host_of(rank)}): ended with exit code {number}{self._where(rank)}; it did not raise an "
            "exception, so the script or a library called os._exit: its last words are in the log",
            self.consequences(),
            rank=rank,
        )

    def _ended_early(self, rank: int, number: int) -> Cause | None:
        """Return the last output of a rank that ended before its script began; None if the script began or there is no output."""
        words = [text for text in self._early.get(rank, ()) if text.strip()]
        if rank in self.started or not words:
            return None
        # An error's line is the better explanation than what a library writes after it.
        last = words[-1]
        for text in words:
            if _NAMES_ERROR.search(text):
                last = text
        if number < 0:
            how = f"was killed by signal {-number}"
        else:
            how = f"ended with exit code {number}"
        headline = f"rank {rank} ({self.host_of(rank)}): {how} before its script began: {last.strip()}"
        return Cause(_one_line(headline), "\n".join(words), rank=rank)

    def _first_early(self) -> int | None:
        """Return the lowest rank that has output, but has not begun its script."""
        return min((rank for rank in self._early if rank not in self.started), default=None)

    def _first_record(self) -> FailureRecord | None:
        """Return the record of the first cause.

        A record that only blames a rank which reported its own failure is a consequence, and does not count.
        If all records blame other ranks, return the record of the rank that is blamed most.
        Clocks of hosts differ, so a consequence may seem to come first.
        """
        if not self.records:
            return None
        own = {record.rank for record in self.records if not record.accused}
        if not own:
            return self._most_accused()
        # A rank that blames another one, which has reported its own failure, only noticed that failure.
        causes = [record for record in self.records if own.isdisjoint(record.accused)]
        return min(causes, key=_time_of, default=None)

    def _most_accused(self) -> FailureRecord:
        """Return the record of the rank that the others blame most, if no rank has failed on its own account."""
        # A rank that has lost all others is more likely to be cut off than all of them.
        votes: dict[int, float] = defaultdict(float)
        for record in self.records:
            for rank in record.accused:
                votes[rank] += 1 / len(record.accused)
        reporters = {record.rank for record in self.records}

        def standing(rank: int) -> tuple[float, bool]:
            # Among equal votes, prefer a rank without a report.
            # A rank that reported blames another one, which may be its cause.
            return -votes[rank], rank in reporters

        blamed, *others = sorted(votes, key=standing)
        if others and standing(others[0]) == standing(blamed):
            return min(self.records, key=_time_of)  # each blames the other
        for record in self.records:
            if record.rank == blamed:
                return record
        accusers = [record for record in self.records if blamed in record.accused]
        first = min(accusers, key=_time_of)
        message = f"as rank {first.rank} tells: {first.message}"
        return first.model_copy(update={"rank": blamed, "host": self.host_of(blamed), "message": message})

    def _came_first(self, code: tuple[int, int], is_told: bool, ended_unheard: Collection[int] | None) -> bool:
        """Return whether a rank's silent end came before the failures that others reported, and caused them.

        Args:
            code: the rank and its exit code.
            is_told: whether mpirun, or what replaces it, reported the code; otherwise it is a guess.
        """
        rank, number = code
        reporters = {record.rank for record in self.records}
        was_heard = ended_unheard is not None and rank not in ended_unheard
        if rank in reporters or was_heard:
            return False
        if is_told:
            return True
        # A rank that raises ends with 1. So another code is not from a rank that has reported its exception.
        if number == 1:
            return False
        reported = {record.error_type for record in self.records}
        return reported.isdisjoint(_OWN_CODES)

    def _where(self, rank: int) -> str:
        return f" {self.last_seen[rank]}" if rank in self.last_seen else ""

    def consequences(self) -> str:
        """Return the failures that ranks reported, if something else is the cause."""
        return "\n\n".join(f"then {r.headline()}\n{r.traceback}" for r in self.records)

    def _ended(self, pattern: re.Pattern[str]) -> tuple[int, int] | None:
        """Return the rank that ended first with a message like ``pattern``, and its signal or exit code."""
        found = next(filter(None, map(pattern.search, self.messages)), None)
        return (int(found[1]), int(found[2])) if found else None

    def _killed(self, rank: int, number: int, stopped_by: str | None) -> Cause:
        where = f"rank {rank} ({self.host_of(rank)})"
        if stopped_by and number in _STOPS:
            return Cause(
                f"{where}: the job was stopped by {stopped_by} and the script did not exit with 0; to save and end well, "
                "give it a handler for SIGTERM that exits with 0"
            )
        hint = _HINTS.get(signal.Signals(number)) if number in set(signal.Signals) else None
        return Cause(
            f"{where}: was killed by signal {number} ({_signal_name(number)}){self._where(rank)}"
            + (f": {hint}" if hint else ""),
            self.consequences(),
            rank=rank,
        )


def write_failure(path: Path, cause: Cause) -> bool:
    """Write the failure file at once and whole, unless there is one; return whether it was written.

    A script may write its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(cause.text(), encoding="utf-8", errors="replace")
    try:
        os.link(temporary, path)  # unlike a rename, never replaces
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if path.exists():
            return False
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _time_of(record: FailureRecord) -> float:
    """Return when a failure happened; those without a time come last."""
    return record.when or float("inf")


def _one_line(text: str, end: str = "") -> str:
    line = " ".join(text.split())
    limit = min(_HEADLINE_CHARACTERS, FAILURE_CHARACTERS) - len(end)
    return (line if len(line) <= limit else line[: limit - 1] + "…") + end


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)  # real-time signals have no names in Python
