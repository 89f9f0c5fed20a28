"""Runs the program that holds the ranks: passes its output on, its signals down, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from smp_launch.failures.fatal_errors import EXIT_SECONDS
from smp_launch.machine.output import ENDED_PREFIX, STARTED_PREFIX, LineAssembler, OutputLine, WholeLines
from smp_launch.machine.processes import adopt_orphans, find_descendants, is_ending, kill_descendants, reap, watch_end
from smp_launch.machine.rank_pipes import DESCRIPTORS, end_pipes, make_pipes, open_pipe
from smp_launch.sagemaker.environment import seconds_of
from smp_records.records import FAILURE_PREFIX

if TYPE_CHECKING:
    from smp_launch.failures.failure import FailureCollector
    from smp_launch.machine.signals import StopRequests
    from smp_launch.watch.watch import Hang, HangWatch

#: Overrides the seconds that ranks have after a request to stop.
GRACE_VARIABLE = "SMP_LAUNCH_GRACE_SECONDS"

#: The platform kills 120 s after SIGTERM; the rest is for the launcher to end well.
DEFAULT_GRACE = 110.0

#: Seconds after the ranks' grace until the launcher gives up, even when it is blocked.
LAST_RESORT = 8.0

#: Seconds for mpirun to report how the ranks ended; 4.1 needs 2.4 if some ignore SIGTERM.
_MPIRUN_PATIENCE = 3.5

#: Seconds that a job has to end after a rank failed: first the rank itself, then the others.
FAILURE_PATIENCE = EXIT_SECONDS + _MPIRUN_PATIENCE

#: The same if the script runs alone, since no other rank waits for its end.
FAILURE_PATIENCE_ALONE = 15.0

#: Seconds that a non-blocking write waits for a reader that takes nothing.
_READER_PATIENCE = 10.0

#: Seconds without output until leftover processes of the ranks are ended (after the last rank's end), or the rest of
#: the output is given up (after the program's end). Processes that go on writing have the longer time, as output may
#: have been held up.
_DRAIN_PATIENCE = 1.0
_LEFTOVER_PATIENCE = 10.0

#: Seconds without a byte that mpirun may take to end after all ranks have ended well, and all that they had started.
_MPIRUN_END_PATIENCE = 30.0

#: Read from a pipe at once.
_READ_BYTES = 1 << 16

#: Exit codes for a stop that the script did not turn into a success, as a shell has them.
_STOP_CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129}

#: Wherever it stands: an option of mpirun may have put a mark of its own before it.
_STARTED = re.compile(re.escape(STARTED_PREFIX) + r"(\d+) (\d+)")
_ENDED = re.compile(re.escape(ENDED_PREFIX) + r"(\d+) (-?\d+)")

#: Output of a rank without any of these is passed on as it is.
_MARKS = tuple(mark.encode() for mark in (STARTED_PREFIX, FAILURE_PREFIX))


@dataclass
class ProgramOutcome:
    """The outcome of a program's run.

    Attributes:
        returncode: as in ``subprocess``, negative for a signal.
        stopped_by: the first request to stop, such as ``SIGTERM``.
        overdue: why the remaining processes had to be killed; None if none had to be.
        first_ended: the rank that ended first; None if unknown.
        ended_unheard: ranks that ended before any rank had reported a failure; None if unknown.
        first_failed: the rank that failed first and its exit code, negative for a signal, if the process that
            started it reported them.
        hang: why the ranks made no progress, if they were killed for that.
    """

    returncode: int
    stopped_by: str | None = None
    overdue: str | None = None
    first_ended: int | None = None
    ended_unheard: set[int] | None = None
    first_failed: tuple[int, int] | None = None
    hang: Hang | None = None


@dataclass
class Supervisor:
    """One run of a program; use it once.

    Args:
        stop: the source of requests to stop.
        collector: processes every line, decides which to show, and knows whether a rank has failed.
        failing: returns whether something else failed that must end the job.
        failure_patience: seconds that the job has to end after a failure.
        ranks: how many ranks announce themselves.
        first_rank: the lowest of their numbers.
        local: whether all of them run on this machine.
        grace: seconds between a request to stop and the end of all patience.
        tags: see :class:`smp_launch.machine.output.LineAssembler`.
        apart: child processes of the launcher that are not part of the run.
        spare: child processes that are not part of the run either, but their children are.
        watch: notices that the ranks make no progress; None for no such watch.
        pipes: a folder of this user's own for pipes of each rank; None if ranks write to the program's output.
    """

    stop: StopRequests
    collector: FailureCollector
    failing: Callable[[], bool] = lambda: False
    failure_patience: float = FAILURE_PATIENCE
    ranks: int = 1
    first_rank: int = 0
    local: bool = True
    grace: float = DEFAULT_GRACE
    tags: str | None = None
    apart: Collection[int] = ()
    spare: Collection[int] = ()
    watch: HangWatch | None = None
    pipes: Path | None = None
    _selector: selectors.BaseSelector = field(init=False, default_factory=selectors.DefaultSelector)
    _process: subprocess.Popen[bytes] = field(init=False)
    _outcome: ProgramOutcome = field(init=False, default_factory=lambda: ProgramOutcome(0))
    _deadline: float = field(init=False, default=float("inf"))
    _why: str = field(init=False, default="")
    _open_pipes: set[int] = field(init=False, default_factory=set)
    _quiet: float = field(init=False, default=float("inf"))
    _quiet_since: float = field(init=False, default=0.0)
    _started: int = field(init=False, default=0)
    _watched: dict[int, int] = field(init=False, default_factory=dict)
    _ended: int = field(init=False, default=0)
    _failure_seen: bool = field(init=False, default=False)
    _stop_sent: bool = field(init=False, default=False)
    _orphans_ended: bool = field(init=False, default=False)

    def run(self, command: Sequence[str], environ: Mapping[str, str], cwd: str | os.PathLike[str]) -> ProgramOutcome:
        """Run to the end. No process that it started is alive when it returns."""
        adopt_orphans()
        self._outcome.ended_unheard = set() if self.local else None
        try:
            with self._selector:
                # Before any rank starts, so that it finds a reader.
                self._open_rank_pipes()
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environ),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Its own session: Ctrl-C in a terminal reaches only the launcher, which then decides.
                    start_new_session=True,
                )
                try:
                    self._attend()
                finally:
                    # Nothing of this attempt may live on: the next one needs its GPUs and ports.
                    left = kill_descendants(self.spare, self.apart)
                    self._process.wait()
                    reap({*self.apart, *self.spare})
        finally:
            for pipe in self._open_pipes:
                os.close(pipe)
        if left:
            write_own_line(f"{len(left)} process(es) did not end after SIGKILL: {left}")
        self._outcome.returncode = self._process.returncode
        return self._outcome

    def _attend(self) -> None:
        """Handle events until the program has ended and its output is read."""
        self._listen()
        gone = False
        while not gone or self._open_pipes:
            has_ended = not gone and self._process.poll() is not None
            if has_ended:
                gone = True
                self._on_program_end()
                if not self._open_pipes:
                    return  # nothing is left that could wake this up
            self._handle_next(gone=gone)
            self._look_for_failure()
            is_quiet = self._until(self._quiet_since + self._quiet) == 0.0
            if is_quiet and gone and not find_descendants(self.apart) - set(self.spare):
                return  # no process is left that could write
            if is_quiet or self._until(self._deadline) == 0.0:
                self._on_overdue()

    def _handle_next(self, *, gone: bool) -> None:
        """Wait for the next event or moment, and handle what is due then."""
        next_look = float("inf") if gone else self._next_look()
        moments = self._deadline, self._quiet_since + self._quiet, self.collector.release_at, next_look
        events = self._selector.select(self._until(min(moments)))
        self._handle([key for key, _ in events])
        if time.monotonic() >= self.collector.release_at:
            show(self.collector.release(), 2)
        if time.monotonic() >= next_look:
            self._look()

    def _next_look(self) -> float:
        return float("inf") if self.watch is None else self.watch.next_look

    def _handle(self, keys: list[selectors.SelectorKey]) -> None:
        """Handle what has come at once: ends of ranks, connections, and output."""
        outputs = [key for key in keys if key.fileobj in self._open_pipes]
        others = [key for key in keys if key.fileobj not in self._open_pipes]
        # If both arrive together, the end of a rank is the cause, and another rank's report of it the consequence.
        for key in (*others, *outputs):
            key.data()
        if outputs:
            # Patience runs from the last byte, and not while a slow reader holds this process up.
            self._quiet_since = time.monotonic()

    def _on_program_end(self) -> None:
        if self.pipes is not None:
            end_pipes(self.pipes, self.ranks)
        self._expect_quiet(_DRAIN_PATIENCE, "kept the output open after the job's end")

    def _look_for_failure(self) -> None:
        # Only the first failure counts, from which the patience runs.
        if self._failure_seen or not self._has_failed():
            return
        self._failure_seen = True
        self._expect(self.failure_patience, "did not end after a rank had failed")

    def _has_failed(self) -> bool:
        reported = self.collector.failing or self._outcome.first_failed
        return bool(reported) or bool(self.failing())

    def _open_rank_pipes(self) -> None:
        if self.pipes is None:
            return
        make_pipes(self.pipes, self.ranks)
        for number in range(self.ranks):
            for descriptor in DESCRIPTORS:
                pipe = open_pipe(self.pipes, number, descriptor)
                on_output = partial(self._on_rank_output, pipe, WholeLines(), descriptor, self.first_rank + number)
                self._add_pipe(pipe, on_output)

    def _listen(self) -> None:
        """Register requests to stop, the end of the parent process, and output."""
        self._selector.register(self.stop, selectors.EVENT_READ, self._on_signals)
        if self.stop.lifeline is not None:
            self._selector.register(self.stop.lifeline, selectors.EVENT_READ, self._on_lifeline)
        for stream, descriptor in ((self._process.stdout, 1), (self._process.stderr, 2)):
            if stream is not None:
                pipe = os.dup(stream.fileno())
                stream.close()
                self._add_pipe(pipe, partial(self._on_output, pipe, LineAssembler(self.tags), descriptor))

    def _add_pipe(self, pipe: int, on_output: Callable[[], None]) -> None:
        self._open_pipes.add(pipe)
        self._selector.register(pipe, selectors.EVENT_READ, on_output)

    def _close_pipe(self, pipe: int) -> None:
        self._selector.unregister(pipe)
        self._open_pipes.discard(pipe)
        os.close(pipe)

    def _on_output(self, pipe: int, assembler: LineAssembler, descriptor: int) -> None:
        """Read the output of the program, and of ranks that have no pipes of their own."""
        data = os.read(pipe, _READ_BYTES)
        lines = assembler.feed(data) if data else assembler.finish()
        shown: list[str] = []
        for line in lines:
            shown += self._take(line)
        show(shown, descriptor)
        if not data:
            self._close_pipe(pipe)

    def _on_rank_output(self, pipe: int, whole_lines: WholeLines, descriptor: int, rank: int) -> None:
        data = os.read(pipe, _READ_BYTES)
        lines = whole_lines.feed(data) if data else whole_lines.finish()
        has_mark = any(mark in lines for mark in _MARKS)
        # Most output passes as bytes: decoding it line by line costs much.
        if rank in self.collector.started and not has_mark:
            write(lines, descriptor)
        else:
            shown: list[str] = []
            for text in lines.decode("utf-8", "replace").split("\n")[:-1]:
                shown += self._take(OutputLine(text, rank))
            show(shown, descriptor)
        if not data:
            self._close_pipe(pipe)

    def _take(self, line: OutputLine) -> list[str]:
        """Process a line and return the lines to show for it."""
        if started := _STARTED.search(line.text):
            self._on_rank_start(int(started[1]), int(started[2]))
            return []
        is_launchers = self.pipes is not None and line.rank is None
        ended = _ENDED.match(line.text) if is_launchers else None
        if ended is not None:
            self._outcome.first_failed = self.first_rank + int(ended[1]), int(ended[2])
            return []
        unheard = not self.collector.records
        shown = self.collector.take(line)
        if unheard and self.collector.records:
            self._on_first_record()
        return shown

    def _on_rank_start(self, rank: int, pid: int) -> None:
        self._started += 1
        self.collector.started.add(rank)
        if self._outcome.stopped_by:
            self._send_stop()
        if not self.local:
            return
        try:
            watched = watch_end(pid)
        except ProcessLookupError:
            self._on_rank_end(rank, None)
            return
        if watched is None:
            self._outcome.ended_unheard = None  # the system has no way to watch a process
        else:
            self._watched[rank] = pid
            on_end = partial(self._on_rank_end, rank, watched)
            self._selector.register(watched, selectors.EVENT_READ, on_end)

    def _on_first_record(self) -> None:
        """Count ranks that are ending now among those that ended unheard.

        Their end is not reported yet, but other ranks lost their connections before.
        """
        if self._outcome.ended_unheard is not None:
            self._outcome.ended_unheard.update(rank for rank, pid in self._watched.items() if is_ending(pid))

    def _on_rank_end(self, rank: int, watched: int | None) -> None:
        """Record the end of a rank. After the last one, expect mpirun to end too.

        mpirun waits for children of ranks that hold their output.
        """
        if watched is not None:
            self._selector.unregister(watched)
            os.close(watched)
            del self._watched[rank]
        if self._outcome.first_ended is None:
            self._outcome.first_ended = rank
        if not self.collector.records and self._outcome.ended_unheard is not None:
            self._outcome.ended_unheard.add(rank)
        self._ended += 1
        if self._ended == self.ranks:
            self._expect_quiet(_DRAIN_PATIENCE, "outlived the ranks")

    def _on_signals(self) -> None:
        for name in self.stop.read():
            if name == "SIGINT" and self._outcome.stopped_by == "SIGINT":
                self._expect(0.0, "were interrupted a second time")
            self._on_stop(name)

    def _on_lifeline(self) -> None:
        if self.stop.lifeline_ended():
            self._selector.unregister(self.stop.lifeline or 0)
            self._on_stop("the end of the parent process")

    def _on_stop(self, reason: str) -> None:
        if self._outcome.stopped_by is not None:
            return
        self._outcome.stopped_by = reason
        self._expect(self.grace, f"did not end within {self.grace:g} s after {reason}")
        write_own_line(
            f"stopping because of {reason}; the ranks get SIGTERM and have {self.grace:g} s to save and exit"
        )
        self._send_stop()

    def _send_stop(self) -> None:
        """Send the stop signal once every rank can take it.

        Earlier, it would just kill a starting mpirun or Python. mpirun forwards SIGUSR2 to every rank on every host, but
        SIGTERM would make it kill them. The wrapper around the script turns SIGUSR2 into the rank's own SIGTERM.
        """
        if self._stop_sent or self._started < self.ranks or self._process.poll() is not None:
            return
        self._stop_sent = True
        self._process.send_signal(signal.SIGUSR2)

    def _look(self) -> None:
        """End a job if its ranks hang. A job that failed, or was stopped, ends by its own deadline."""
        if self.watch is None or self._failure_seen or self._outcome.stopped_by or self._outcome.hang:
            return
        try:
            self._outcome.hang = self.watch.look()
        except Exception:  # nothing that is wrong with the watch may end a job
            write_own_line(
                f"the watch over hangs has failed, and the job goes on without it:\n{traceback.format_exc()}"
            )
            self.watch = None
        if self._outcome.hang is not None:
            self._expect(0.0, "hung")  # overdue at once, which kills the ranks

    def _on_overdue(self) -> None:
        running = self._process.poll() is None
        self._deadline = float("inf")
        if self._ended == self.ranks and running and not self._orphans_ended:
            # The ranks are gone, but mpirun must still report how they ended.
            # It may wait for their children, so end those first.
            self._orphans_ended = True
            kill_descendants({self._process.pid, *self.spare}, self.apart)
            is_done = not (self._failure_seen or self._outcome.stopped_by)
            self._quiet = _MPIRUN_END_PATIENCE if is_done else _MPIRUN_PATIENCE
            self._quiet_since = time.monotonic()
            return
        if running:
            self._outcome.overdue = self._outcome.overdue or self._why
        kill_descendants(self.spare, self.apart)
        self._quiet, self._quiet_since = _DRAIN_PATIENCE, time.monotonic()

    def _expect_quiet(self, seconds: float, why: str) -> None:
        """Set the deadline for processes that may write: ``seconds`` without a byte of output."""
        self._quiet, self._quiet_since = seconds, time.monotonic()
        self._expect(_LEFTOVER_PATIENCE, why)
        self._why = self._why or why

    def _expect(self, seconds: float, why: str) -> None:
        """Set a deadline in ``seconds``. If there are several deadlines, the nearest one holds."""
        deadline = time.monotonic() + seconds
        if deadline < self._deadline:
            self._deadline, self._why = deadline, why

    def _until(self, moment: float) -> float | None:
        return None if moment == float("inf") else max(0.0, moment - time.monotonic())


def show(texts: Sequence[str], descriptor: int, patience: float = _READER_PATIENCE) -> None:
    """Write whole lines at once; see :func:`write`."""
    if texts:
        write(("\n".join(texts) + "\n").encode("utf-8", "replace"), descriptor, patience)


def write(data: bytes, descriptor: int, patience: float = _READER_PATIENCE) -> None:
    """Write all of ``data``; a reader that is gone is no reason to fail.

    Args:
        patience: seconds to wait for a slow reader of a non-blocking pipe; another process that shares it may have made it so.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            if not writable.poll(patience * 1000):
                return
        except OSError:
            return  # the reader of this process's output is gone


def write_own_line(text: str) -> None:
    """Write a line of the launcher itself to the job's log."""
    sys.stdout.flush()
    show([f"smp-launch: {text}"], 2)


def stop_code(reason: str) -> int:
    """Return the exit code of a job that was stopped and did not end well."""
    # As a shell reports SIGTERM: 128 + 15.
    return _STOP_CODES.get(reason, 143)


def exit_code(outcome: ProgramOutcome) -> int:
    """Return the exit code of a run that did not end well, as a shell would."""
    if outcome.stopped_by:
        return stop_code(outcome.stopped_by)
    return outcome.returncode if 0 < outcome.returncode < 256 else 1


def grace_seconds(environ: Mapping[str, str]) -> float:
    """Return the grace in seconds, from the environment or the default."""
    return seconds_of(environ, GRACE_VARIABLE, DEFAULT_GRACE)
