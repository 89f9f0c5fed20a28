"""The stacks of a rank's threads, asked for from outside: the rank's handler writes them whatever its code does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from smp_records.rank_record import STACKS_SIGNAL, STACKS_SUFFIX

#: Seconds for all ranks to write their stacks.
_PATIENCE = 2.0
_PAUSE = 0.02
#: Seconds without another line, after which a rank's stacks count as whole even if their end does not show it.
_QUIET = 0.4
#: Outermost calls of a main thread. Its stack comes last.
_OUTERMOST = ("<module>", "_run_module_as_main")

#: What Python's ``faulthandler`` writes.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_CRASH = "Fatal Python error"
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


@dataclass(frozen=True)
class Thread:
    """A thread's stack, the innermost call first."""

    ident: int
    frames: tuple[Frame, ...]


def parse(text: str) -> tuple[Thread, ...]:
    """Read what ``faulthandler`` has written; of several dumps, the last one."""
    found: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            ident = int(thread[1], 16)
            found.pop(ident, None)
            current = found[ident] = []
        elif frame := _FRAME.match(line):
            current.append(Frame(frame[1], int(frame[2]) if frame[2].isdecimal() else 0, frame[3]))
    return tuple(Thread(ident, tuple(frames)) for ident, frames in found.items())


def ask(
    folder: Path, pids: dict[int, int], among: Collection[int], then: signal.Signals | None = None
) -> dict[int, tuple[Thread, ...]]:
    """Have ranks write their stacks.

    Args:
        folder: of the ranks' records.
        pids: process of each rank.
        among: ranks that can write: a stopped process cannot.
        then: a signal that they get behind it.

    Returns:
        The threads of each rank that has answered.
    """
    if STACKS_SIGNAL is None:
        return {}
    before: dict[int, int] = {}
    for rank in among:
        path = folder / f"{rank}{STACKS_SUFFIX}"
        try:
            # Stacks are appended to the file: the answer is behind what is there now.
            before[rank] = path.stat().st_size
            _interrupt(pids[rank], STACKS_SIGNAL)
            if then is not None:
                os.kill(pids[rank], then)
        except (OSError, KeyError):
            before.pop(rank, None)
    texts: dict[int, str] = {}
    changed = time.monotonic()
    deadline = changed + _PATIENCE
    while (now := time.monotonic()) < deadline:
        if _read_on(folder, before, texts):
            changed = now
        missing = [rank for rank in before if not _is_whole(texts.get(rank, ""))]
        if not missing or (now - changed > _QUIET and texts.keys() == before.keys()):
            break
        time.sleep(_PAUSE)  # files do not notify readers of growth
    return {rank: parse(text) for rank, text in texts.items()}


def _is_whole(text: str) -> bool:
    """Return whether the stacks end with the outermost call of the main thread.

    They are written a line at a time.
    """
    line = text[text.rfind("\n", 0, -1) + 1 :]
    frame = _FRAME.match(line.rstrip("\n")) if line.endswith("\n") else None
    return frame is not None and frame[3] in _OUTERMOST


def _interrupt(pid: int, number: int) -> None:
    """Send a signal to a process's main thread: of a stopped one, any thread would take it, while the main thread goes on."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # not in every C library
    if tgkill is None or tgkill(pid, pid, number) != 0:  # the main thread has the process's number
        os.kill(pid, number)


def ask_stopped(folder: Path, pids: dict[int, int], among: Collection[int]) -> dict[int, tuple[Thread, ...]]:
    """Have stopped processes write their stacks.

    Each one is resumed for as long as it takes to answer, and stopped again.
    """
    found: dict[int, tuple[Thread, ...]] = {}
    for rank in among:
        try:
            found |= ask(folder, pids, [rank], signal.SIGCONT)
        finally:
            # Also without an answer: someone has stopped the process, perhaps in a debugger.
            with contextlib.suppress(OSError):
                os.kill(pids[rank], signal.SIGSTOP)
    return found


def left_by_crash(folder: Path, rank: int) -> tuple[Thread, ...]:
    """Return the stacks that a rank left when it crashed in native code."""
    try:
        text = (folder / f"{rank}{STACKS_SUFFIX}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return parse(text.rpartition(_CRASH)[2]) if _CRASH in text else ()


def _read_on(folder: Path, before: dict[int, int], texts: dict[int, str]) -> bool:
    """Read new text, and return whether there was any."""
    grown = False
    for rank, size in before.items():
        try:
            with (folder / f"{rank}{STACKS_SUFFIX}").open("rb") as file:
                file.seek(size)
                text = file.read().decode("utf-8", "replace")
        except OSError:
            continue  # the rank has left none
        if text and text != texts.get(rank):
            texts[rank] = text
            grown = True
    return grown
