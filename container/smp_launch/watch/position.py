"""The position of a rank that does not go on: stopped, gone, in the script's code, or waiting for others."""

from __future__ import annotations

import enum
import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass

from smp_launch.watch.stacks import Frame, Thread  # noqa: TC001 - pydantic reads the class
from smp_launch.watch.states import State  # noqa: TC001 - as above
from smp_records.rank_record import BETWEEN, RankRecord, ScriptLine, Waiting
from smp_records.script_lines import is_ours, is_script_s, is_standard

#: Parts of paths that show which code a frame belongs to.
_LOADER = os.path.join("torch", "utils", "data", "")
_COMPILER = (os.path.join("torch", "_dynamo", ""), os.path.join("torch", "_inductor", ""))
_DISTRIBUTED = os.path.join("torch", "distributed", "")
_MPI = "mpi4py"
_PIPELINE = os.path.join("smp_runtime", "pipeline", "execution", "")

#: The interpreter's own files. If the innermost function is in one, the rank waits for another thread or process.
_LOCKS = {"threading.py", "queue.py", "connection.py", "_base.py", "popen_fork.py", "subprocess.py", "selectors.py"}

#: Of a line of the script that a report quotes.
_SHOWN_CHARACTERS = 80


class Standing(enum.Enum):
    """The reason why a rank does not go on."""

    STOPPED = "stopped"
    LEFT = "left"
    SCRIPT = "in the script"
    WAITING = "waiting"


@dataclass(frozen=True)
class RankPosition:
    """One rank of a job that does not go on.

    Attributes:
        where: its record.
        seconds: seconds since its last sign of life.
        line: line of the script at which it is.
        doing: its activity there, in words.
        call: the call in which it waits for others.
        wait: the open wait, if the record has one.
        is_active: whether it computes, or moves data.
        is_compiling: whether PyTorch's compiler is at work.
    """

    where: RankRecord
    standing: Standing
    seconds: float
    line: ScriptLine
    doing: str = ""
    call: str = ""
    wait: Waiting | None = None
    is_active: bool = False
    is_compiling: bool = False
    threads: tuple[Thread, ...] = ()

    @property
    def rank(self) -> int:
        """Return the rank's number in the job."""
        return self.where.rank

    @property
    def whom(self) -> tuple[int, ...]:
        """Return the other ranks that it waits for, if they are known."""
        if self.wait is None:
            return ()
        return tuple(rank for rank in self.wait.whom if rank != self.rank)

    def at(self) -> str:
        """Return the script's line with its source, as in ``at train.py:12 (for batch in loader:)``."""
        if not self.line:
            return "outside the script's own lines"
        source = linecache.getline(self.line.file, self.line.number).strip()
        if len(source) > _SHOWN_CHARACTERS:
            source = source[: _SHOWN_CHARACTERS - 1] + "…"
        return f"at {self.line} ({source})" if source else f"at {self.line}"


def describe_moment(where: RankRecord) -> str:
    """Describe when in its course a rank is, as in ``in backward of step 30``."""
    if where.phase == BETWEEN:
        return f"after step {where.step}"
    return f"in {where.phase} of step {where.step}" if where.step else "before the first step"


def position_of(
    where: RankRecord, state: State, threads: Sequence[Thread], now: float, *, is_active: bool
) -> RankPosition:
    """Return where a rank stands.

    Args:
        threads: its stacks; none if it could not write them.
        now: in seconds of the monotonic clock.
    """
    seconds = max(0.0, now - where.when)
    wait = where.waits[0] if where.waits else None
    standing, line, doing, call, compiling = Standing.WAITING, where.line, "", "", False
    has_left = bool(where.left) or state.has_ended
    # The stacks of a rank that has left are those of its shutdown.
    thread = None if has_left and not state.is_stopped else _of_script(threads, where.main_thread)
    if thread is not None:
        line = _line(thread) or line
    if state.is_stopped:
        standing, doing = Standing.STOPPED, "is stopped (by SIGSTOP, or by a debugger)"
    elif has_left:
        standing, doing = Standing.LEFT, "has left the job"
    elif thread is not None:
        standing, doing = _standing(thread, wait)
        call = wait.what if wait is not None else _call(thread)
        compiling = _is_compiling(thread)
    elif wait is None:
        standing, doing = Standing.SCRIPT, "does not go on"
    else:
        call = wait.what
    if standing is Standing.WAITING and wait is not None and not line:
        line = wait.line
    return RankPosition(where, standing, seconds, line, doing, call, wait, is_active, compiling, tuple(threads))


def _is_compiling(thread: Thread) -> bool:
    for frame in thread.frames:
        for part in _COMPILER:
            if part in frame.file:
                return True
    return False


def _of_script(threads: Sequence[Thread], main: int) -> Thread | None:
    """Return the thread that runs the script: a pipeline's thread in the script's code, else the main thread."""
    # A pipeline runs the script's tasks in threads; meanwhile the main thread only waits.
    for thread in filter(_is_in_script, threads):
        files = {frame.file for frame in thread.frames}
        if any(_PIPELINE in file for file in files):
            return thread
    for thread in threads:
        if thread.ident == main and thread.frames:
            return thread
    return None


def _significant(thread: Thread) -> Frame | None:
    """Return the innermost frame that is not the interpreter's own."""
    return next((frame for frame in thread.frames if not is_standard(frame.file)), None)


def _is_in_script(thread: Thread) -> bool:
    frame = _significant(thread)
    if frame is not None and frame.function == "<module>":
        return True  # it imports
    return frame is not None and not (is_ours(frame.file) or _DISTRIBUTED in frame.file or _MPI in frame.file)


def _standing(thread: Thread, wait: Waiting | None) -> tuple[Standing, str]:
    frame = _significant(thread)
    # If only Python's own frames of a thread are known, it counts as the script's.
    if frame is None or _is_in_script(thread):
        return Standing.SCRIPT, _doing(thread)
    if wait is not None or not is_ours(frame.file):
        return Standing.WAITING, ""
    # Without a wait that was announced, this library's code computes: other ranks may wait for this one.
    return Standing.SCRIPT, f"is in this library's {frame.function}"


def _doing(thread: Thread) -> str:
    inner = thread.frames[0]
    before_script = []
    for frame in thread.frames:
        if is_script_s(frame.file):
            break
        before_script.append(frame)
    if any(_LOADER in frame.file for frame in before_script):
        return "gets nothing from its data loader"
    if is_standard(inner.file) and os.path.basename(inner.file) in _LOCKS:
        return "waits for another thread or process of its own"
    return "does not go on"


def _line(thread: Thread) -> ScriptLine:
    frame = next((frame for frame in thread.frames if is_script_s(frame.file)), None)
    return ScriptLine(frame.file, frame.line) if frame is not None else ScriptLine("", 0)


def _call(thread: Thread) -> str:
    """Return the name of the PyTorch or MPI function that the script has called."""
    found = ""
    for frame in thread.frames:
        if is_script_s(frame.file):
            break
        # PyTorch wraps its collectives to log them.
        is_wrapper = frame.function == "wrapper"
        if _DISTRIBUTED in frame.file and not is_wrapper:
            found = f"torch.distributed.{frame.function}"
    return found or "another rank's message"
